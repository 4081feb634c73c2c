"""The choice of tensors that a compiled graph keeps for backward: eager mode's fates, as a cut.

Outputs of contractions, attention and random draws are kept. Element-wise ops and normalisations
are recomputed, by the code that the compiler generates in front of the gradient that reads them.
Between the two there is a choice: any set of tensors will do from which the rest can be computed,
and the one with the fewest bytes is a minimum cut.

Source: A. Chen's min-cut recomputation in torch._functorch.partitioners, whose heuristics decide by
expected fusion what may be recomputed; here it is the eager recipes' rule.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from memopt._compile.graph import JointGraph, ancestors, joins
from memopt._compile.ops import has_tensor, is_cheap, is_sum, is_view, nbytes, policy_of

# Of two cuts with the same bytes, the one that keeps sums of branches: if residual streams were
# kept as the branches' outputs, backward would add all of them up again, and hold every partial
# sum. In thousandths of a tensor's bytes.
_SUM_IS_WORTH = 20
# Inputs and outputs are most often held by the caller until backward ends: then it costs nothing to
# keep them, where a copy costs its bytes. But they need not be held: a much smaller copy wins.
_OF_CALLER_IS_WORTH = 100
_UNIT = 1000


@dataclass(frozen=True)
class Cut:
    """The tensors of forward that backward gets."""

    kept: frozenset[fx.Node]
    """Nodes whose outputs are kept. Inputs of the graph may be among them."""
    again: frozenset[fx.Node]
    """Nodes that are recomputed from the kept ones."""


def choose(
    joint: JointGraph, run_again: Collection[fx.Node] = (), once: Collection[fx.Node] = ()
) -> Cut:
    """The cut of the fewest bytes.

    Args:
        run_again: contractions that may be recomputed, as if they were cheap. Then residual streams
            are not recomputed: else the least would be to keep the model's input alone, and to run
            all of forward when backward begins.
        once: nodes that are not recomputed though they are cheap.
    """
    import networkx as nx  # PyTorch's own need; only here, since it takes a while to import

    wanted = joint.wanted()
    reached = ancestors(wanted)
    streams = joins(joint) if run_again else ()
    may = {
        node: node not in streams
        and node not in once
        and _may_be_made_again(node, joint, run_again)
        for node in joint.nodes
        if node in reached
    }
    network = nx.DiGraph()
    network.add_nodes_from(("source", "sink"))
    for node in wanted:
        network.add_edge((node, "out"), "sink")
    for node, may_be in may.items():
        if not may_be:
            network.add_edge("source", (node, "in"))
        else:
            for argument in node.all_input_nodes:
                network.add_edge((argument, "out"), (node, "in"))
        price = _price(node, joint, may_be)
        if price is None:
            network.add_edge((node, "in"), (node, "out"))
        else:
            network.add_edge((node, "in"), (node, "out"), capacity=price)
    _, (source_side, _) = nx.minimum_cut(
        network, "source", "sink", flow_func=nx.algorithms.flow.dinitz
    )
    kept = frozenset(n for n in may if (n, "in") in source_side and (n, "out") not in source_side)
    again = frozenset(n for n in may if (n, "in") not in source_side)
    return Cut(kept, _read(wanted, kept, again))


def cut_at(joint: JointGraph, kept: frozenset[fx.Node]) -> Cut:
    """The cut of another partitioner, which keeps these."""
    wanted = joint.wanted()
    free = {node for node in joint.nodes if node.op != "placeholder"} - kept
    return Cut(kept, _read(wanted, kept, free - joint.backward))


def tag(joint: JointGraph, cut: Cut) -> dict[fx.Node, CheckpointPolicy]:
    """The cut in the tags by which PyTorch's partitioner takes orders."""
    tags = {
        node: CheckpointPolicy.MUST_SAVE
        for node in cut.kept
        if node.op == "call_function" and has_tensor(node)
    }
    tags.update((node, CheckpointPolicy.MUST_RECOMPUTE) for node in cut.again)
    return {node: policy for node, policy in tags.items() if policy_of(node) is None}


def _may_be_made_again(node: fx.Node, joint: JointGraph, run_again: Collection[fx.Node]) -> bool:
    if node.op != "placeholder" and node not in joint.computed:
        return True
    if any(argument in joint.written for argument in node.all_input_nodes):
        return False
    asked = policy_of(node)
    if asked is not None:
        return asked in (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
    return is_cheap(node) or node in run_again


def _price(node: fx.Node, joint: JointGraph, again: bool) -> int | None:
    """The cost of keeping the node's output; None: it cannot be kept."""
    if node in joint.parameters:
        return 0
    if node.op != "placeholder" and node not in joint.computed:
        return None
    if not has_tensor(node):  # a size, which costs nothing, or a list of outputs
        value = node.meta.get("val")
        return None if isinstance(value, (tuple, list)) or value is None else 0
    if again and (is_view(node) or _is_recomputed_by_order(node)):
        return None
    worth = 0
    if node in joint.of_caller:
        worth = _OF_CALLER_IS_WORTH
    elif is_sum(node):
        worth = _SUM_IS_WORTH
    return nbytes(node) * (_UNIT - worth)


def _is_recomputed_by_order(node: fx.Node) -> bool:
    """Whether a checkpointed region asks for it. At the border to the next one it is kept."""
    if policy_of(node) is None:
        return False
    region = node.meta.get("ac_graph_id")
    return not any(user.meta.get("ac_graph_id", region) != region for user in node.users)


def _read(
    wanted: Collection[fx.Node], kept: Collection[fx.Node], again: Collection[fx.Node]
) -> frozenset[fx.Node]:
    """The nodes of `again` that backward reads, or another node that is recomputed."""
    found: set[fx.Node] = set()
    stack = [node for node in wanted if node in again]
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(a for a in node.all_input_nodes if a in again)
    return frozenset(found)
