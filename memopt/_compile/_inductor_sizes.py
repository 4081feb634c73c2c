"""The sizes that a graph is divided for where some are symbols (dynamic shapes).

torch.compile traces a function once more, with symbols for sizes, when it meets other sizes than
before. The batch at hand may be smaller than one that the function was compiled for already: then
the graph is divided for that one, since it runs for both.

Relied upon: a symbolic size's `node`, with its expression and the `shape_env` of its symbols; a
comparison of sizes that is asked for its truth becomes a guard of the compiled graph; the bounds of
`torch._dynamo.mark_dynamic`, which no guard may narrow.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import sympy
import torch
from torch import fx
from torch._guards import TracingContext
from torch.fx.experimental.symbolic_shapes import ShapeEnv, StrictMinMaxConstraint

from memopt._compile.graph import JointGraph
from memopt._compile.ops import Sizes, has_tensor, hint, is_view, op_name

# The sizes of the inputs' tensors, one after another, by the ops that the graph is of.
_seen: dict[int, set[tuple[int, ...]]] = {}


def own_sizes(joint: JointGraph) -> Sizes:
    """Numbers for the symbols among the sizes of a graph's inputs: those of the batch at hand. Of a
    size whose largest the user has said (`mark_dynamic`), that.
    """
    return _numbers(joint, tuple(map(hint, _sizes(joint))))


def largest_sizes(joint: JointGraph) -> Sizes:
    """Numbers as those of `own_sizes`: of the batches that the same ops were divided for, this one
    among them, the largest that is at least this one in each size.
    """
    sizes = list(_sizes(joint))
    now = tuple(map(hint, sizes))
    places = [place for place, size in enumerate(sizes) if _symbol(size) is not None]
    seen = _seen.setdefault(_ops(joint), set())
    seen.add(now)
    larger = [
        of_one
        for of_one in seen
        if len(of_one) == len(now) and all(of_one[place] >= now[place] for place in places)
    ]
    most = max(larger, key=lambda of_one: math.prod(of_one[place] for place in places))
    return _numbers(joint, most)


def _numbers(joint: JointGraph, of_batch: tuple[int, ...]) -> Sizes:
    promised = _promised()
    numbers: dict[sympy.Symbol, sympy.Integer] = {}
    for size, number in zip(_sizes(joint), of_batch, strict=True):
        symbol = _symbol(size)
        if symbol is not None:
            range_ = _range(size)
            # A graph for one size alone would not be one of symbols.
            least = range_.upper if range_.upper in promised else range_.lower + 1
            numbers[symbol] = sympy.Integer(max(numbers.get(symbol, 0), number, least))
    return numbers


def compile_anew_beyond(joint: JointGraph, most: Sizes) -> None:
    """Let the compiled graph run for sizes up to these: larger ones are traced and divided anew."""
    promised = _promised()
    for size in _sizes(joint):
        symbol = _symbol(size)
        if symbol is not None and _range(size).upper not in promised:
            bool(size <= int(most[symbol]))


def without_guards(joint: JointGraph) -> AbstractContextManager[object]:
    """Makes no guard of what is asked about sizes in the scope."""
    symbolic = next((size for size in _sizes(joint) if isinstance(size, torch.SymInt)), None)
    return nullcontext() if symbolic is None else _environment(symbolic).suppress_guards()


def _sizes(joint: JointGraph) -> Iterator[int | torch.SymInt]:
    """The sizes of the tensors that forward gets."""
    for node in joint.nodes:
        if node.op == "placeholder" and joint.is_forward(node) and has_tensor(node):
            yield from node.meta["val"].shape


def _ops(joint: JointGraph) -> int:
    """A number for the ops, whatever the sizes: what computes sizes, and views, may differ."""
    nodes: Iterable[fx.Node] = filter(has_tensor, joint.nodes)
    return hash(tuple(op_name(node) for node in nodes if not is_view(node)))


def _symbol(size: int | torch.SymInt) -> sympy.Symbol | None:
    found = size.node.expr if isinstance(size, torch.SymInt) else None
    return found if isinstance(found, sympy.Symbol) else None


def _range(size: int | torch.SymInt) -> Any:
    return _environment(size).var_to_range[_symbol(size)]


def _promised() -> set[sympy.Expr]:
    """The largest sizes that the user has said, for whatever tensor."""
    tracing = TracingContext.try_get()
    contexts = () if tracing is None else tracing.tensor_to_context.values()
    said = (size for context in contexts for size in getattr(context, "constraint_sizes", ()))
    strict = (size.vr.upper for size in said if isinstance(size, StrictMinMaxConstraint))
    return {upper for upper in strict if isinstance(upper, sympy.Integer)}


def _environment(size: int | torch.SymInt) -> ShapeEnv:
    assert isinstance(size, torch.SymInt)
    found: ShapeEnv = size.node.shape_env
    return found
