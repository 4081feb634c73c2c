"""Ways to divide a compiled graph, and the choice among them.

memopt's own are minimum cuts, without and with contractions that are recomputed too (budget.py).
PyTorch's are what its partitioner keeps at an `activation_memory_budget`. Each has its predicted
peak and work. Without a budget the lowest peak is taken that costs about no more work than
PyTorch's own choice; within one, the least work. As PyTorch's choice is among them, none is taken
that is predicted to be worse than it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import fx

from memopt._compile.graph import JointGraph
from memopt._compile.ops import is_contraction
from memopt._compile.policy import Cut
from memopt._compile.timeline import Prediction, predict_graph

# More work than PyTorch's own choice by this factor is not taken for a lower peak, unless a budget
# asks for one.
_ABOUT = 1.02

# By how much a real peak may be above the predicted one: the most that was seen (NOTES.md). What
# PyTorch saves without a budget, and what memopt keeps without recomputing contractions, was
# followed to the byte in most models; the rest of the first two is for what was not measured.
EXACT, AGAIN, PYTORCH_AGAIN = 1.005, 1.02, 1.1


class Candidate(NamedTuple):
    """A way to divide a graph, and what is predicted for it."""

    name: str
    """Who chose it."""
    cut: Cut
    kept: int
    """Bytes kept between forward and backward, the outputs of forward among them."""
    most: int
    """The most bytes at any time, with the error that such predictions were seen to have."""
    where: str
    """The op that runs when they are allocated, and its module."""
    work: float
    """The cost of both halves, in bytes that are read or written in the same time."""
    again: int
    """How many contractions are recomputed."""


def candidate(name: str, joint: JointGraph, cut: Cut, error: float) -> Candidate:
    """A cut with what is predicted for it."""
    found: Prediction = predict_graph(joint, cut)
    again = sum(is_contraction(node) for node in cut.again)
    most = int(found.most * error)
    return Candidate(name, cut, found.kept, most, found.where, found.work, again)


def about_as_fast(way: Candidate, own: Candidate) -> bool:
    """Whether it takes about no more work than `own`, which is PyTorch's."""
    return way.work <= own.work * _ABOUT


def freely(own: Candidate, others: Iterable[Candidate], alone: bool) -> Candidate:
    """The candidate of the lowest peak in about no more work than `own`, which is PyTorch's. It may
    not keep more either: what is kept is predicted exactly, the peak of `own` up to 8 % high.

    Args:
        alone: no other graph runs between its forward and backward. Then to keep less gives nothing
            but a lower peak, which must be lower by more than predictions are wrong.
    """
    most = own.most / EXACT if alone else own.most
    allowed = [c for c in others if c.most <= most and c.kept <= own.kept and about_as_fast(c, own)]
    return min([*allowed, own], key=lambda c: (c.most, c.kept, c.work))


def within(budget: int, candidates: Iterable[Candidate]) -> Candidate | None:
    """The candidate of the least work whose peak is within `budget`, if there is one."""
    fits = [c for c in candidates if c.most <= budget]
    return min(fits, key=lambda c: (c.work, c.most), default=None)


def kept_by(names: Iterable[str], joint: JointGraph) -> frozenset[fx.Node]:
    """The nodes of forward that a backward of another partitioner takes, by their names."""
    taken = frozenset(names)
    return frozenset(n for n in joint.nodes if n.name in taken and joint.is_forward(n))
