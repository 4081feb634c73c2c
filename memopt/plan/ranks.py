"""On several ranks all take the same plan: for the least budget, and the most that any measures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from memopt.plan.bytes import StageBytes
from memopt.plan.profile import Profile
from memopt.plan.seconds import StageSeconds


def least(number: int) -> int:
    return int(min(_of_all(number)))


def most(number: int) -> int:
    return int(max(_of_all(number)))


def merged(profile: Profile) -> Profile:
    """With the most bytes and the longest times of all ranks.

    Raises:
        ValueError: ranks have other blocks.
    """
    profiles: list[Profile] = _of_all(profile)
    if len({(one.paths, one.kinds) for one in profiles}) > 1:
        raise ValueError(
            "memopt.plan: all ranks must plan a model with the same blocks, got "
            + ", ".join(sorted({f"{len(one.paths)} calls" for one in profiles}))
        )
    for other in profiles:
        profile.base = max(profile.base, other.base)
        profile.optimizer = max(profile.optimizer, other.optimizer)
        profile.gradients = tuple(map(max, profile.gradients, other.gradients))
        profile.ends = _joined(profile.ends, other.ends, _end)
        profile.nbytes = _joined(profile.nbytes, other.nbytes, _bytes)
        profile.seconds = _joined(profile.seconds, other.seconds, _seconds)
    return profile


def _of_all(value: Any) -> list[Any]:
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _joined(mine: dict[Any, Any], others: dict[Any, Any], join: Callable[..., Any]) -> Any:
    return {key: join(value, others[key]) for key, value in mine.items()}


def _bytes(one: StageBytes, other: StageBytes) -> StageBytes:
    return StageBytes(
        max(one.resident, other.resident),
        max(one.forward, other.forward),
        max(one.backward, other.backward),
        max(one.gradients, other.gradients),
        one.may_leave,
    )


def _seconds(one: StageSeconds, other: StageSeconds) -> StageSeconds:
    return StageSeconds(max(one.forward, other.forward), max(one.backward, other.backward))


def _end(one: tuple[Any, Any], other: tuple[Any, Any]) -> tuple[Any, Any]:
    return _bytes(one[0], other[0]), _seconds(one[1], other[1])
