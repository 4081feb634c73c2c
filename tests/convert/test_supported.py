"""Proves: there is one rule for the dtypes that memopt's ops take. The ops themselves, converted
modules and intercepted functions agree on every pair of them. A norm whose eps the ops do not take
is PyTorch's as before.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

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


class HandwrittenNorm(nn.Module):
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(8) + 0.5), eps

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.weight * x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return y


FUNCTIONS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "layer_norm": lambda x, eps: F.layer_norm(x, (8,), eps=eps),
    "rms_norm": lambda x, eps: F.rms_norm(x, (8,), eps=eps),
    "group_norm": lambda x, eps: F.group_norm(x, 2, eps=eps),
    "instance_norm": lambda x, eps: F.instance_norm(x, eps=eps),
    "batch_norm": lambda x, eps: torch.batch_norm(
        x, None, None, torch.zeros(8), torch.ones(8), False, 0.1, eps, False
    ),  # F.batch_norm refuses negative ones itself
}


@pytest.mark.parametrize("eps", [-0.01, float("inf"), float("nan")])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_with_an_eps_that_pytorch_alone_takes(name: str, eps: float) -> None:
    x, call = torch.randn(4, 8, 8), FUNCTIONS[name]
    with memopt.convert.functions():
        assert not took(lambda: call(x, eps))
        inside = call(x, eps)
    assert torch.equal(inside.nan_to_num(), call(x, eps).nan_to_num())


@pytest.mark.parametrize("eps", [-0.01, float("inf"), float("nan")])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    "norm", [nn.LayerNorm, nn.RMSNorm, partial(nn.GroupNorm, 2), HandwrittenNorm]
)
def test_modules_with_an_eps_that_pytorch_alone_takes(
    norm: Callable[..., nn.Module], when: str, eps: float
) -> None:
    """Also where it was another one when the module was converted."""
    x = torch.randn(4, 8, 8)
    made: Any = norm(8, eps=1e-5) if norm is not HandwrittenNorm else HandwrittenNorm(1e-5)
    model = nn.Sequential(made)
    if when == "after":
        memopt.convert(model)
    model[0].eps = eps  # type: ignore[assignment]
    expected = copy.deepcopy(made).requires_grad_(False) if when == "before" else None
    memopt.convert(model)
    assert not took(lambda: model(x))
    if expected is not None:
        assert torch.equal(model(x).nan_to_num(), expected(x).nan_to_num())
