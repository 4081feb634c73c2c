"""What the joint graph of forward and backward is made of, as torch.compile's partitioner gets it.

A node of forward depends on no gradient. What backward reads of it must be saved, or made again
from what is saved.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

# Ops that are not tagged as element-wise by PyTorch and that read or move each element about once.
_VIEWS = {
    *("view", "_unsafe_view", "reshape", "permute", "t", "transpose", "expand", "squeeze"),
    *("unsqueeze", "slice", "select", "split", "split_with_sizes", "alias", "as_strided"),
    *("broadcast_in_dim", "unbind", "diagonal", "unfold", "detach", "view_of"),
}
_RESHAPES = {"view", "_unsafe_view", "reshape", "squeeze", "unsqueeze", "alias", "detach"}
_COPIES = {"clone", "_to_copy", "convert_element_type", "where", "masked_fill", "fma"}
_REDUCTIONS = {
    *("sum", "mean", "amax", "amin", "var", "var_mean", "std", "max", "min", "any", "all"),
    *("prod", "logsumexp", "argmax", "argmin"),
}
_MOVES = {
    *("_softmax", "_log_softmax", "native_layer_norm", "_fused_rms_norm", "native_group_norm"),
    *("embedding", "index", "gather", "index_select", "cat", "stack", "constant_pad_nd", "clone"),
    *("_to_copy", "copy", "full", "full_like", "zeros", "ones", "zeros_like", "ones_like"),
    *("empty", "empty_like", "new_zeros", "new_ones", "new_full", "arange", "iota"),
    *("scalar_tensor", "triu", "tril", "repeat", "cumsum", "flip", "roll", "lift_fresh_copy"),
    *("convert_element_type", "prepare_softmax_online", "where", "masked_fill", "fma"),
    *("inductor_random", "inductor_randint", "inductor_lookup_seed"),
}
_PLACED = {"select_scatter", "slice_scatter", "diagonal_scatter"}
_SCATTERED = {
    *("index_put", "_unsafe_index_put", "_unsafe_masked_index_put_accumulate"),
    *("scatter", "scatter_add", "scatter_reduce"),
}
_CHEAP = _VIEWS | _REDUCTIONS | _MOVES

# Matrix products, convolutions and attention: what takes the time of a step.
_CONTRACTIONS = {
    *("mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_mm"),
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
}

# A reduction whose output is this many times smaller than its input is worth its bytes.
_SMALLER = 4


@dataclass(frozen=True)
class JointGraph:
    """The joint graph, and which part of it is which."""

    nodes: tuple[fx.Node, ...]
    """All but the output, in order."""
    backward: frozenset[fx.Node]
    """Those that depend on a gradient, the incoming gradients among them."""
    computed: frozenset[fx.Node]
    """Those that forward needs for its own outputs. What only backward reads may be of neither
    kind: it runs in backward, and can never be kept."""
    forward_outputs: tuple[fx.Node, ...]
    backward_outputs: tuple[fx.Node, ...]
    parameters: frozenset[fx.Node]
    """Inputs that are there before forward and after backward."""
    of_caller: frozenset[fx.Node]
    """Inputs, and forward's outputs or what they are views of: the caller may hold them."""
    written: frozenset[fx.Node]
    """Inputs that forward writes into: not there any more as they were when backward runs."""
    copied: frozenset[fx.Node]
    """Inputs that, if they are kept, are kept as copies in a layout that convolutions like."""
    nbytes: Callable[[fx.Node], int]

    def is_forward(self, node: fx.Node) -> bool:
        return node not in self.backward

    def wanted(self) -> list[fx.Node]:
        """What backward reads of forward."""
        found = {n: None for b in self.nodes if b in self.backward for n in b.all_input_nodes}
        found.update(dict.fromkeys(self.backward_outputs))
        return [node for node in found if self.is_forward(node)]


def read_joint_graph(
    graph: fx.Graph,
    *,
    forward_outputs: int,
    parameters: Iterable[int],
    channels_last: bool,
    nbytes: Callable[[fx.Node], int],
) -> JointGraph:
    """
    Args:
        graph: as AOTAutograd traced it: inputs are called primals and tangents.
        forward_outputs: how many of its outputs are forward's.
        parameters: which of the primals are there before and after.
        channels_last: whether the compiler chooses the layout of what convolutions read.
        nbytes: the size of a node's tensors.
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
        nbytes,
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
            nbytes = joint.nbytes(node)
            every = frozenset().union(*branches)
            sources[node] = frozenset(s for s in every if 2 * joint.nbytes(s) >= nbytes)
    return frozenset(found)


def is_sum(node: fx.Node) -> bool:
    """Whether it adds two tensors."""
    return str(node.target) == "aten.add.Tensor" and len(node.all_input_nodes) == 2


def is_product(node: fx.Node) -> bool:
    """Whether it is a product of two matrices."""
    return _name(node) == "mm"


def ancestors(of: Iterable[fx.Node]) -> set[fx.Node]:
    """What is needed to compute these, themselves among them."""
    found: set[fx.Node] = set()
    stack = list(of)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found


def is_view(node: fx.Node) -> bool:
    """Whether its output has no memory of its own."""
    return node.op == "call_function" and (
        _name(node) in _VIEWS or (node.target is operator.getitem and is_view(_source(node)))
    )


def is_reshape(node: fx.Node) -> bool:
    """Whether its elements are in the same order as those of what it is a view of."""
    return node.op == "call_function" and _name(node) in _RESHAPES


def is_elementwise(node: fx.Node) -> bool:
    """Whether each element is computed from those at the same place."""
    return isinstance(node.target, torch._ops.OpOverload) and (
        torch.Tag.pointwise in node.target.tags or _name(node) in _COPIES
    )


def base(node: fx.Node) -> fx.Node:
    """The node itself, or what it is a view of."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def has_tensor(node: fx.Node) -> bool:
    """Whether its value is one tensor; not so a number, and the outputs of an op with several."""
    return isinstance(node.meta.get("val"), torch.Tensor)


def is_cheap(node: fx.Node) -> bool:
    """Whether it is element-wise, a view, a reduction or a normalisation: not worth its bytes.

    A random draw is one if it is made from a seed, which is kept; not the drawing of the seed.
    """
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return is_cheap(_source(node))
    if not isinstance(node.target, torch._ops.OpOverload):
        return _is_of_sizes(node)
    return (
        is_generated(node) and not _keeps_little(node) and _name(node) not in _PLACED | _SCATTERED
    )


def is_generated(node: fx.Node) -> bool:
    """Whether a code generator makes the kernel that computes it, and calls no library."""
    if node.target is operator.getitem:
        return is_generated(_source(node))
    if not isinstance(node.target, torch._ops.OpOverload):
        return _is_of_sizes(node)
    if not _is_pure(node.target):
        return False
    return torch.Tag.pointwise in node.target.tags or _name(node) in _CHEAP | _PLACED | _SCATTERED


def is_contraction(node: fx.Node) -> bool:
    """Whether it is a matrix product, a convolution or attention that can be run again."""
    return _name(node) in _CONTRACTIONS and _is_pure(node.target)


def is_convolution(node: fx.Node) -> bool:
    """Whether it is one, or its backward."""
    return _name(node) in ("convolution", "convolution_backward")


def is_fusible(node: fx.Node) -> bool:
    """Whether a code generator computes it inside the loop of what reads it."""
    if is_view(node) or _is_reduction(node) or _name(node) in _SCATTERED | {"cat"}:
        return False
    return is_generated(node)


def reduces_rows(node: fx.Node) -> bool:
    """Whether it is a reduction over the last dimensions."""
    value = node.all_input_nodes[0].meta.get("val") if node.all_input_nodes else None
    if not _is_reduction(node) or not isinstance(value, torch.Tensor):
        return False
    dims = node.args[1] if len(node.args) > 1 else None
    if isinstance(dims, int):
        dims = [dims]
    if not isinstance(dims, (list, tuple)) or not dims:
        return True
    return {dim % value.ndim for dim in dims} == set(range(value.ndim - len(dims), value.ndim))


def policy_of(node: fx.Node) -> CheckpointPolicy | None:
    """What a checkpointed region around the node wants of it: the compiler's own tag."""
    policy: CheckpointPolicy | None = node.meta.get("recompute")
    return policy


def _computed(nodes: list[fx.Node], outputs: Iterable[fx.Node]) -> frozenset[fx.Node]:
    found = ancestors(outputs)
    for node in nodes:  # of an op with several outputs all are there
        if node.target is operator.getitem and _source(node) in found:
            found.add(node)
    return frozenset(found)


def _source(node: fx.Node) -> fx.Node:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source


def _name(node: fx.Node) -> str | None:
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    if node.target.namespace not in ("aten", "prims"):
        return None
    return node.target._schema.name.split("::")[1]


def _is_pure(target: Any) -> bool:
    return (
        isinstance(target, torch._ops.OpOverload)
        and torch.Tag.nondeterministic_seeded not in target.tags
        and not target._schema.is_mutable
        and target.namespace in ("aten", "prims")
    )


def _is_reduction(node: fx.Node) -> bool:
    return _name(node) in _REDUCTIONS or (
        node.target is operator.getitem and _is_reduction(_source(node))
    )


def _keeps_little(node: fx.Node) -> bool:
    """Whether it is a reduction to statistics: to keep them costs less than to read all again."""
    return _name(node) in _REDUCTIONS and elements(node) * _SMALLER < sum(
        elements(argument) for argument in node.all_input_nodes
    )


def elements(node: fx.Node) -> int:
    """Of its tensor or tensors."""
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else [value]
    return sum(hint(v.numel()) for v in values if isinstance(v, torch.Tensor))


def hint(size: Any) -> int:
    """A size that the graph was traced with, where it is a symbol."""
    if isinstance(size, int):
        return size
    known = size.node.hint
    return 4096 if known is None else int(known)


def _is_of_sizes(node: fx.Node) -> bool:
    """Arithmetic on sizes, which the compiler itself carries into backward."""
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))


def _copied(nodes: list[fx.Node]) -> frozenset[fx.Node]:
    """Images, and weights, from which what a convolution reads is computed."""
    return frozenset(
        node
        for node in ancestors(n for n in nodes if _name(n) == "convolution")
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
