"""Proves: inside memopt.saved_tensors(policy) each saved tensor meets the fate that the policy
picks: kept, made from a recipe, copied to the host (parameters and small tensors never, a storage
once), or what a user's class makes of it; gradients are those of the plain run, writes in place
raise, and nothing outlives its graph. Without an accelerator CPU tensors are taken for its own.
"""

from __future__ import annotations

import doctest
import gc
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import memopt
import memopt.fates
import memopt.functional as M
from memopt._extension import _C
from tests.checkpoint.support import Watch, collector_disabled
from tests.recipes.model import FEATURES, LEAVES, B, W, X, model
from tests.recipes.support import leaf

pytestmark = pytest.mark.usefixtures("collector_off")


class Exact:
    """A fate that copies a tensor."""

    def __init__(self) -> None:
        self.packed: list[torch.Size] = []
        self.restored = 0

    def pack(self, tensor: Tensor) -> Any:
        self.packed.append(tensor.shape)
        return ExactHandle(self, tensor)


class ExactHandle:
    def __init__(self, fate: Exact, tensor: Tensor) -> None:
        self.fate, self.values = fate, tensor.clone()

    def restore(self) -> Tensor:
        self.fate.restored += 1
        return self.values


class Int8:
    """A lossy one: 8 bits and a scale for each row."""

    def pack(self, tensor: Tensor) -> Any:
        if tensor.dtype != torch.float32 or tensor.dim() < 2 or tensor.requires_grad:
            return None  # statistics and parameters
        return Int8Handle(tensor)


class Int8Handle:
    def __init__(self, tensor: Tensor) -> None:
        self.scale = tensor.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
        self.values = (tensor / self.scale).round().to(torch.int8)

    def restore(self) -> Tensor:
        return self.values.float() * self.scale


def turns(*fates: Any) -> Callable[[Tensor], Any]:
    """A policy that answers with each of `fates` in turn."""
    number = iter(range(10**6))
    return lambda tensor: fates[next(number) % len(fates)]


POLICIES: dict[str, Callable[[], Any]] = {
    "keep": lambda: "keep",
    "recipe": lambda: "recipe",
    "cpu": lambda: "cpu",
    "a user's": Exact,
    "asked, keep": lambda: lambda tensor: "keep",
    "asked, recipe": lambda: lambda tensor: "recipe",
    "asked, cpu": lambda: lambda tensor: "cpu",
    "asked, all in turn": lambda: turns("recipe", "cpu", Exact(), "keep", "recipe"),
    "asked, all in another turn": lambda: turns(Exact(), "recipe", "recipe", "cpu"),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_are_those_of_the_plain_run(watch: Watch, policy: str) -> None:
    live = _C.live_handles()
    expected = torch.autograd.grad(model(), LEAVES)
    with memopt.saved_tensors(POLICIES[policy]()):
        loss = model()
    assert _C.live_handles() > live
    first = torch.autograd.grad(loss, LEAVES, retain_graph=True)
    second = torch.autograd.grad(loss, LEAVES)
    for a, b, e in zip(first, second, expected, strict=True):
        assert torch.equal(a, e)
        assert torch.equal(b, e)
    del loss
    gc.collect()
    assert _C.live_handles() == live


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("around", POLICIES)
def test_scopes_nest(watch: Watch, around: str, policy: str) -> None:
    live = _C.live_handles()
    expected = torch.autograd.grad(model(), LEAVES)
    with memopt.saved_tensors(POLICIES[around]()):
        with memopt.saved_tensors(POLICIES[policy]()):
            loss = model()
        again = memopt.checkpoint(model)
    for result in (loss, again):
        for a, e in zip(torch.autograd.grad(result, LEAVES), expected, strict=True):
            assert torch.equal(a, e)
    del loss, again, result
    gc.collect()
    assert _C.live_handles() == live


@pytest.mark.parametrize("policy", POLICIES)
def test_in_a_region(watch: Watch, policy: str) -> None:
    def inside() -> Tensor:
        with memopt.saved_tensors(POLICIES[policy]()):
            return model()

    live = _C.live_handles(), _C.live_regions()
    expected = torch.autograd.grad(model(), LEAVES)
    for a, e in zip(torch.autograd.grad(memopt.checkpoint(inside), LEAVES), expected, strict=True):
        assert torch.equal(a, e)
    gc.collect()
    assert (_C.live_handles(), _C.live_regions()) == live


@pytest.mark.parametrize("policy", POLICIES)
def test_create_graph(watch: Watch, policy: str) -> None:
    def second_order() -> list[Tensor]:
        (grad,) = torch.autograd.grad((X * 1).sin().square().sum(), X, create_graph=True)
        return list(torch.autograd.grad(grad.square().sum(), X))

    expected = second_order()
    with memopt.saved_tensors(POLICIES[policy]()):
        actual = second_order()
    assert torch.equal(actual[0], expected[0])


@pytest.mark.parametrize("policy", POLICIES)
def test_a_write_in_place_raises(watch: Watch, policy: str) -> None:
    """For each tensor on its own, the last reader of a shared storage included."""
    for written in (0, 1):
        x = X.detach() * 1
        with memopt.saved_tensors(POLICIES[policy]()):
            losses = [(W * x).sum(), (B * x.view(-1, FEATURES)).sum()]
        torch.autograd.grad(losses[1 - written], [(W, B)[1 - written]])
        x.add_(1)
        with pytest.raises(RuntimeError, match=r"in ?place"):  # memopt's words, or PyTorch's
            torch.autograd.grad(losses[written], [(W, B)[written]])


def test_a_fate_of_a_user_sees_each_tensor() -> None:
    fate = Exact()
    with memopt.saved_tensors(fate):
        loss = (X * 1).exp().sin().sum()
    # The result of exp, and once more as the argument of sin.
    assert fate.packed == [X.shape] * 2
    torch.autograd.grad(loss, X)
    assert fate.restored == 2


def test_a_quantised_fate() -> None:
    expected = torch.autograd.grad(model(), LEAVES)
    with memopt.saved_tensors(Int8()):
        loss = model()
    errors = []
    for a, e in zip(torch.autograd.grad(loss, LEAVES), expected, strict=True):
        errors.append(((a - e).norm() / e.norm()).item())
    assert 0 < max(errors) < 0.05


def test_the_example_of_the_docstring_runs() -> None:
    finder = doctest.DocTestFinder(recurse=False)
    (example,) = finder.find(memopt.saved_tensors, "saved_tensors", module=memopt.fates)
    assert len(example.examples) >= 5
    assert doctest.DocTestRunner().run(example).failed == 0


class Returns:
    """A fate, and its handle, that give back `what`."""

    def __init__(self, what: Any) -> None:
        self.what = what

    def pack(self, tensor: Tensor) -> Any:
        return self

    def restore(self) -> Any:
        return self.what


class PacksBadly:
    def pack(self, tensor: Tensor) -> Any:
        return 3


@pytest.mark.parametrize(
    ("policy", "error", "text"),
    [
        ("host", ValueError, r"must be 'keep', 'recipe', 'cpu' or 'disk' if .*, got 'host'"),
        (3, TypeError, r"an object with a method pack or a callable, got 3"),
        (None, TypeError, r"got None"),
        (lambda tensor: None, TypeError, r"a policy must answer .*, got None"),
        (lambda tensor: "host", TypeError, r"a policy must answer .*, got 'host'"),
        (PacksBadly(), TypeError, r"pack\(\) of PacksBadly must return an object with .*, got int"),
    ],
)
def test_bad_policies(policy: Any, error: type[Exception], text: str) -> None:
    top = torch._C._autograd._top_saved_tensors_default_hooks
    with pytest.raises(error, match=text), memopt.saved_tensors(policy):
        X.exp()
    assert top(True) is None


@pytest.mark.parametrize(
    ("what", "error", "text"),
    [
        (3, TypeError, r"restore\(\) of Returns must return a tensor, got int"),
        (
            torch.zeros(2),
            ValueError,
            r"like the one that was packed, float32\[16, 32\] on cpu, got",
        ),
        (X.detach().double(), ValueError, r", got float64\[16, 32\] on cpu"),
    ],
)
def test_bad_handles(what: Any, error: type[Exception], text: str) -> None:
    with memopt.saved_tensors(Returns(what)):
        y = X.exp()
    with pytest.raises(error, match=text):
        y.sum().backward()


def test_errors_of_a_user_s_code_come_through() -> None:
    class Fails:
        def pack(self, tensor: Tensor) -> Any:
            raise KeyError("packing")

    with pytest.raises(KeyError, match="packing"), memopt.saved_tensors(Fails()):
        X.exp()
    with pytest.raises(ZeroDivisionError), memopt.saved_tensors(lambda tensor: 1 / 0):
        X.exp()


def test_a_user_s_code_records_no_graph_and_knows_no_autocast() -> None:
    seen = []

    class Casts:
        def pack(self, tensor: Tensor) -> Any:
            seen.append((torch.mm(tensor, tensor.t()).dtype, (tensor * 2).requires_grad))
            return Returns(tensor)

    x = leaf(4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16), memopt.saved_tensors(Casts()):
        y = x.exp() * x
    assert set(seen) == {(torch.float32, False)}
    y.sum().backward()


def test_a_tensor_that_a_user_keeps_does_not_hold_its_graph() -> None:
    """exp saves its own output, which has the node for its history."""
    live = _C.live_handles()
    with memopt.saved_tensors(Keeps()):
        y = X.exp()
    assert _C.live_handles() > live
    with collector_disabled():
        del y
        assert _C.live_handles() == live


class Keeps:
    def pack(self, tensor: Tensor) -> Any:
        return Returns(tensor)


def test_built_in_policies_run_no_python() -> None:
    frames = []

    def trace(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            frames.append(frame.f_code.co_name)

    for policy in ("keep", "recipe", "cpu"):
        with memopt.saved_tensors(policy):  # type: ignore[arg-type]
            sys.setprofile(trace)
            try:
                y = X.exp().sin()
            finally:
                sys.setprofile(None)
        y.sum().backward()
    assert frames == []


def test_several_threads_differentiate_inside_scopes() -> None:
    """While tensors whose end runs Python are dropped."""
    expected = torch.autograd.grad(
        torch.autograd.grad(M.gelu(X).sin().sum(), X, create_graph=True)[0].square().sum(), X
    )[0]
    failures: list[BaseException] = []
    ended = []

    def work(scope: Any) -> None:
        try:
            with scope:
                for _ in range(20):
                    y = M.gelu(X).sin()
                    weakref.finalize(y, ended.append, 1)
                    (grad,) = torch.autograd.grad(y.sum(), X, create_graph=True)
                    del y
                    (second,) = torch.autograd.grad(grad.square().sum(), X)
                    assert torch.equal(second, expected)
        except BaseException as error:  # handed to the main thread
            failures.append(error)

    for policy in (lambda tensor: "recipe", "recipe", "cpu"):
        threads = [
            threading.Thread(target=work, args=(memopt.saved_tensors(policy),)) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        assert not any(thread.is_alive() for thread in threads)
    assert not failures
    assert len(ended) == 3 * 4 * 20
