"""Proves: a region's hooks are called for no tensor that a known op or one of memopt's saves
(intercept/savers.h and autograd/without_hooks.h in csrc), and nobody notices. Each op is run in
every bit as without a region, also where a mode sends one of a region's two runs through hooks:
both show a node's tensors in one order. Forward derivatives and ops that somebody gave another
derivative have their hooks.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import memopt
import memopt.functional as M
from memopt import checkpoint
from memopt._extension import _C
from tests.recipes.test_without_hooks import LEAVES, SAVERS, X

pytestmark = pytest.mark.usefixtures("collector_off")

# Ops that may not run twice, or whose op saves more than is known.
HOOKED = {"NativeBatchNormBackward0"}


class Plain(TorchDispatchMode):
    """Changes nothing; with it, no op is known."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


def gradients(run: Callable[[], Tensor]) -> list[Tensor | None]:
    return list(torch.autograd.grad(run(), LEAVES, allow_unused=True))


def assert_same(actual: list[Tensor | None], expected: list[Tensor | None]) -> None:
    for a, e in zip(actual, expected, strict=True):
        assert (a is None) == (e is None)
        assert a is None or e is None or torch.equal(a, e)


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("saver", SAVERS)
def test_hooks_are_called_for_what_is_not_known_alone(saver: str, early_stop: bool) -> None:
    def function(x: Tensor) -> Tensor:
        return SAVERS[saver](x + 1.0).square().sum()

    expected = gradients(lambda: function(X))
    packs, live = _C.packs(), _C.live_handles()
    loss = checkpoint(function, X, early_stop=early_stop)
    assert (_C.packs() == packs) is (saver not in HOOKED)
    actual = list(torch.autograd.grad(loss, LEAVES, allow_unused=True))
    assert (_C.packs() == packs) is (saver not in HOOKED)
    assert_same(actual, expected)
    del loss
    assert _C.live_handles() == live


@pytest.mark.parametrize("hooked_run", [1, 2])
@pytest.mark.parametrize("recipes", [False, True])
@pytest.mark.parametrize("saver", SAVERS)
def test_a_mode_sends_one_of_the_runs_through_hooks(
    saver: str, recipes: bool, hooked_run: int
) -> None:
    runs = 0

    def function(x: Tensor) -> Tensor:
        nonlocal runs
        runs += 1
        if runs != hooked_run:
            return SAVERS[saver](x * 2.0).square().sum()
        with Plain():
            return SAVERS[saver](x * 2.0).square().sum()

    expected = gradients(lambda: SAVERS[saver](X * 2.0).square().sum())
    packs = _C.packs()

    def run() -> Tensor:
        loss: Tensor = checkpoint(function, X, early_stop=False)
        return loss

    if recipes:
        with memopt.recipes():
            loss = run()
    else:
        loss = run()
    assert_same(list(torch.autograd.grad(loss, LEAVES, allow_unused=True)), expected)
    assert runs == 2
    assert _C.packs() > packs


OURS: dict[str, Callable[[Tensor], Tensor]] = {
    "layer_norm": lambda x: M.layer_norm(x, (x.shape[-1],)),
    "add_layer_norm": lambda x: sum(M.add_layer_norm(x, x, (x.shape[-1],))),  # saves an output
    "gelu": lambda x: M.gelu(x) * x,
    "swiglu": lambda x: M.swiglu(x, x + 1.0),
    "dropout": lambda x: M.dropout(x, 0.5) * x,
    "linear behind": lambda x: M.gelu_linear(x, torch.ones(2, x.shape[-1])),
}


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("recipes", [False, True])
@pytest.mark.parametrize("op", OURS)
def test_memopt_s_own_ops_meet_no_hooks(op: str, recipes: bool, is_last: bool) -> None:
    def function(x: Tensor) -> Tensor:
        y = OURS[op](x.sin())
        return y if is_last else y.square()

    torch.manual_seed(0)
    expected = torch.autograd.grad(function(X).sum(), X)
    torch.manual_seed(0)
    packs, live = _C.packs(), _C.live_handles()
    with memopt.recipes() if recipes else contextlib.nullcontext():
        result = checkpoint(function, X)
    actual = torch.autograd.grad(result.sum(), X)
    assert _C.packs() - packs == int(recipes)  # the region's argument, in the scope around it
    assert torch.equal(actual[0], expected[0])
    del result
    assert _C.live_handles() == live


@pytest.mark.parametrize("hooked_run", [1, 2])
@pytest.mark.parametrize("recipes", [False, True])
@pytest.mark.parametrize("op", OURS)
def test_hooks_in_one_of_the_runs_get_the_same_of_memopt_s_ops(
    op: str, recipes: bool, hooked_run: int
) -> None:
    """Other hooks, which get what they are given and nothing else, send a run the slow way."""
    runs = 0

    def function(x: Tensor) -> Tensor:
        nonlocal runs
        runs += 1
        with Plain() if runs == hooked_run else contextlib.nullcontext():
            return OURS[op](x.sin()).square()

    torch.manual_seed(0)
    expected = torch.autograd.grad(OURS[op](X.sin()).square().sum(), X)
    torch.manual_seed(0)
    with memopt.recipes() if recipes else contextlib.nullcontext():
        result = checkpoint(function, X, early_stop=False)
    assert torch.equal(torch.autograd.grad(result.sum(), X)[0], expected[0])
    assert runs == 2


@pytest.mark.parametrize("trained", ["last", "bias of the first", "both"])
def test_a_call_before_that_saves_nothing_is_not_taken_for_the_last_one(trained: str) -> None:
    """The recompute ends in place of its last op, known by which call it was."""
    first, last = torch.nn.Linear(5, 5), torch.nn.Linear(5, 5)
    if trained != "both":
        first.requires_grad_(False)
    first.bias.requires_grad_(trained != "last")
    x = torch.randn(5, 5)
    parameters = [p for p in (*first.parameters(), *last.parameters()) if p.requires_grad]

    def function(x: Tensor) -> Tensor:
        return last(first(x))

    expected = torch.autograd.grad(function(x).sum(), parameters)
    actual = torch.autograd.grad(checkpoint(function, x).sum(), parameters)
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a, e)


LAST_KERNEL = """
import torch
from memopt import checkpoint

calls = 0

def mm(a, b):
    global calls
    calls += 1
    return (a.unsqueeze(2) * b.unsqueeze(0)).sum(1)

library = torch.library.Library("aten", "IMPL")
library.impl("mm", mm, "CPU")
x, y, z = (torch.randn(3, 3, requires_grad=True) for _ in range(3))
expected = torch.autograd.grad(((x @ y) @ z).sum(), x)
for early_stop, again in ((True, 1), (False, 2)):
    out = checkpoint(lambda t: (t @ y) @ z, x, early_stop=early_stop)
    before = calls
    actual = torch.autograd.grad(out.sum(), x)
    assert torch.equal(actual[0], expected[0])
    assert calls - before == again + 2, calls - before  # and two products of backward
"""


def test_the_kernel_of_the_last_op_does_not_run_again() -> None:
    """In a process of its own, since the kernel stays another one."""
    subprocess.run([sys.executable, "-c", LAST_KERNEL], check=True)


def test_a_forward_derivative_has_hooks() -> None:
    packs = _C.packs()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(X, torch.ones_like(X))
        checkpoint(torch.sin, dual)
    assert _C.packs() > packs


def test_a_number_is_no_tensor_of_the_region_s() -> None:
    """PyTorch makes a tensor of it, which hooks do not get, so neither does the region here."""
    runs = 0

    def function(x: Tensor) -> Tensor:
        nonlocal runs
        runs += 1
        if runs == 2:
            with Plain():
                return ((2.0 * x) / 3.0).square().sum()
        return ((2.0 * x) / 3.0).square().sum()

    expected = torch.autograd.grad(((2.0 * X) / 3.0).square().sum(), X)
    actual = torch.autograd.grad(checkpoint(function, X, early_stop=False), X)
    assert torch.equal(actual[0], expected[0])


def test_recipes_inside_a_region() -> None:
    def function(x: Tensor) -> Tensor:
        with memopt.recipes():
            return (M.gelu(x) @ x.mT).square().sum()

    expected = torch.autograd.grad(function(X), X)
    live = _C.live_handles()
    loss = checkpoint(function, X)
    assert torch.equal(torch.autograd.grad(loss, X)[0], expected[0])
    del loss
    assert _C.live_handles() == live


OTHER_DERIVATIVE = """
import torch
from memopt import checkpoint

class Sin(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        with torch._C._AutoDispatchBelowAutograd():
            return x.sin()

    @staticmethod
    def backward(ctx, dy):
        return dy * ctx.saved_tensors[0].cos()

library = torch.library.Library("aten", "IMPL")
library.impl("sin", Sin.apply, "AutogradCPU")
x = torch.randn(5, requires_grad=True)
from memopt._extension import _C
for _ in range(2):
    live, packs = _C.live_handles(), _C.packs()
    y = checkpoint(lambda t: t.sin() * 2.0, x)
    assert _C.packs() - packs == 1, _C.packs()
    assert _C.live_handles() - live == 1
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], 2.0 * x.cos())
"""


def test_an_op_with_another_derivative_has_hooks() -> None:
    """In a process of its own, since nobody may be found to have taken the derivative back."""
    subprocess.run([sys.executable, "-c", OTHER_DERIVATIVE], check=True)
