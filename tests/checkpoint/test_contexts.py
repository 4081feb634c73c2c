"""Proves: context_fn means for memopt.checkpoint what it means for PyTorch's: one context around
forward, the other around each recompute, neither where there is no region, and exceptions pass
through; and determinism_check compares what is saved, or only its number.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from memopt._checkpoint import (
    checkpoint,
    disable_checkpointing,
    is_checkpointing,
    is_recomputing,
)
from tests.checkpoint.support import every_way, torch_non_reentrant

variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="outside")


class Failure(Exception):
    """Raised by a function under test."""


@pytest.fixture
def x() -> Tensor:
    return torch.randn(4, requires_grad=True)


class Contexts:
    """A context_fn that writes down what enters and what leaves, and sets `variable` between."""

    def __init__(self) -> None:
        self.log: list[str] = []

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        self.log.append(f"enter {name}")
        token = variable.set(name)
        try:
            yield
        except Failure as error:
            self.log.append(f"{error} in {name}")
            raise
        finally:
            variable.reset(token)
            self.log.append(f"exit {name}")

    def __call__(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        self.log.append("called")
        return self.scope("forward"), _Reusable(lambda: self.scope("recompute"))


class _Reusable(AbstractContextManager[None]):
    """What `make` returns, made anew each time it is entered."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self.make = make

    def __enter__(self) -> None:
        self.entered = self.make()
        self.entered.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self.entered.__exit__(*error)


@every_way
def test_contexts_are_around_forward_and_around_each_recompute(
    way: Callable[..., Any], x: Tensor
) -> None:
    contexts, seen = Contexts(), []

    def function(x: Tensor) -> Tensor:
        seen.append(variable.get())
        return x.exp().sin()

    y = way(function, x, context_fn=contexts).sum()
    assert contexts.log == ["called", "enter forward", "exit forward"]
    assert variable.get() == "outside"
    (first,) = torch.autograd.grad(y, x, retain_graph=True)
    (second,) = torch.autograd.grad(y, x)
    assert contexts.log[3:] == ["enter recompute", "exit recompute"] * 2
    assert seen == ["forward", "recompute", "recompute"]
    assert variable.get() == "outside"
    assert torch.equal(first, second)


@every_way
@pytest.mark.parametrize("raises_in", ["forward", "recompute"])
def test_contexts_see_the_exception_of_the_function(
    way: Callable[..., Any], raises_in: str, x: Tensor
) -> None:
    if torch.__version__ < (2, 13) and way is torch_non_reentrant and raises_in == "forward":
        pytest.skip("PyTorch 2.11's leaves the context without telling it")
    contexts = Contexts()

    def function(x: Tensor) -> Tensor:
        y = x.exp()
        if variable.get() == raises_in:
            raise Failure("the original")
        return y.sin()

    with pytest.raises(Failure, match=r"^the original$"):
        way(function, x, context_fn=contexts).sum().backward()
    assert contexts.log[-2:] == [f"the original in {raises_in}", f"exit {raises_in}"]
    assert variable.get() == "outside"


def test_a_context_fn_that_raises_leaves_nothing_behind(x: Tensor) -> None:
    def contexts() -> Any:
        raise Failure("no contexts")

    with pytest.raises(Failure, match="no contexts"):
        checkpoint(torch.exp, x, context_fn=contexts)
    assert isinstance(x.exp().grad_fn._saved_result, Tensor)  # no hook is left behind


@every_way
@pytest.mark.parametrize("gradients", [True, False])
def test_contexts_are_entered_only_where_there_is_a_region(
    way: Callable[..., Any], gradients: bool, x: Tensor
) -> None:
    """A selective checkpoint's would keep tensors that nobody differentiates."""
    contexts, entered = Contexts(), ["enter forward", "exit forward"]
    with torch.set_grad_enabled(gradients):
        way(torch.exp, x, context_fn=contexts)
    assert contexts.log == ["called", *(entered if gradients else [])]


def test_disabled_regions_enter_no_contexts(x: Tensor) -> None:
    contexts = Contexts()
    with disable_checkpointing():
        checkpoint(torch.exp, x, context_fn=contexts).sum().backward()
    assert contexts.log == ["called"]
    assert torch.equal(x.grad, x.detach().exp())


def other_shape(x: Tensor) -> Tensor:
    """Saves as many tensors in the recompute, the first of another shape."""
    return (x.repeat(2) if variable.get() == "recompute" else x).exp()


@every_way
def test_determinism_check_compares_what_is_saved(way: Callable[..., Any], x: Tensor) -> None:
    y = way(other_shape, x, context_fn=Contexts())
    with pytest.raises(RuntimeError):
        y.backward(torch.ones_like(y))


@every_way
def test_without_a_determinism_check_only_the_number_must_agree(
    way: Callable[..., Any], x: Tensor
) -> None:
    """The shape comes to light in exp's own backward, or not at all."""

    def other_dtype(x: Tensor) -> Tensor:
        return (x.double() if variable.get() == "recompute" else x).exp()

    y = way(other_dtype, x, context_fn=Contexts(), determinism_check="none")
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.allclose(grad, x.detach().exp())

    def fewer(x: Tensor) -> Tensor:
        y = x.exp()
        return y if variable.get() == "recompute" else y.sin()

    y = way(fewer, x, context_fn=Contexts(), determinism_check="none")
    with pytest.raises(RuntimeError):
        y.sum().backward()


class EndsExceptions(AbstractContextManager[None]):
    def __exit__(self, *raised: object) -> bool:
        return True


@every_way
def test_a_context_that_ends_an_exception_gives_no_result(
    way: Callable[..., Any], x: Tensor
) -> None:
    def fails(x: Tensor) -> Tensor:
        raise Failure("forward")

    with pytest.raises(RuntimeError, match="context_fn"):
        way(fails, x, context_fn=lambda: (EndsExceptions(), EndsExceptions()))


def test_a_context_that_ends_an_exception_in_the_recompute(x: Tensor) -> None:
    """The region's own exception for an early stop passes it, too."""
    calls: list[str] = []

    def function(x: Tensor) -> Tensor:
        calls.append("call")
        if len(calls) == 3:
            raise Failure("recompute")
        return x.exp().sin()

    contexts = (EndsExceptions(), EndsExceptions())
    y = checkpoint(function, x, context_fn=lambda: contexts)
    (got,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    assert torch.equal(got, torch.autograd.grad(x.exp().sin().sum(), x)[0])
    with pytest.raises(RuntimeError, match=r"context_fn.*EndsExceptions, which ended Failure"):
        y.sum().backward()
    assert not is_recomputing()
    assert not is_checkpointing()


class FailsInExit(AbstractContextManager[None]):
    def __exit__(self, *raised: object) -> None:
        raise Failure("exit")


@pytest.mark.parametrize("where", ["forward", "recompute"])
def test_a_context_that_fails_leaves_everything_as_it_was(where: str, x: Tensor) -> None:
    contexts = {"forward": nullcontext(), "recompute": nullcontext(), where: FailsInExit()}

    def step() -> None:
        checkpoint(torch.exp, x, context_fn=lambda: tuple(contexts.values())).sum().backward()

    with pytest.raises(Failure, match="exit"):
        step()
    assert not is_recomputing()
    assert not is_checkpointing()
    saved = x.exp().grad_fn._saved_result  # by no hooks that stayed
    assert torch.equal(saved, x.exp())
