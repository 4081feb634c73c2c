"""The parts of the joint graph of forward and backward that torch.compile's partitioner gets.

A node of forward depends on no gradient. Its outputs that backward reads must be saved, or
recomputed from tensors that are saved.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import fx

from memopt._compile.ops import (
    base,
    elements,
    has_tensor,
    is_cheap,
    is_sum,
    nbytes,
    op_name,
    source_of,
)


@dataclass(frozen=True)
class JointGraph:
    """The joint graph, and which part of it is which."""

    nodes: tuple[fx.Node, ...]
    """All but the output, in order."""
    backward: frozenset[fx.Node]
    """Nodes that depend on a gradient, the incoming gradients among them."""
    computed: frozenset[fx.Node]
    """Nodes that forward needs for its own outputs. A node that only backward reads may be of
    neither kind: it runs in backward, and can never be kept."""
    forward_outputs: tuple[fx.Node, ...]
    backward_outputs: tuple[fx.Node, ...]
    parameters: frozenset[fx.Node]
    """Inputs that are allocated before forward and after backward."""
    of_caller: frozenset[fx.Node]
    """Inputs, and forward's outputs or what they are views of: the caller may hold them."""
    written: frozenset[fx.Node]
    """Inputs that forward writes into: not there any more as they were when backward runs."""
    copied: frozenset[fx.Node]
    """Inputs that, if they are kept, are kept as copies in a layout that convolutions like."""

    def is_forward(self, node: fx.Node) -> bool:
        return node not in self.backward

    def is_whole_step(self) -> bool:
        """Whether its outputs with gradients are numbers, as a loss is: nothing large runs between
        its forward and its backward.
        """
        arrive = [node for node in self.backward if node.op == "placeholder"]
        return all(elements(node) <= 1 for node in arrive)

    def wanted(self) -> list[fx.Node]:
        """The nodes of forward that backward reads."""
        found = {n: None for b in self.nodes if b in self.backward for n in b.all_input_nodes}
        found.update(dict.fromkeys(self.backward_outputs))
        return [node for node in found if self.is_forward(node)]


def read_joint_graph(
    graph: fx.Graph,
    *,
    forward_outputs: int,
    parameters: Iterable[int],
    channels_last: bool,
) -> JointGraph:
    """
    Args:
        graph: as AOTAutograd traced it: inputs are called primals and tangents.
        forward_outputs: how many of its outputs are forward's.
        parameters: which of the primals are there before and after.
        channels_last: whether the compiler chooses the layout of what convolutions read.
    """
    nodes = [node for node in graph.nodes if node.op != "output"]
    backward: set[fx.Node] = set()
    for node in nodes:
        if node.op == "placeholder":
            if "tangents" in str(node.target):
                backward.add(node)
        elif any(argument in backward for argument in node.all_input_nodes):
            backward.add(node)
    (output,) = (node for node in graph.nodes if node.op == "output")
    outputs = [o if isinstance(o, fx.Node) else None for o in output.args[0]]
    primals = [n for n in nodes if n.op == "placeholder" and n not in backward]
    static = frozenset(primals[index] for index in parameters if index < len(primals))
    of_forward = tuple(o for o in outputs[:forward_outputs] if o is not None)
    return JointGraph(
        tuple(nodes),
        frozenset(backward),
        _computed(nodes, of_forward),
        of_forward,
        tuple(o for o in outputs[forward_outputs:] if o is not None),
        static,
        frozenset((*primals, *map(base, of_forward))),
        _written(nodes, output),
        _copied(nodes) if channels_last else frozenset(),
    )


def joins(joint: JointGraph) -> frozenset[fx.Node]:
    """Sums of two branches that come from different contractions: residual streams."""
    sources: dict[fx.Node, frozenset[fx.Node]] = {}
    found = set()
    for node in joint.nodes:
        branches = [sources[argument] for argument in node.all_input_nodes if argument in sources]
        if node in joint.backward:
            continue
        if node.op == "placeholder":
            sources[node] = frozenset(() if node in joint.parameters else (node,))
        elif not is_cheap(node):
            sources[node] = frozenset((node,))
        elif is_sum(node) and all(branches) and branches[0] != branches[-1]:
            found.add(node)
            sources[node] = frozenset((node,))
        else:
            whole = nbytes(node)
            every = frozenset().union(*branches)
            sources[node] = frozenset(s for s in every if 2 * nbytes(s) >= whole)
    return frozenset(found)


def ancestors(of: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes that are needed to compute these, themselves among them."""
    found: set[fx.Node] = set()
    stack = list(of)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found


def _computed(nodes: list[fx.Node], outputs: Iterable[fx.Node]) -> frozenset[fx.Node]:
    found = ancestors(outputs)
    for node in nodes:  # of an op with several outputs all are there
        if node.target is operator.getitem and source_of(node) in found:
            found.add(node)
    return frozenset(found)


def _copied(nodes: list[fx.Node]) -> frozenset[fx.Node]:
    """Images, and weights, from which what a convolution reads is computed."""
    return frozenset(
        node
        for node in ancestors(n for n in nodes if op_name(n) == "convolution")
        if node.op == "placeholder"
        and has_tensor(node)
        and node.meta["val"].ndim == 4
        and not node.meta["val"].is_contiguous(memory_format=torch.channels_last)
    )


def _written(nodes: list[fx.Node], output: fx.Node) -> frozenset[fx.Node]:
    found: set[fx.Node] = set()
    for node in nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            found.update(a for a in node.all_input_nodes if a.op == "placeholder")
    written = [
        description.mutated_input
        for description in output.meta.get("desc", ())
        if hasattr(description, "mutated_input")
    ]
    found.update(n for n in nodes if n.op == "placeholder" and n.meta.get("desc") in written)
    return frozenset(found)
