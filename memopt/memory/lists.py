"""Rows in a batch that cannot be cut. A batch is cut by the tensors' first dimension, which does
not cut a list with an entry for each row, nor an object: both would meet rows of others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from memopt.memory.batches import arguments_of, rows_of
from memopt.memory.leaves import as_dict, entries_of_record, is_packed, named_leaves
from memopt.memory.objects import tensors_held
from memopt.memory.storages import has_sizes

_RULE = (
    "batch must hold its rows in tensors, along their first dimension, or in a nested tensor "
    "(torch.nested, layout=torch.jagged) or a PackedSequence"
)
_SHOWN = 6


def check_cut(who: str, batch: Any) -> None:
    """Raises ValueError where a batch that is to be cut has a list with an entry for each row:
    sequences of several lengths, one of which would be cut by itself, or as many entries as rows.
    And where it has an object with a tensor of as many rows, which nothing tells how to cut, an
    array of another library, or no rows at all.
    """
    rows = rows_of(who, batch)
    if rows == 0:
        raise ValueError(f"{who}: batch must have rows, got tensors whose first dimension is 0")
    if rows == 1:
        return
    for path, leaf in named_leaves(batch):
        if hasattr(leaf, "__array__") and not isinstance(leaf, Tensor) and rows in leaf.shape[:1]:
            raise ValueError(
                f"{who}: {_RULE}, got {path or 'the batch'}, a {type(leaf).__name__} of {rows} "
                "rows (torch.as_tensor makes a tensor of it)"
            )
        if any(has_sizes(t) and t.dim() and t.size(0) == rows for t in tensors_held([leaf])):
            raise ValueError(
                f"{who}: {_RULE}, which may be in dicts, lists, tuples and dataclasses, got "
                f"{path or 'the batch'}, a {type(leaf).__name__}, with a tensor of {rows} rows "
                "(torch.utils._pytree.register_pytree_node tells how to take one apart)"
            )
    for path, entries in _lists_in(arguments_of(as_dict(batch))):
        tensors = [e for e in entries if isinstance(e, Tensor) and has_sizes(e) and e.dim()]
        sizes = [int(tensor.size(0)) for tensor in tensors]
        looks = {(tensor.dtype, tuple(tensor.shape[1:])) for tensor in tensors}
        is_ragged = len(tensors) == len(entries) and len(looks) == 1 and len(set(sizes)) > 1
        if is_ragged and (rows in sizes or len(entries) == rows):
            shown = ", ".join(map(str, sizes[:_SHOWN])) + (", ..." if len(sizes) > _SHOWN else "")
            raise ValueError(f"{who}: {_RULE}, got {path} of tensors with {shown} rows")
        is_of_rows = isinstance(entries, list) and len(entries) == rows and rows not in sizes
        if is_of_rows and all(map(_holds_tensors, entries)):
            raise ValueError(
                f"{who}: {_RULE}, got {path} with an entry for each of {rows} rows; what every "
                "part of the batch is to get whole may be a tuple"
            )


def list_of_numbers(batch: Any) -> str:
    """The path of a list with a number for each row; empty if there is none."""
    rows = rows_of("", batch)
    for path, entries in _lists_in(arguments_of(as_dict(batch))):
        is_of_rows = isinstance(entries, list) and len(entries) == rows > 1
        if is_of_rows and all(isinstance(entry, (int, float)) for entry in entries):
            return path
    return ""


def _holds_tensors(entry: object) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(entry))


def _lists_in(arguments: tuple[tuple[Any, ...], Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
    """The lists and tuples in arguments, and their paths in the batch."""
    args, kwargs = arguments
    pending = [(f"batch[{place}]", value) for place, value in enumerate(args)]
    pending += [(f"batch[{name!r}]", value) for name, value in kwargs.items()]
    while pending:
        path, value = pending.pop(0)
        if is_packed(value):
            continue
        if isinstance(value, Mapping):
            pending += [(f"{path}[{key!r}]", each) for key, each in value.items()]
        elif isinstance(value, (list, tuple)):
            yield path, value
            pending += [(f"{path}[{place}]", each) for place, each in enumerate(value)]
        else:
            pending += [(f"{path}.{name}", each) for name, each in entries_of_record(value).items()]
