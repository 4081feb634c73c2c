"""Several ranks take the same plan: for the least budget, and the most that any measures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch.distributed as dist

from memopt._plan.bytes import StepBytes, most_bytes
from memopt._plan.seconds import StageSeconds

T = TypeVar("T")

_is_alone = ContextVar("_is_alone", default=False)


@contextmanager
def alone() -> Iterator[None]:
    """A scope in which a rank asks no others: one that predicts for itself, and not to take a plan,
    may be the only one that does.
    """
    before = _is_alone.set(True)
    try:
        yield
    finally:
        _is_alone.reset(before)


def least(number: int) -> int:
    found: int = min(_of_all(number))  # a Size too, with how it was given
    return found


def most(number: int) -> int:
    return int(max(_of_all(number)))


def first(value: T) -> T:
    """The first rank's."""
    found: T = _of_all(value)[0]
    return found


def is_first() -> bool:
    """Whether this is the rank that writes for all."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def joined_ranks(found: dict[str, str]) -> dict[str, str]:
    """Everything that any rank found."""
    merged: dict[str, str] = {}
    for one in reversed(_of_all(found)):
        merged |= one
    return merged


def with_most(nbytes: StepBytes) -> StepBytes:
    """The most bytes of all ranks. So all choose alike, and their collectives match.

    Raises:
        ValueError: ranks have other stages.
    """
    steps: list[StepBytes] = _of_all(nbytes)
    if len(steps) == 1:
        return nbytes
    if len({len(step.stages) for step in steps}) > 1:
        raise ValueError(
            "plan: all ranks must plan a model with the same blocks, got "
            f"{[len(step.stages) - 2 for step in steps]} calls of blocks"
        )
    return StepBytes(
        base=max(step.base for step in steps),
        above=max(step.above for step in steps),
        optimizer=max(step.optimizer for step in steps),
        stages=tuple(map(most_bytes, zip(*(step.stages for step in steps), strict=True))),
        peak=max(step.peak for step in steps),
        in_order=all(step.in_order for step in steps),
    )


def with_longest(stages: Sequence[StageSeconds]) -> list[StageSeconds]:
    """The longest times of all ranks."""
    return [
        StageSeconds(max(one.forward for one in found), max(one.backward for one in found))
        for found in zip(*_of_all(list(stages)), strict=True)
    ]


def _of_all(value: Any) -> list[Any]:
    if _is_alone.get():
        return [value]
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
