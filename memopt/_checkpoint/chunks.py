"""A call in chunks of rows: each chunk is a region of its own (csrc/saved/chunks.h).

Rows are the places of all dims but the last of the first tensor among the arguments. Tensors that
begin with the same dims are cut with it; all else goes whole to every chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from memopt._arguments import check_count
from memopt._checkpoint.naming import region_name
from memopt._compat import wraps_tensors
from memopt._extension import _C


def checked_chunks(who: str, chunks: object) -> int | None:
    """The number of chunks that a user gave; None where the call runs whole.

    Raises:
        TypeError, ValueError: it is not None, nor an int of at least 1.
    """
    return None if chunks is None else check_count(who, "chunks", chunks)


class NotRows(ValueError):
    """A call cannot run in chunks of rows."""

    def __init__(self, who: str, rule: str, got: str, why: str = "") -> None:
        super().__init__(f"{who}: chunks needs {rule}, got {got}{why and f': {why}'}")
        self.why = why or f"that needs {rule}, got {got}"
        """The reason, which names no module."""


class StandIn(NotRows):
    """An object in place of a tensor, such as torch.fx's Proxy, is among a call's arguments."""


class CallRows:
    """A call's arguments, and which of them have rows.

    Args:
        args, kwargs: with a tensor among them that has rows.

    Raises:
        NotRows: there is none; a StandIn, if there is one.
    """

    def __init__(self, who: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.leaves, self.spec = pytree.tree_flatten((args, kwargs))
        for leaf in self.leaves:
            if not isinstance(leaf, Tensor) and hasattr(type(leaf), "__torch_function__"):
                raise StandIn(who, "tensors", f"a {type(leaf).__name__} in place of one")
        first = next((leaf for leaf in self.leaves if isinstance(leaf, Tensor)), None)
        if first is None or first.dim() == 0:
            got = "none" if first is None else "one without dims"
            raise NotRows(who, "a tensor of rows among the arguments", got)
        self.first = first
        self.row_sizes = tuple(first.shape[:-1])
        self.count = math.prod(self.row_sizes)
        for leaf in (first, *filter(self.are_of, self.leaves)):
            if leaf.layout is not torch.strided or wraps_tensors(leaf) or not is_ordinary(leaf):
                got = f"{type(leaf).__name__} of layout {leaf.layout}"
                raise NotRows(who, "an ordinary tensor of rows", got)

    def with_plain_tensors(self) -> CallRows:
        """These with copies of those arguments that inference mode made, which no graph may save.
        To be called outside of it.
        """
        copies = {
            id(leaf): leaf.clone()
            for leaf in self.leaves
            if isinstance(leaf, Tensor) and leaf.is_inference()
        }
        leaves = [copies.get(id(leaf), leaf) for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return CallRows("", args, kwargs)

    def sizes_of(self, count: int) -> tuple[int, ...]:
        """The sizes of a chunk of so many rows: as many dims, of which all but the last are 1."""
        return (*(1,) * (len(self.row_sizes) - 1), count)

    def sizes_of_chunk(self, chunks: int) -> tuple[int, ...]:
        """The sizes of the largest of so many chunks."""
        return self.sizes_of(math.ceil(self.count / chunks))

    def are_of(self, leaf: Any) -> bool:
        """Whether an argument has these rows."""
        dims = len(self.row_sizes)
        return isinstance(leaf, Tensor) and dims > 0 and tuple(leaf.shape[:dims]) == self.row_sizes

    def call_with(self, exchange: Callable[[Any], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with others in place of those that have rows."""
        leaves = [exchange(leaf) if self.are_of(leaf) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs


def is_ordinary(tensor: Tensor) -> bool:
    """Whether a tensor is of a class whose operators return tensors of no class of their own:
    chunks and what they are joined to are none.
    """
    kind = type(tensor)
    if kind is Tensor or kind is nn.Parameter:
        return True
    return bool(kind.__torch_function__ is torch._C._disabled_torch_function_impl)


def run_in_chunks(
    who: str, subject: object, rows: CallRows, chunks: int, region: Callable[..., Any]
) -> Any:
    """A call's result, of `chunks` regions of its rows, one after another.

    The first `rows % chunks` chunks have a row more than the others. Fewer rows than chunks give a
    chunk for each row. Each chunk's tensors have as many dims as those of the call, and all but the
    last of the row dims are 1. So the function may ask for their shape.

    Args:
        who: the function that the user called, for messages.
        subject: the module or function that the user knows, for messages.
        region: calls the function as a region.

    Raises:
        ValueError: a result is not of the chunk's rows, or is no tensor and differs by chunk.
    """
    dims, count = len(rows.row_sizes), rows.count
    inputs = {id(leaf): _C.ChunkedInput(leaf, dims) for leaf in rows.leaves if rows.are_of(leaf)}
    sums = _C.ChunkSums()
    first, outputs = 0, _Outputs(who, subject, rows)
    with uncached_casts():
        for number in range(chunks):
            size = count // chunks + (number < count % chunks)
            sums.begin()
            # One part of a tensor, wherever it is passed: the gradients of all places are one's.
            parts = {key: whole.chunk(first, size) for key, whole in inputs.items()}
            args, kwargs = rows.call_with(lambda leaf: parts[id(leaf)])  # noqa: B023
            result = region(*args, **kwargs)
            sums.end(outputs.put(result, size))
            del result
            first += size
    return outputs.joined()


class _Outputs:
    """The results of the chunks, which become one."""

    def __init__(self, who: str, subject: object, rows: CallRows) -> None:
        self._who, self._subject, self._rows = who, subject, rows
        self._leaves: list[Any] = []
        self._spec: Any = None

    def put(self, result: Any, size: int) -> list[Tensor]:
        """Takes the next chunk's result; returns the tensors in it."""
        leaves, spec = pytree.tree_flatten(result)
        dims = len(self._rows.row_sizes)
        if self._spec is None:
            self._spec = spec
            self._leaves = [
                _C.ChunkedOutput(self._rows.count, dims) if isinstance(leaf, Tensor) else leaf
                for leaf in leaves
            ]
        if spec != self._spec:
            self._refuse("results of one structure", f"{spec} after {self._spec}")
        sizes = (*(1,) * (dims - 1), size)
        tensors = []
        for joined, leaf in zip(self._leaves, leaves, strict=True):
            if isinstance(leaf, Tensor) and isinstance(joined, _C.ChunkedOutput):
                if tuple(leaf.shape[:dims]) != sizes:
                    self._refuse(
                        f"tensors whose shape begins with that of the rows, {list(sizes)}",
                        f"one of shape {list(leaf.shape)}",
                    )
                if not is_ordinary(leaf):
                    self._refuse("ordinary tensors", f"one of {type(leaf).__name__}")
                joined.put(leaf)
                tensors.append(leaf)
            elif joined is not leaf and joined != leaf:
                self._refuse("one value for all chunks, beside tensors", f"{leaf!r}, {joined!r}")
        return tensors

    def joined(self) -> Any:
        leaves = [
            leaf.joined(self._rows.row_sizes) if isinstance(leaf, _C.ChunkedOutput) else leaf
            for leaf in self._leaves
        ]
        return pytree.tree_unflatten(leaves, self._spec)

    def _refuse(self, expected: str, got: str) -> None:
        name = region_name(self._subject)
        raise ValueError(
            f"{self._who}: chunks needs a call that works on each row alone: {name} must return "
            f"{expected}, got {got}"
        )


@contextmanager
def uncached_casts() -> Iterator[None]:
    """A scope in which autocast casts a weight for each chunk, so that the gradients of the chunks
    are added in the weight's dtype, and not in the 16 bits of one cast that they share.
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
