"""The storages behind tensors: each is a piece of memory, and tensors are views of it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from memopt._compat import without_transforms, wraps_tensors


class Deferred(Tensor):
    """Base of tensors that have no memory before somebody needs their elements."""

    def made(self) -> Tensor | None:
        """The tensor that has the memory; None: there is none yet."""
        raise NotImplementedError


def node_of(tensor: Tensor) -> Any:
    """The tensor's node in the graph. A tensor without memory stays so, as it does not where its
    `grad_fn` is asked for.
    """
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.grad_fn


def graph_leaves(nodes: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the leaves that get gradients by a backward from these nodes."""
    return (node.variable for node in nodes_behind(nodes) if hasattr(node, "variable"))


def nodes_behind(nodes: Iterable[Any]) -> Iterator[Any]:
    """Yield these nodes, and all that a backward from them reaches."""
    todo = list(nodes)
    seen = set(todo)
    while todo:
        node = todo.pop()
        yield node
        fresh = {after for after, _ in node.next_functions if after is not None} - seen
        seen |= fresh
        todo += fresh


class _Key(StorageWeakRef):
    """A weak reference that is its own copy: a copy of PyTorch's frees what it does not own."""

    def __deepcopy__(self, memo: object) -> _Key:
        return self

    def __reduce__(self) -> str:
        raise TypeError("a key of a storage cannot be pickled: it is an address of this process")


def storages(tensors: Iterable[Tensor]) -> dict[Hashable, int]:
    """The distinct storages behind `tensors` and the bytes of each.

    The keys are weak: they do not keep a storage alive, and no later one is equal to them.
    """
    found: dict[Hashable, int] = {}
    for tensor in tensors:
        for part in parts_of(tensor):
            try:
                storage = part.untyped_storage()
            except NotImplementedError:  # of a layout that is opaque: counted each time
                found[object()] = part.numel() * part.element_size()
            else:
                found[_Key(storage)] = storage.nbytes()  # type: ignore[no-untyped-call]
    return found


def storages_of(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """The storages whose memory can be read: not of opaque layouts, not on meta."""
    if _is_plain(tensor):
        if not tensor.is_meta:
            yield tensor.untyped_storage()
        return
    for part in parts_of(tensor):
        if not part.is_meta:
            try:
                yield part.untyped_storage()
            except (NotImplementedError, RuntimeError):
                continue


def parts_of(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that hold the memory of a sparse tensor or one that wraps others."""
    if is_lazy(tensor):  # it has no memory yet
        return
    if isinstance(tensor, Deferred):
        part = tensor.made()
        if part is not None:
            yield part
        return
    if wraps_tensors(tensor):
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        for name in names:
            part = getattr(tensor, name)
            if isinstance(part, Tensor):  # a DTensor names its mesh as well
                yield from parts_of(part)
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    else:
        yield tensor


def has_sizes(tensor: Tensor) -> bool:
    """Say whether a tensor has one size in each dimension: nested ones of PyTorch's first kind,
    torch.nested with layout=torch.strided, have none.
    """
    return not tensor.is_nested or tensor.layout is not torch.strided


def sizes_of(tensor: Tensor) -> tuple[int, ...]:
    """Return a tensor's shape; of one without sizes the number of its elements."""
    return tuple(tensor.shape) if has_sizes(tensor) else (tensor.numel(),)


def tensors_in(value: object) -> Sequence[Tensor]:
    """The tensors in what an operator takes or returns, or in a batch."""
    if isinstance(value, Tensor):
        return (value,)
    if type(value) is dict:
        value = list(value.values())
    elif type(value) not in (tuple, list):
        return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    found: list[Tensor] = []
    for entry in value:  # type: ignore[attr-defined]
        if isinstance(entry, Tensor):
            found.append(entry)
        elif type(entry) in (tuple, list, dict):
            if entry:
                found.extend(tensors_in(entry))
        elif isinstance(entry, (tuple, list, dict)) or type(entry) in pytree.SUPPORTED_NODES:
            found.extend(tensors_in(entry))  # a named tuple; a cache of keys and values
    return found


def storage_keys(tensor: Tensor) -> Sequence[int]:
    """The keys of the storages behind a tensor."""
    if _is_plain(tensor):
        try:
            return (tensor.untyped_storage()._cdata,)
        except NotImplementedError:  # a transform of torch.func wraps it
            inner = without_transforms(tensor)
            return () if inner is tensor else storage_keys(inner)
    return [part.untyped_storage()._cdata for part in parts_of(tensor) if has_storage(part)]


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided


def has_storage(tensor: Tensor) -> bool:
    try:
        tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return False
    return True
