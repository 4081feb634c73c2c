"""Proves: inside memopt.convert.functions() calls of torch.nn.functional are memopt's where memopt
takes them and PyTorch's where it does not, in the calling thread alone, and never outside.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memopt
from tests.convert.support import memopt_ops, one_step

WEIGHT, BIAS = torch.rand(8) + 0.5, torch.randn(8)
CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "layer_norm": lambda x: F.layer_norm(x, (8,), WEIGHT, bias=BIAS),
    "layer_norm, eps": lambda x: F.layer_norm(x, [8], eps=1e-3),
    "rms_norm": lambda x: F.rms_norm(x, (8,), WEIGHT, 1e-3),
    "gelu": F.gelu,
    "gelu, tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
    "modules": nn.Sequential(nn.LayerNorm(8), nn.GELU(), nn.SiLU(), nn.ReLU(), nn.RMSNorm(8)),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_calls_are_memopt_s_inside_alone(call) -> None:
    x = torch.randn(3, 8, requires_grad=True)
    expected = one_step(lambda: call(x), x)
    assert memopt_ops(lambda: call(x)) == []
    with memopt.convert.functions():
        assert memopt_ops(lambda: call(x))
        actual = one_step(lambda: call(x), x)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert memopt_ops(lambda: call(x)) == []


def test_dropout_needs_no_mask() -> None:
    x = torch.randn(3, 8, requires_grad=True)
    with memopt.convert.functions():
        assert memopt_ops(lambda: F.dropout(x, 0.5)) == ["memopt::_dropout_forward"]
        assert F.dropout(x, 0.5, training=False) is x
        with pytest.raises(ValueError, match="between 0 and 1"):
            F.dropout(x, 1.5)


LEFT: dict[str, Callable[[Tensor], Tensor]] = {
    "in place": lambda x: F.relu(x.clone(), inplace=True),
    "dropout in place": lambda x: F.dropout(x.clone(), 0.0, inplace=True),
    "integers": lambda x: F.relu(x.int()),
    "sparse": lambda x: F.relu(x.to_sparse()).to_dense(),
    "another function": torch.tanh,
    "a method": lambda x: x.sigmoid(),
}


@pytest.mark.parametrize("call", LEFT.values(), ids=LEFT)
def test_other_calls_are_pytorch_s(call) -> None:
    x = torch.randn(3, 8)
    with memopt.convert.functions():
        assert memopt_ops(lambda: call(x)) == []
        inside = call(x)
    assert torch.equal(inside, call(x))


def test_in_place_is_in_place() -> None:
    x = torch.randn(3, 8)
    with memopt.convert.functions():
        assert F.silu(x, inplace=True) is x


def test_errors_are_pytorch_s() -> None:
    x = torch.randn(3, 8)
    with memopt.convert.functions():
        for call in (
            lambda: F.gelu(x, "tanh"),
            lambda: F.layer_norm(x),
            lambda: F.silu(x, nonsense=1),
        ):
            with pytest.raises(TypeError):
                call()


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.hessian])
def test_transforms_are_pytorch_s(transform) -> None:
    x = torch.randn(8)
    with memopt.convert.functions():
        ours = transform(lambda x: F.gelu(x).square().sum())(x)
    torch.testing.assert_close(ours, transform(lambda x: F.gelu(x).square().sum())(x))


def test_other_threads_are_not_concerned() -> None:
    x = torch.randn(3, 8)
    found: list[list[str]] = []
    with memopt.convert.functions():
        thread = threading.Thread(target=lambda: found.append(memopt_ops(lambda: F.gelu(x))))
        thread.start()
        thread.join()
        assert memopt_ops(lambda: F.gelu(x))
    assert found == [[]]


def test_an_exception_ends_the_scope() -> None:
    with pytest.raises(RuntimeError, match="stop"), memopt.convert.functions():
        raise RuntimeError("stop")
    assert memopt_ops(lambda: F.gelu(torch.randn(3))) == []


def test_scopes_nest() -> None:
    x = torch.randn(3)
    with memopt.convert.functions():
        with memopt.convert.functions():
            assert memopt_ops(lambda: F.gelu(x)) == ["memopt::_activation_forward"]
        assert memopt_ops(lambda: F.gelu(x)) == ["memopt::_activation_forward"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_region_with_the_scope_inside_is_run_again_with_the_same_functions(
    reentrant: bool,
) -> None:
    x = torch.randn(3, 8, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        with memopt.convert.functions():
            return F.layer_norm(F.dropout(F.gelu(x), 0.5), (8,))

    torch.manual_seed(3)
    function(x).square().sum().backward()
    expected, x.grad = x.grad, None
    torch.manual_seed(3)
    y = torch.utils.checkpoint.checkpoint(function, x, use_reentrant=reentrant)
    y.square().sum().backward()
    assert torch.equal(x.grad, expected)


def test_compiles() -> None:
    x = torch.randn(3, 8, requires_grad=True)
    torch._dynamo.reset()

    def function(x: Tensor) -> Tensor:
        with memopt.convert.functions():
            return F.gelu(x) * 2

    compiled = torch.compile(function, backend="aot_eager")
    for ours, theirs in zip(
        one_step(lambda: compiled(x), x), one_step(lambda: function(x), x), strict=True
    ):
        torch.testing.assert_close(ours, theirs)
