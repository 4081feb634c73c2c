"""Ways to divide a compiled graph, and the choice among them.

memopt's own are minimum cuts, without and with contractions that are recomputed too (budget.py).
PyTorch's are what its partitioner keeps at an `activation_memory_budget`. Each has its predicted
peak and work. Without a budget the lowest peak is taken that costs about no more work than
PyTorch's own choice; within one, the least work. The prediction says in which order they are
tried; before one is taken, its peak is counted in the code that Inductor generates for it. As
PyTorch's choices are among them, none is taken that is worse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from torch import fx

from memopt._compile.graph import JointGraph
from memopt._compile.ops import is_contraction
from memopt._compile.policy import Cut
from memopt._compile.timeline import Prediction, predict_graph

# More work than PyTorch's own choice by this factor is not taken for a lower peak, unless a budget
# asks for one.
_ABOUT = 1.02

# By how much a real peak may be above the predicted one: the most that was seen (NOTES.md), but for
# T5, where it was a quarter. What PyTorch saves without a budget, and what memopt keeps without
# recomputing contractions, was followed to the byte in most models.
EXACT, AGAIN, PYTORCH_AGAIN = 1.005, 1.02, 1.1

# To generate the code of both halves takes about two thirds of a compilation without kernels.
_MOST_COUNTED = 4


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
    least: int
    """The least that `most` may be."""
    how: str = "predicted"
    """Or "counted": `most` is that of its code."""


Count = Callable[[Candidate], Candidate]
"""Returns the candidate with the peak that its code has."""


def candidate(name: str, joint: JointGraph, cut: Cut, error: float) -> Candidate:
    """A cut with what is predicted for it."""
    found: Prediction = predict_graph(joint, cut)
    again = sum(is_contraction(node) for node in cut.again)
    most, least = int(found.most * error), int(found.most / error)
    return Candidate(name, cut, found.kept, most, found.where, found.work, again, least)


def about_as_fast(way: Candidate, own: Candidate) -> bool:
    """Whether it takes about no more work than `own`, which is PyTorch's."""
    return way.work <= own.work * _ABOUT


def freely(own: Candidate, others: Iterable[Candidate], alone: bool, count: Count) -> Candidate:
    """The candidate of the lowest peak in about no more work than `own`, which is PyTorch's. It may
    not keep more either: what is kept is predicted exactly.

    Args:
        alone: no other graph runs between its forward and backward. Then to keep less gives nothing
            but a lower peak.
    """
    better = [c for c in others if c.kept <= own.kept and about_as_fast(c, own)]
    in_order = sorted(better, key=lambda c: (c.most, c.kept, c.work))
    if not in_order or not _is_better(in_order[0], own, alone):
        return own
    seen = count(own)
    for way in in_order[:_MOST_COUNTED]:
        found = count(way)
        if _is_better(found, seen, alone):
            return found
    return seen


def _is_better(way: Candidate, own: Candidate, alone: bool) -> bool:
    return way.most < own.most or (way.most == own.most and not alone)


def within(
    budget: int, ways: Callable[[int], Iterable[Candidate]], count: Count
) -> Candidate | None:
    """The candidate of the least work whose peak is within `budget`, if one is found.

    Args:
        ways: candidates for what is predicted to be within so many bytes.
    """
    seen: dict[Cut, Candidate] = {}
    aim = budget
    while len(seen) < _MOST_COUNTED:
        maybe = [c for c in ways(aim) if c.least <= aim and c.cut not in seen]
        if not maybe:
            break
        best = min(maybe, key=lambda c: (c.work, c.most))
        found = seen[best.cut] = count(best)
        if found.most <= budget:
            return found
        if found.most > best.most:  # the others may be as wrong
            aim = min(aim, budget * best.most // found.most)
    return None


def lowest(predicted: Iterable[Candidate], sure: Iterable[Candidate], count: Count) -> Candidate:
    """The candidate of the lowest peak.

    Args:
        predicted: of these the lowest few are counted.
        sure: all of these are.
    """
    in_order = sorted(predicted, key=lambda c: c.most)
    counted = map(count, (*in_order[:_MOST_COUNTED], *sure))
    return min(counted, key=lambda c: c.most)


def kept_by(names: Iterable[str], joint: JointGraph) -> frozenset[fx.Node]:
    """The nodes of forward that a backward of another partitioner takes, by their names."""
    taken = frozenset(names)
    return frozenset(n for n in joint.nodes if n.name in taken and joint.is_forward(n))
