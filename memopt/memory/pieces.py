"""Pieces of memory: their categories and fates, and the lines of a ledger."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

CATEGORIES = (
    "weights",
    "gradients",
    "optimizer states",
    "activations",
    "temporary buffers",
    "functionality-specific",
)
WEIGHTS, GRADIENTS, STATES, ACTIVATIONS, TEMPORARY, FUNCTIONALITY = CATEGORIES


def in_words(category: str) -> str:
    """A category as reports call it."""
    return "inputs, buffers" if category == FUNCTIONALITY else category


FATES = ("kept", "region input", "recipe", "recomputed", "offloaded")
KEPT, REGION_INPUT, RECIPE, RECOMPUTED, OFFLOADED = FATES


@dataclass(eq=False)
class Piece:
    """A storage, and where it comes from."""

    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    born: int
    """The number of the operator that made it; 0 for what was there before."""
    phase: str
    """"before", "forward", "backward" or "optimizer"."""
    op: str
    """The operator that returned it, or the name of what was there before."""
    module: str
    """The path of the innermost module whose forward ran, in backward that whose backward ran."""
    line: str
    """The line outside of PyTorch and memopt that called the operator, in backward that of the
    forward: "model.py:12". Empty where there is none."""
    category: str = ""
    fate: str = ""
    """An activation's fate, one of FATES; else empty."""
    died: int | None = None
    """The number of the operator after whose beginning it ended; None: it was there at the end."""
    again: bool = False
    """Whether a recompute made it."""
    saved: int | None = None
    """The number of the save, counted from 1, by which the graph or a region first held it."""
    last_in_forward: int = 0
    """The number of the last operator of forward that read it."""
    first_in_backward: int | None = None
    """The number of the first operator of backward that did."""
    writes: list[int] = field(default_factory=list)
    """The numbers of the operators of forward that wrote to it in place."""
    margin: int = 0
    """Bytes of a kernel's scratch that may not be allocated: only a bound of its size is known."""
    by_processor: int = 0
    """Bytes of a kernel's scratch that are this processor's choice, the margin among them."""


class Entry(NamedTuple):
    """A line of the ledger: a piece begins (sign 1) or ends (-1)."""

    instant: int
    sign: int
    piece: Piece


def in_order(log: Iterable[Entry]) -> list[Entry]:
    """The lines by their instants, in each first what begins, then what ends: an operator's
    arguments are still there when it has its results.
    """
    return sorted(log, key=lambda entry: (entry.instant, -entry.sign))


class Mark(NamedTuple):
    """A moment with a name."""

    name: str
    instant: int
    place: int
    """The number of lines that the log has then."""
