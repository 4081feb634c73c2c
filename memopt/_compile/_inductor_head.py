"""The pass of memopt.compile that has heads compute their losses in chunks of rows.

It runs over the graph that Dynamo made, before autograd. There a linear whose output reaches
nothing but losses returns lazy logits instead, as a converted model's head does in eager mode: when
AOTAutograd runs the graph to trace it, each loss of them is memopt's op, which keeps the gradients
of the head's input and weight in place of the logits. What lazy logits do not know makes the
product, and is traced as it was.

Relied upon: Inductor's option `pre_grad_custom_pass`, and `node.meta["example_value"]`, the tensor
that Dynamo ran the graph with, whose version says that it was written.
"""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

import memopt._head
from memopt._compat import in_transform
from memopt._extension import _C, HAS_NATIVE
from memopt._head.logits import lazy_logits
from memopt._head.losses import LOSSES, TRACED_OR_PLAIN
from memopt._head.operations import OPERATIONS
from memopt.memory.scratch.head import rows_of_a_chunk

_log = logging.getLogger("memopt.compile")
_LINEAR = {F.linear, torch._C._nn.linear}
_OPERATORS = {
    operator.getitem: Tensor.__getitem__,
    operator.add: Tensor.add,
    operator.mul: Tensor.mul,
    operator.truediv: Tensor.div,
    operator.neg: Tensor.neg,
}
_FILES = (__file__, *map(str, sorted(Path(memopt._head.__file__).parent.glob("*.py"))))


class HeadsInChunks(CustomGraphPass):
    """Replaces the linears of a graph that are heads. Runs the pass that was set first."""

    def __init__(self, first: Any = None) -> None:
        self._first: tuple[Any, ...] = (
            () if first is None else tuple(first) if isinstance(first, (list, tuple)) else (first,)
        )

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other._first == self._first

    def __hash__(self) -> int:
        return hash(self._first)

    def __call__(self, graph: fx.Graph) -> None:
        for each in self._first:
            each(graph)
        for node in graph.nodes:
            if HAS_NATIVE and _is_head(node):
                node.target = linear_of_losses
                words = node.meta["example_value"].shape[-1]
                _log.info("head in chunks: a linear of %s classes, whose output is losses'", words)

    def uuid(self) -> Any:
        others = [each.uuid() if hasattr(each, "uuid") else None for each in self._first]
        return None if None in others else (get_hash_for_files(_FILES), *others)


def with_heads(options: dict[str, Any]) -> dict[str, Any]:
    """Inductor's options, in which the pass follows the one that is set there or for all graphs."""
    first = options.get("pre_grad_custom_pass", inductor_config.pre_grad_custom_pass)
    return {**options, "pre_grad_custom_pass": HeadsInChunks(first)}


def linear_of_losses(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear, which waits for a loss where there are gradients, and ops for its tensors."""
    tensors = [tensor for tensor in (input, weight, bias) if tensor is not None]
    has_gradient = torch.is_grad_enabled() and (input.requires_grad or weight.requires_grad)
    if not has_gradient or in_transform() or not all(map(_has_ops, tensors)):
        return F.linear(input, weight, bias)
    return lazy_logits("", input, weight, bias)


def _has_ops(tensor: Tensor) -> bool:
    """Whether memopt computes with such tensors, which no other class wraps (DTensor)."""
    is_plain = (
        type(tensor) in TRACED_OR_PLAIN and tensor.layout is torch.strided and not tensor.is_nested
    )
    return is_plain and tensor.dtype in _C.dtypes() and tensor.device.type in _C.device_types()


def _is_head(node: fx.Node) -> bool:
    """Whether it is a linear whose output takes two chunks at least, and more than the gradient of
    its weight, which a loss in chunks keeps in its place; all of whose uses lead to losses, and
    whose tensors nothing writes.
    """
    if node.op != "call_function" or node.target not in _LINEAR:
        return False
    given = dict(zip(("input", "weight", "bias"), node.args, strict=False)) | node.kwargs
    logits, weight = (_value(each) for each in (node, given.get("weight")))
    if logits is None or weight is None or weight.dim() != 2 or not logits.is_floating_point():
        return False
    words, features = map(_hint, weight.shape)
    rows = math.prod(map(_hint, logits.shape[:-1]))
    if not words or rows <= features or rows < 2 * rows_of_a_chunk(rows, words, logits.itemsize):
        return False
    if any(map(_is_written, given.values())):
        return False
    losses = _losses(node)
    return bool(losses) and not _writes_lists(node, losses)


def _value(node: Any) -> Tensor | None:
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if isinstance(value, Tensor) else None


def _hint(size: int | torch.SymInt) -> int:
    """Return what a symbol stood for when the graph was made; 0 where it stands for nothing."""
    return (size.node.hint or 0) if isinstance(size, torch.SymInt) else size


def _losses(node: fx.Node) -> set[fx.Node]:
    """The losses that all uses of logits lead to, under operations that leave these lazy; none if
    one leads elsewhere.
    """
    found: set[fx.Node] = set()
    for user in node.users:
        function = _function(user)
        further = {user} if function in LOSSES else set()
        if function in OPERATIONS:
            further = _losses(user)
        if not further:
            return set()
        found |= further
    return found


def _is_written(node: Any) -> bool:
    """Whether the graph writes a tensor, or a view of it, before or behind the node."""
    value = _value(node)
    return value is not None and value._version > 0


def _writes_lists(node: fx.Node, losses: Collection[fx.Node]) -> bool:
    """Whether something writes between logits and their losses: operators on lists, such as
    `_foreach_mul_`, count no version.
    """
    waiting = set(losses)
    while waiting:
        node = node.next
        waiting.discard(node)
        name = str(getattr(node.target, "__name__", node.target))
        if name.endswith("_") and not name.endswith("__"):
            return True
    return False


def _function(node: fx.Node) -> Any:
    """The function that a node calls, as `__torch_function__` gets it."""
    if node.op == "call_method":
        return getattr(Tensor, str(node.target), None)
    if node.op == "call_function":
        target: Any = node.target
        return _OPERATORS.get(target, target)
    return None
