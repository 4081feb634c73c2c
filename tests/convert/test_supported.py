"""Proves: there is one rule for the dtypes that memopt's ops take. The ops themselves, converted
modules and intercepted functions agree on every pair of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memopt
from memopt._convert.supported import has_kernels_for, supports
from memopt._extension import _C
from tests.convert.support import memopt_ops

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.complex64,
    torch.float8_e4m3fn,
)


def took(call: Callable[[], Tensor]) -> bool:
    try:
        return bool(memopt_ops(call))
    except (RuntimeError, NotImplementedError):  # PyTorch's own, which takes other dtypes
        return False


@pytest.mark.parametrize(("input", "parameter"), [*itertools.product(DTYPES, DTYPES)], ids=str)
def test_everything_that_asks_agrees(input: torch.dtype, parameter: torch.dtype) -> None:
    x, weight = torch.ones(2, 8).to(input), torch.ones(8).to(parameter)
    expected = parameter in _C.dtypes().get(input, ())
    assert supports(x, weight) == expected
    assert took(lambda: torch.ops.memopt.layer_norm(x, (8,), weight)) == expected
    module = nn.LayerNorm(8, bias=False)
    module.weight = nn.Parameter(weight, requires_grad=False)
    memopt.convert(module, functional=False)
    assert took(lambda: module(x)) == expected
    with memopt.convert.functions():
        assert took(lambda: F.layer_norm(x, (8,), weight)) == expected


def test_of_an_input_alone() -> None:
    for dtype in DTYPES:
        assert supports(torch.ones(2).to(dtype)) == (dtype in _C.dtypes())


def test_devices_are_those_of_the_build() -> None:
    cuda = ["cuda"] if _C.build_info()["cuda"] else []
    assert _C.device_types() == ["cpu", "meta", *cuda]
    assert has_kernels_for(torch.device("cpu"))
    assert not has_kernels_for(torch.device("mps"))
