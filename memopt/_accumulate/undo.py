"""A micro-batch that ran out of memory, undone: gradients, random numbers and buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from torch import Tensor, nn

from memopt.memory.unchanged import Before


def before_forward(model: nn.Module) -> Before:
    """Remember what a forward of every step may change: buffers and random numbers, not gradients.
    (All that `unchanged` puts back would be looked for in every micro-batch.)
    """
    return Before((), written=model.buffers())


def before_backward(model: nn.Module, trained: Sequence[Tensor]) -> Before:
    """Remember gradients too: those that are there are copied. Where there are none, as is usual,
    it is free.
    """
    gradients = [p.grad for p in trained if p.grad is not None]
    return Before(([*trained],), written=[*model.buffers(), *gradients], at_once=0)


@contextmanager
def no_part_of_gradients(trained: Sequence[Tensor]) -> Iterator[None]:
    """Leaves no gradients of a part of a batch, to which another attempt would add, where an error
    ends it in the middle. Those that were there are not copied, and keep what was added.
    """
    without = [p for p in trained if p.grad is None]
    try:
        yield
    except BaseException:
        for parameter in without:
            parameter.grad = None
        raise


@contextmanager
def gradients_watched(trained: Sequence[Tensor]) -> Iterator[Callable[[], bool]]:
    """Says whether a gradient was accumulated since the last time it was asked."""
    touched: list[None] = []

    def touch(_: Tensor) -> None:
        if not touched:
            touched.append(None)

    def was_touched() -> bool:
        found = bool(touched)
        touched.clear()
        return found

    with ExitStack() as stack:
        for parameter in trained:
            if parameter.requires_grad:
                stack.callback(parameter.register_post_accumulate_grad_hook(touch).remove)
        yield was_touched
