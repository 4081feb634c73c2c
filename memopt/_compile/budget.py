"""Contractions that are recomputed too, so that the peak of a compiled graph fits a budget.

They are taken in the order of the operations that their recompute costs for each byte that it
saves, the earlier ones first among equals: what the last layers keep is read as soon as backward
begins, and to recompute it frees nothing at the peak. Bisection finds how many of them the budget
needs. Each guess is a whole cut with its own timeline: a sum of their bytes would count tensors
that are not alive at the peak, and miss those that the recompute itself needs.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import fx

from memopt._compile.graph import JointGraph
from memopt._compile.ops import hint, is_contraction, policy_of
from memopt._compile.policy import Cut, choose
from memopt._compile.timeline import Bytes, predict_graph

_ENOUGH_GUESSES = 12


class FittedCut(NamedTuple):
    """A cut, the bytes that it needs, and how many contractions it recomputes."""

    cut: Cut
    bytes: Bytes
    run_again: int


def fit_graph(joint: JointGraph, budget: int) -> FittedCut:
    """The cut with the fewest contractions recomputed whose predicted peak is within `budget`.

    Raises:
        ValueError: there is none; says the least that is possible.
    """
    candidates = sorted(_candidates(joint), key=_operations_per_byte)
    best = _plan(joint, candidates, 0)
    if best.bytes.most <= budget:
        return best
    plans = {0: best}
    guesses = {
        round(len(candidates) * part / _ENOUGH_GUESSES) for part in range(1, _ENOUGH_GUESSES + 1)
    }
    for number in sorted(guesses):
        plans[number] = _plan(joint, candidates, number)
        if plans[number].bytes.most <= budget:
            break
    else:
        floor = min(plan.bytes.most for plan in plans.values())
        raise ValueError(
            f"compile: budget must be at least {floor:,} bytes for this graph, even with all of "
            f"its {len(candidates)} matrix products, convolutions and attentions recomputed, got "
            f"{budget:,}"
        )
    fits, too_few = number, max(known for known in plans if known < number)
    while fits - too_few > 1:
        middle = (fits + too_few) // 2
        plans[middle] = _plan(joint, candidates, middle)
        if plans[middle].bytes.most <= budget:
            fits = middle
        else:
            too_few = middle
    return plans[fits]


def _plan(joint: JointGraph, candidates: list[fx.Node], number: int) -> FittedCut:
    cut = choose(joint, frozenset(candidates[:number]))
    return FittedCut(cut, predict_graph(joint, cut), number)


def _candidates(joint: JointGraph) -> list[fx.Node]:
    return [
        node
        for node in joint.nodes
        if node in joint.computed and is_contraction(node) and policy_of(node) is None
    ]


def _operations_per_byte(node: fx.Node) -> float:
    """The operations of a recompute, for each byte of its output."""
    shapes = [_shape(argument) for argument in node.all_input_nodes]
    value = node.meta["val"]
    output = value[0] if isinstance(value, (tuple, list)) else value
    name = str(node.target)
    if "attention" in name:
        queries, keys = shapes[0], shapes[1]
        operations = 4 * math.prod(queries) * keys[-2]
    elif "convolution" in name:
        operations = 2 * math.prod(map(hint, output.shape)) * math.prod(shapes[1][1:])
    else:  # a matrix product: its first matrix is the last argument but one
        operations = 2 * math.prod(map(hint, output.shape)) * shapes[-2][-1]
    return operations / max(_nbytes(value), 1)


def _shape(node: fx.Node) -> list[int]:
    value = node.meta.get("val")
    return [hint(size) for size in value.shape] if isinstance(value, torch.Tensor) else []


def _nbytes(value: Any) -> int:
    values = value if isinstance(value, (tuple, list)) else [value]
    return sum(
        math.prod(map(hint, v.shape)) * v.element_size()
        for v in values
        if isinstance(v, torch.Tensor)
    )
