"""The kind of a node of the graph: a view, a reduction, a contraction; and who computes it."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
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
# Views whose elements are in the same order.
_RESHAPES = {"view", "_unsafe_view", "reshape", "squeeze", "unsqueeze", "alias", "detach"}
# Element-wise, but not tagged so.
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
    "inductor_lookup_seed",
}
# Written into a copy of another tensor: no memory is saved by running them again. The first are
# computed element by element, the others are kernels of their own.
_PLACED = {"select_scatter", "slice_scatter", "diagonal_scatter"}
_SCATTERED = {
    *("index_put", "_unsafe_index_put", "_unsafe_masked_index_put_accumulate"),
    *("scatter", "scatter_add", "scatter_reduce"),
}
_DRAWS = {"inductor_random", "inductor_randint"}
_CHEAP = _VIEWS | _REDUCTIONS | _MOVES | _DRAWS

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

Sizes = Mapping[Any, Any]
"""Numbers for symbols, sympy's both."""

_numbers: ContextVar[Sizes] = ContextVar("sizes", default=MappingProxyType({}))


def is_view(node: fx.Node) -> bool:
    """Whether its output has no memory of its own."""
    return node.op == "call_function" and (
        op_name(node) in _VIEWS or (node.target is operator.getitem and is_view(source_of(node)))
    )


def is_reshape(node: fx.Node) -> bool:
    """Whether its elements are in the same order as those of what it is a view of."""
    return node.op == "call_function" and op_name(node) in _RESHAPES


def is_elementwise(node: fx.Node) -> bool:
    """Whether each element is computed from those at the same place."""
    return isinstance(node.target, torch._ops.OpOverload) and (
        torch.Tag.pointwise in node.target.tags or op_name(node) in _COPIES
    )


def base(node: fx.Node) -> fx.Node:
    """The node itself, or what it is a view of."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def is_sum(node: fx.Node) -> bool:
    """Whether it adds two tensors."""
    return str(node.target) == "aten.add.Tensor" and len(node.all_input_nodes) == 2


def is_product(node: fx.Node) -> bool:
    """Whether it is a product of two matrices."""
    return op_name(node) == "mm"


def is_contraction(node: fx.Node) -> bool:
    """Whether it is a matrix product, a convolution or attention that can be recomputed."""
    return op_name(node) in _CONTRACTIONS and _is_pure(node.target)


def operations(node: fx.Node) -> int:
    """The multiplications and additions of a contraction."""
    name = str(op_name(node))
    # The input that an op adds to its product comes first.
    first, second = node.args[1:3] if name in ("addmm", "baddbmm") else node.args[:2]
    if "attention" in name:
        return 4 * math.prod(_shape(first)) * _shape(second)[-2]
    value = node.meta["val"]
    size = 2 * math.prod(map(hint, value.shape))
    return size * (math.prod(_shape(second)[1:]) if name == "convolution" else _shape(first)[-1])


def is_draw(node: fx.Node) -> bool:
    """Whether it draws random numbers from a seed."""
    return op_name(node) in _DRAWS


def is_convolution(node: fx.Node) -> bool:
    """Whether it is one, or its backward."""
    return op_name(node) in ("convolution", "convolution_backward")


def is_scatter(node: fx.Node) -> bool:
    """Whether it writes into a copy of its first argument where indices say."""
    return op_name(node) in _SCATTERED


def is_cheap(node: fx.Node) -> bool:
    """Whether it is element-wise, a view, a reduction or a normalisation: not worth its bytes.

    A random draw is one if it is made from a seed, which is kept; not the drawing of the seed.
    """
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return is_cheap(source_of(node))
    if not isinstance(node.target, torch._ops.OpOverload):
        return _is_of_sizes(node)
    return (
        is_generated(node) and not _keeps_little(node) and op_name(node) not in _PLACED | _SCATTERED
    )


def is_generated(node: fx.Node) -> bool:
    """Whether the compiler generates the code that computes it, and calls no library."""
    if node.target is operator.getitem:
        return is_generated(source_of(node))
    if not isinstance(node.target, torch._ops.OpOverload):
        return _is_of_sizes(node)
    if not _is_pure(node.target):
        return False
    return torch.Tag.pointwise in node.target.tags or op_name(node) in _CHEAP | _PLACED | _SCATTERED


def is_fusible(node: fx.Node) -> bool:
    """Whether generated code can compute it inside the loop of what reads it."""
    if is_view(node) or _is_reduction(node) or is_scatter(node) or op_name(node) == "cat":
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


def has_tensor(node: fx.Node) -> bool:
    """Whether its value is one tensor; not so a number, and the outputs of an op with several."""
    return isinstance(node.meta.get("val"), torch.Tensor)


def elements(node: fx.Node) -> int:
    """The number of elements of a node's tensor or tensors."""
    return sum(hint(tensor.numel()) for tensor in _tensors(node))


def device_kind(nodes: Iterable[fx.Node]) -> str:
    """The device of the first tensor that is not on the CPU, or "cpu"."""
    devices = (n.meta["val"].device.type for n in nodes if has_tensor(n))
    return next((device for device in devices if device != "cpu"), "cpu")


def nbytes(node: fx.Node) -> int:
    """The bytes of a node's tensor or tensors."""
    return sum(hint(tensor.numel()) * tensor.element_size() for tensor in _tensors(node))


@contextmanager
def sizes_are(numbers: Sizes) -> Iterator[None]:
    """Symbols stand for these numbers, and not for those that the graph was traced with."""
    before = _numbers.set(numbers)
    try:
        yield
    finally:
        _numbers.reset(before)


def hint(size: Any) -> int:
    """The number that a size stands for, where it is a symbol."""
    if isinstance(size, int):
        return size
    found = in_numbers(size.node.expr)
    if found.is_number:
        return int(found)
    known = size.node.hint
    return 4096 if known is None else int(known)


def in_numbers(expression: Any) -> Any:
    """An expression of sizes, with the numbers of `sizes_are` for their symbols."""
    return expression.xreplace(_numbers.get())


def policy_of(node: fx.Node) -> CheckpointPolicy | None:
    """The policy of a checkpointed region around the node: the compiler's own tag."""
    policy: CheckpointPolicy | None = node.meta.get("recompute")
    return policy


def module_path(node: fx.Node) -> str:
    """The path of the module that runs it, or whose gradient it is of; "" if there is none."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    path, _ = list(stack.values())[-1]
    return str(path).removeprefix("L['self']").lstrip(".")


def source_of(node: fx.Node) -> fx.Node:
    """The op of which it takes an output."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source


def op_name(node: fx.Node) -> str | None:
    """The op's name without namespace and overload; None: it is not one of PyTorch's ops."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    if node.target.namespace not in ("aten", "prims"):
        return None
    return node.target._schema.name.split("::")[1]


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else [value]
    return [each for each in values if isinstance(each, torch.Tensor)]


def _shape(argument: Any) -> list[int]:
    return [hint(size) for size in argument.meta["val"].shape]


def _is_pure(target: Any) -> bool:
    return (
        isinstance(target, torch._ops.OpOverload)
        and torch.Tag.nondeterministic_seeded not in target.tags
        and not target._schema.is_mutable
        and target.namespace in ("aten", "prims")
    )


def _is_reduction(node: fx.Node) -> bool:
    return op_name(node) in _REDUCTIONS or (
        node.target is operator.getitem and _is_reduction(source_of(node))
    )


def _keeps_little(node: fx.Node) -> bool:
    """Whether it is a reduction to statistics: to keep them costs less than to read all again."""
    return op_name(node) in _REDUCTIONS and elements(node) * _SMALLER < sum(
        elements(argument) for argument in node.all_input_nodes
    )


def _is_of_sizes(node: fx.Node) -> bool:
    """Arithmetic on sizes, which the compiler itself carries into backward."""
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))
