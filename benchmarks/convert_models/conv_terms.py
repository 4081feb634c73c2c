"""Tensors that a convolutional network keeps for backward, in terms, before convert and after."""

from __future__ import annotations

from typing import NamedTuple

IMAGES, EDGE = 2, 6
PIXELS = IMAGES * EDGE * EDGE
BLOCKS = 2


class Kept(NamedTuple):
    """`count` tensors of so many float32 numbers, before convert and after."""

    what: str
    numbers: int
    before: int
    after: int


def always(what: str, numbers: int, count: int = 1) -> Kept:
    return Kept(what, numbers, count, count)


def result(what: str, numbers: int, count: int = 1) -> Kept:
    """The result of an op whose inputs are kept, or made again, after convert."""
    return Kept(what, numbers, count, 0)


def batch_norm(channels: int, count: int = 1, pixels: int = PIXELS) -> list[Kept]:
    return [
        always("input of a batch norm", pixels * channels, count),
        always("mean and rstd of a batch norm", channels, 2 * count),
    ]
