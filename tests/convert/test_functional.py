"""Proves: inside a converted model PyTorch's functions are memopt's, however they are called and
whatever is entered; what memopt does not support is PyTorch's to the bit; and to whoever is
outside nothing has changed: names, pickles, other threads, modes, compiled functions.
"""

from __future__ import annotations

import copy
import inspect
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import memopt
from memopt._extension import _C
from memopt.memory.saved import SavedTensors
from tests.convert.support import memopt_ops, one_step

WEIGHT, BIAS = torch.rand(16) + 0.5, torch.randn(16)
CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "F.gelu": F.gelu,
    "F.gelu, tanh": lambda x: F.gelu(x, approximate="tanh"),
    "F.silu": F.silu,
    "F.relu": F.relu,
    "torch.relu": torch.relu,
    "Tensor.relu": lambda x: x.relu(),
    "F.sigmoid": F.sigmoid,
    "torch.sigmoid": torch.sigmoid,
    "Tensor.sigmoid": lambda x: x.sigmoid(),
    "F.layer_norm": lambda x: F.layer_norm(x, (16,), WEIGHT, BIAS),
    "F.layer_norm, no parameters": lambda x: F.layer_norm(x, [16], eps=1e-3),
    "torch.layer_norm": lambda x: torch.layer_norm(x, [16], WEIGHT),
    "F.rms_norm": lambda x: F.rms_norm(x, (16,), WEIGHT, 1e-3),
    "torch.rms_norm": lambda x: torch.rms_norm(x, (16,)),
    "a module": nn.ReLU(),
}
LEFT: dict[str, Callable[[Tensor], Tensor]] = {
    "in place": lambda x: (
        F.relu(x.cumsum(-1), inplace=True) + x.cumsum(-1).sigmoid_() + x.cumsum(-1).relu_()
    ),
    "dropout in place": lambda x: F.dropout(x.clone(), 0.0, inplace=True),
    "dropout of nothing": lambda x: F.dropout(x, 0.0) + F.dropout(x, 0.5, training=False),
    "sparse": lambda x: F.relu(x.to_sparse()).to_dense(),
    "another function": torch.tanh,
    "a weight of another dtype": lambda x: F.rms_norm(x, (16,), WEIGHT.double()).to(x.dtype),
    "complex": lambda x: torch.sigmoid(torch.complex(x, x)).real,
}


class Calls(nn.Module):
    """The norm's output has a recipe, so that relu and sigmoid may keep it in place of theirs."""

    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(16, 16), memopt.nn.LayerNorm(16))
        self.second = nn.Linear(16, 16)
        self.function = (call,)

    def forward(self, x: Tensor) -> Tensor:
        # The sum keeps any rule from knowing the module by what it computes.
        output: Tensor = self.second(self.function[0](self.first(x))) + x.mean()
        return output

    def entry(self, x: Tensor) -> Tensor:
        return self(x) * 2


def make(call: Callable[[Tensor], Tensor], **options: bool) -> tuple[Calls, Calls]:
    torch.manual_seed(0)
    plain = Calls(call)
    model = copy.deepcopy(plain)
    memopt.convert(model, **options)
    return model, plain


def saved(call: Callable[[], object]) -> int:
    with SavedTensors() as tensors:
        kept = call()
    del kept
    return int(tensors.bytes)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_functions_are_memopt_s_inside_alone(call: Callable[[Tensor], Tensor]) -> None:
    model, plain = make(call)
    x = torch.randn(5, 16, requires_grad=True)
    assert memopt_ops(lambda: call(x)) == []
    for enter in (model, model.entry):
        assert len(memopt_ops(lambda: enter(x))) == 2  # noqa: B023
    assert memopt_ops(lambda: call(x)) == []
    tensors = [x, *model.parameters()], [x, *plain.parameters()]
    ours = one_step(lambda: model(x), *tensors[0])
    for mine, theirs in zip(ours, one_step(lambda: plain(x), *tensors[1]), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-5, atol=1e-5)
    assert saved(lambda: model(x)) <= saved(lambda: plain(x))
    for options in ({"functional": False}, {"recipes": False}):
        model, _ = make(call, **options)
        assert memopt_ops(lambda: model(x)) == ["memopt::_norm_forward"]  # noqa: B023
    model, _ = make(call)
    memopt.revert(model)
    assert memopt_ops(lambda: model(x)) == ["memopt::_norm_forward"]


@pytest.mark.parametrize("call", LEFT.values(), ids=LEFT)
def test_other_calls_are_pytorch_s(call: Callable[[Tensor], Tensor]) -> None:
    model, plain = make(call)
    x = torch.randn(5, 16, requires_grad=True)
    assert memopt_ops(lambda: model(x)) == ["memopt::_norm_forward"]
    ours, theirs = one_step(lambda: model(x), x), one_step(lambda: plain(x), x)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("function", [torch.relu, torch.sigmoid])
def test_relu_and_sigmoid_where_their_input_would_be_one_more(
    function: Callable[[Tensor], Tensor],
) -> None:
    """A linear's output is saved by nobody else: PyTorch's save as much inside the model, and less
    where their output is saved outside.
    """
    model = nn.Sequential(nn.Linear(16, 16), Model(function))
    memopt.convert(model)
    x = torch.randn(5, 16, requires_grad=True)
    assert memopt_ops(lambda: model(x)) == []
    later = nn.Linear(16, 16)
    ours = saved(lambda: later(model(x)))
    memopt.revert(model)
    assert ours == saved(lambda: later(model(x)))


@pytest.mark.parametrize("x", [torch.arange(3), torch.ones(3, dtype=torch.bool)], ids=str)
def test_integers(x: Tensor) -> None:
    model = Model(lambda x: torch.sigmoid(x) + x.sigmoid())
    memopt.convert(model)
    assert torch.equal(model(x), torch.sigmoid(x) * 2)


class Model(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = (function,)

    def forward(self, *args: Any) -> Any:
        return self.function[0](*args)


def test_dropout_needs_no_mask() -> None:
    model = Model(lambda x: F.dropout(x, 0.5))
    memopt.convert(model)
    x = torch.randn(64, 64, requires_grad=True)
    assert saved(lambda: model(x)) == 16
    y = model(x)
    y.sum().backward()
    torch.testing.assert_close(x.grad * x, y)
    assert 0.4 < (y == 0).float().mean() < 0.6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_autocast_leaves_the_dtype_that_pytorch_s_have(
    call: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    model = Model(call)
    memopt.convert(model, functional=True)
    x = torch.randn(5, 16, dtype=dtype, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        expected = call(x)
        ours = model(x)
    assert ours.dtype == expected.dtype
    torch.testing.assert_close(ours, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap, torch.func.hessian])
def test_transforms_around_are_pytorch_s(transform: Callable[..., Any]) -> None:
    model = Model(lambda x: F.gelu(x).square().sum())
    memopt.convert(model)
    x = torch.randn(8, 8)[0] if transform is not torch.func.vmap else torch.randn(8, 8)
    expected = transform(lambda x: F.gelu(x).square().sum())(x)
    torch.testing.assert_close(transform(model)(x), expected)


def test_forward_mode_derivatives_are_pytorch_s() -> None:
    model = Model(lambda x: F.layer_norm(F.silu(x), (8,)))
    plain = copy.deepcopy(model)
    memopt.convert(model)
    x = torch.randn(8)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones(8))
        ours, theirs = (torch.autograd.forward_ad.unpack_dual(m(dual)) for m in (model, plain))
        torch.testing.assert_close(ours.tangent, theirs.tangent)


def test_second_derivatives() -> None:
    model = Model(lambda x: (F.gelu(x) * F.sigmoid(x)).sum())
    plain = copy.deepcopy(model)
    memopt.convert(model)
    x = torch.randn(8, dtype=torch.float64, requires_grad=True)
    for mine, theirs in zip(
        torch.autograd.functional.hessian(model, x),
        torch.autograd.functional.hessian(plain, x),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)


class Watching(TorchFunctionMode):
    """A mode of someone else's."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_nothing_of_pytorch_s_has_changed() -> None:
    names = ("gelu", "silu", "relu", "dropout", "layer_norm", "rms_norm", "sigmoid")
    seen: dict[str, Any] = {}

    def look(x: Tensor) -> Tensor:
        for name in names:
            seen[name] = getattr(F, name)
            assert pickle.loads(pickle.dumps(getattr(F, name))) is getattr(F, name)
        seen["Tensor.relu"] = inspect.getattr_static(Tensor, "relu")
        with Watching() as mode:
            F.gelu(x)
            x.relu()
        seen["mode"] = mode.seen
        return F.gelu(x)

    before = {name: getattr(F, name) for name in names}
    method = inspect.getattr_static(Tensor, "relu")
    model = Model(look)
    memopt.convert(model)
    model(torch.randn(3))
    assert {name: seen[name] for name in names} == before
    assert seen["Tensor.relu"] is method
    assert F.gelu in seen["mode"]
    assert Tensor.relu in seen["mode"]


def test_other_threads_are_not_concerned() -> None:
    found: list[list[str]] = []
    x = torch.randn(3, requires_grad=True)

    def look(x: Tensor) -> Tensor:
        thread = threading.Thread(target=lambda: found.append(memopt_ops(lambda: F.gelu(x))))
        thread.start()
        thread.join()
        found.append(memopt_ops(lambda: F.gelu(x)))
        return x

    model = Model(look)
    memopt.convert(model)
    model(x)
    assert found == [[], ["memopt::_activation_forward"]]


def test_an_exception_ends_it() -> None:
    def fail(x: Tensor) -> Tensor:
        raise KeyError(str(F.gelu(x)))

    model = Model(fail)
    memopt.convert(model)
    x = torch.randn(3, requires_grad=True)
    with pytest.raises(KeyError):
        model(x)
    assert memopt_ops(lambda: F.gelu(x)) == []


def test_inside_hooks_of_others_they_are_pytorch_s() -> None:
    """No recipe is made there, so that relu would keep its input beside its output."""
    model = Model(lambda x: hooked(x))
    memopt.convert(model)

    def hooked(x: Tensor) -> list[str]:
        with torch.autograd.graph.save_on_cpu():
            return memopt_ops(lambda: F.relu(x) + F.gelu(x))

    assert model(torch.randn(3, requires_grad=True)) == []


def test_a_scope_of_the_user_s_has_recipes_and_no_functions() -> None:
    x = torch.randn(3, requires_grad=True)
    with memopt.recipes():
        assert memopt_ops(lambda: F.gelu(x)) == []
        model = Model(F.gelu)
        memopt.convert(model)
        assert memopt_ops(lambda: model(x))
        assert memopt_ops(lambda: F.gelu(x)) == []
        assert _C.recipes_are_on()


def test_higher_order_operators() -> None:
    def branch(x: Tensor) -> Tensor:
        return F.gelu(x) + 1

    def cond(x: Tensor) -> Tensor:
        y: Tensor = torch.ops.higher_order.cond(torch.tensor(True), branch, branch, (x,))
        return y

    model = Model(cond)
    memopt.convert(model)
    x = torch.randn(8)
    torch.testing.assert_close(model(x), branch(x))


def test_flex_attention() -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    model = Model(flex.flex_attention)
    memopt.convert(model)
    q = torch.randn(1, 2, 16, 8)
    torch.testing.assert_close(
        model(q, q, q), F.scaled_dot_product_attention(q, q, q), rtol=1e-4, atol=1e-5
    )


def test_export_and_trace() -> None:
    model, plain = make(F.gelu)
    x = torch.randn(5, 16)
    exported = torch.export.export(model, (x,))
    assert not any("memopt.activation" in str(node.target) for node in exported.graph.nodes)
    torch.testing.assert_close(exported.module()(x), plain(x))
    assert not any(
        "memopt::activation" in str(n) for n in torch.jit.trace(model, (x,)).graph.nodes()
    )
