"""The ops of forward and backward that a cut divides, one after another, and what reads what."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from torch import fx

from memopt._compile.graph import JointGraph, ancestors
from memopt._compile.ops import is_convolution, is_view
from memopt._compile.policy import Cut


class GraphStep(NamedTuple):
    """A run of a node: in forward, or (again) in backward."""

    node: fx.Node
    in_backward: bool


class Reader(NamedTuple):
    """A reader of a step, of itself or through views."""

    step: GraphStep
    view: GraphStep | None
    """The view next to the step, if there are several. A convolution's view is its own, since it
    wants another layout."""


@dataclass(frozen=True)
class Steps:
    """The steps of both halves."""

    order: list[GraphStep]
    arguments: dict[GraphStep, list[GraphStep]]
    """The runs that made what each step reads."""
    readers: dict[GraphStep, list[Reader]]
    kept: list[GraphStep]
    """Tensors that forward keeps for backward, and its outputs."""
    results: list[GraphStep]
    """The gradients."""
    stored: frozenset[GraphStep]
    """Both, and what they are views of: they are in memory whatever reads them."""


def steps_of(joint: JointGraph, cut: Cut) -> Steps:
    """The steps of a division of `joint`."""
    order = _in_order(joint, cut)
    known = set(order)
    arguments = {
        step: [_made(argument, step, known) for argument in step.node.all_input_nodes]
        for step in order
    }
    kept = _distinct(
        (GraphStep(node, False) for node in (*cut.kept, *joint.forward_outputs)), known
    )
    results = _distinct((GraphStep(n, n not in cut.kept) for n in joint.backward_outputs), known)
    stored = frozenset(base for step in (*kept, *results) for base in _bases(step, arguments))
    return Steps(order, arguments, _readers(order, arguments), kept, results, stored)


def _distinct(steps: Iterable[GraphStep], known: Collection[GraphStep]) -> list[GraphStep]:
    return [step for step in dict.fromkeys(steps) if step in known]


def _in_order(joint: JointGraph, cut: Cut) -> list[GraphStep]:
    """The ops of both halves: a tensor is recomputed in front of its first reader."""
    needed = ancestors([*joint.forward_outputs, *cut.kept])
    forward = [GraphStep(n, False) for n in joint.nodes if n in needed]
    backward: dict[GraphStep, None] = {}
    for node in joint.nodes:
        if node in joint.backward:
            for argument in node.all_input_nodes:
                _make_again(argument, cut, backward)
            backward[GraphStep(node, True)] = None
    for node in joint.backward_outputs:
        _make_again(node, cut, backward)
    return [*forward, *backward]


def _make_again(node: fx.Node, cut: Cut, steps: dict[GraphStep, None]) -> None:
    """Append to `steps` what makes `node` in backward, if it is not kept."""
    stack = [(node, False)]
    while stack:
        node, ready = stack.pop()
        if node not in cut.again or GraphStep(node, True) in steps:
            continue
        if ready:
            steps[GraphStep(node, True)] = None
        else:
            stack.append((node, True))
            stack.extend((argument, False) for argument in node.all_input_nodes)


def _made(argument: fx.Node, reader: GraphStep, known: Collection[GraphStep]) -> GraphStep:
    """The run that made what `reader` reads."""
    again = GraphStep(argument, True)
    return again if reader.in_backward and again in known else GraphStep(argument, False)


def _readers(
    order: list[GraphStep], arguments: dict[GraphStep, list[GraphStep]]
) -> dict[GraphStep, list[Reader]]:
    readers: dict[GraphStep, list[Reader]] = {step: [] for step in order}
    for step in reversed(order):
        if is_view(step.node):
            through = [Reader(reader.step, step) for reader in readers[step]]
        else:
            through = [Reader(step, step if is_convolution(step.node) else None)]
        for argument in arguments[step]:
            readers[argument].extend(through)
    return readers


def _bases(step: GraphStep, arguments: dict[GraphStep, list[GraphStep]]) -> Iterable[GraphStep]:
    """The step, and what it is a view of."""
    yield step
    while is_view(step.node):
        step = arguments[step][0]
        yield step
