"""A batch, and its parts: the micro-batches of gradient accumulation."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence, unpack_sequence
from torch.utils import _pytree as pytree

from memopt._compat import add_note
from memopt.memory.copies import copied
from memopt.memory.cuts import cuts
from memopt.memory.histories import with_gradient_as
from memopt.memory.leaves import (
    all_tensors,
    as_dict,
    is_packed,
    leaves_of,
    mapped,
    named_leaves,
    tensors_of_objects,
)
from memopt.memory.storages import storages


def rows_in(who: str, batch: object) -> int:
    """The rows of a batch that nobody cuts: also those of objects that PyTorch cannot take apart.

    Raises:
        ValueError: there is no tensor with a dimension.
    """
    rows = _first_rows(batch)
    if rows is None:
        rows = next((int(t.size(0)) for t in tensors_of_objects(batch) if t.dim()), None)
    return rows_of(who, batch) if rows is None else rows


def rows_to_cut(batch: object) -> int:
    """The number of parts that a batch can be cut into."""
    return _first_rows(batch) or 1


def rows_of(who: str, batch: object) -> int:
    """The size of the first dimension that the batch's tensors have; of a PackedSequence, how many
    sequences it has.

    Raises:
        ValueError: there is no tensor with a dimension.
    """
    rows = _first_rows(batch)
    if rows is None:
        raise ValueError(
            f"{who}: batch must hold a tensor with a first dimension, got {_without(batch)}"
        )
    return rows


def _without(batch: object) -> str:
    """Says what a batch is in which no tensor was found."""
    unknown = next(
        (type(leaf).__name__ for leaf in leaves_of(batch) if hasattr(leaf, "__dict__")), ""
    )
    if not unknown:
        return "none"
    return (
        f"none: {unknown} is no container that PyTorch knows, nor a dataclass, and nothing says "
        "which of its tensors have rows (torch.utils._pytree.register_pytree_node does)"
    )


def parts(who: str, batch: Any, rows: int) -> list[Any]:
    """The batch in parts of `rows` rows, the last of what is left.

    Tensors whose first dimension is the batch's are cut, as views; all else is in every part. Of
    packed and nested sequences, and of sparse tensors, parts are copies.
    """
    return [slice_of(batch, start, end) for start, end in cuts(rows_of(who, batch), rows)]


def slice_of(batch: Any, start: int, end: int) -> Any:
    """Rows `start` to `end` of a batch."""
    total = _first_rows(batch)

    def cut(leaf: Any) -> Any:
        rows = _rows(leaf)
        return leaf if rows is None or rows != total else _cut(leaf, start, end)

    return mapped(cut, batch)


def repeated(batch: Any, times: int) -> Any:
    """A batch of `times` as many rows: its own rows, repeated."""
    rows = _first_rows(batch)

    def repeat(leaf: Any) -> Any:
        return torch.cat([leaf] * times) if rows is not None and _rows(leaf) == rows else leaf

    return batch if times == 1 else mapped(repeat, batch)


def part_of(batch: Any, rows: int) -> tuple[Any, int]:
    """The first rows, and how many bytes the whole has beyond the memory that this part views."""
    part = slice_of(batch, 0, rows)
    viewed, whole = storages(all_tensors(part)), storages(all_tensors(batch))
    return part, sum(nbytes for key, nbytes in whole.items() if key not in viewed)


def resized(batch: Any, dim: int, who: str) -> Resized:
    """Makes meta tensors of another size of those whose size there is the batch's.

    Raises:
        ValueError: there is no such tensor, or one whose rows have sizes of their own.
    """
    sample = as_dict(batch)
    ragged = next((leaf for leaf in leaves_of(sample) if _is_ragged(leaf)), None)
    if ragged is not None:
        raise ValueError(
            f"{who}: batch must be a function that makes one where rows have lengths of their own, "
            f"got a {type(ragged).__name__} ({getattr(ragged, 'layout', 'packed')})"
        )
    leaves = (leaf for leaf in leaves_of(sample) if isinstance(leaf, Tensor))
    now = next((leaf.shape[dim] for leaf in leaves if leaf.dim() > dim), None)
    if now is None:
        raise ValueError(
            f"{who}: batch must hold a tensor of more than {dim} dimensions, got "
            f"{_without(sample)}; a function of a size that makes a batch is taken too"
        )
    return Resized(sample, dim, now, who)


@dataclass
class Resized:
    """A function of a size that gives the sample with it. As a context it adds to an error which
    tensors it resized: one of them may have that size by chance alone.
    """

    sample: Any
    dim: int
    now: int
    """The sample's own size."""
    who: str
    _last: int | None = None

    def __call__(self, size: int) -> Any:
        self._last = size

        def resize(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            empty = torch.empty(self._shape(leaf, size), dtype=leaf.dtype, device="meta")
            return with_gradient_as(leaf, empty)

        return mapped(resize, self.sample)

    def _shape(self, leaf: Tensor, size: int) -> list[int]:
        shape = list(leaf.shape)
        if leaf.dim() > self.dim and shape[self.dim] == self.now:
            shape[self.dim] = size
        return shape

    def __enter__(self) -> None:
        self._last = None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Exception) and self._last not in (None, self.now):
            add_note(error, self._note(self._last or 0))

    def _note(self, size: int) -> str:
        changed: list[str] = []
        same: list[str] = []
        for path, leaf in named_leaves(self.sample):
            if isinstance(leaf, Tensor):
                name, shape = path or "the batch", self._shape(leaf, size)
                is_same = shape == list(leaf.shape)
                text = f"{name} {list(leaf.shape)}"
                (same if is_same else changed).append(text if is_same else f"{text} to {shape}")
        which, what = ("second", "the length") if self.dim else ("first", "the number of rows")
        name = "longest_sequence" if self.dim else "largest_batch"
        return (
            f"{self.who} resized the tensors whose {which} dimension is {self.now}: "
            f"{', '.join(changed)}; and left as they are: {', '.join(same) or 'none'}. Where that "
            f"is wrong, memopt.{name} takes as batch a function of {what} that makes one"
        )


def without_values(batch: Any) -> Any:
    """A batch of meta tensors in the place of its own, whose memory may go. Rows that have lengths
    of their own stay.
    """

    def meta(tensor: Tensor) -> Tensor:
        if _is_ragged(tensor):
            return tensor
        return with_gradient_as(tensor, tensor.detach().to("meta"))

    batch = as_dict(batch)
    metas = {id(tensor): meta(tensor) for tensor in all_tensors(batch)}

    def without(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return metas[id(leaf)]
        return copied(leaf, metas)[0] if tensors_of_objects(leaf) else leaf

    return pytree.tree_map(without, batch, is_leaf=is_packed)


class Unheld:
    """A batch whose tensors are not kept alive. Rows that have lengths of their own are."""

    def __init__(self, batch: Any) -> None:
        self.without_values = without_values(batch)
        leaves, self._structure = pytree.tree_flatten(as_dict(batch), is_leaf=is_packed)
        self._leaves = [leaf if _is_ragged(leaf) else _weakly(leaf) for leaf in leaves]

    def found(self) -> Any | None:
        """The batch, as long as somebody else holds all of it."""
        leaves = [leaf() if isinstance(leaf, weakref.ref) else leaf for leaf in self._leaves]
        pairs = zip(leaves, self._leaves, strict=True)
        is_gone = any(new is None for new, old in pairs if isinstance(old, weakref.ref))
        return None if is_gone else pytree.tree_unflatten(leaves, self._structure)


def _weakly(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor) and not tensors_of_objects(leaf):
        return leaf
    try:
        return weakref.ref(leaf)
    except TypeError:  # nothing can tell whether a SimpleNamespace is held: as if it were not
        return weakref.ref(_Gone())


class _Gone:
    """An object that nobody holds."""


def positions_of(model: torch.nn.Module, otherwise: int) -> int:
    """The number of positions that a model has a place for, where its configuration says so."""
    found = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    return found if isinstance(found, int) else otherwise


def _is_ragged(leaf: Any) -> bool:
    if not isinstance(leaf, Tensor):
        return is_packed(leaf)
    return leaf.is_nested or leaf.layout is not torch.strided


def _first_rows(batch: object) -> int | None:
    return next((rows for leaf in leaves_of(batch) if (rows := _rows(leaf)) is not None), None)


def _rows(leaf: Any) -> int | None:
    if is_packed(leaf):
        return int(leaf.batch_sizes[0])
    if not isinstance(leaf, Tensor) or not leaf.dim():
        return None
    return int(leaf.size(0))


def counts_of_rows(batch: Any, ignored: int) -> dict[str, list[int]]:
    """How many entries each row has, by the path of a leaf which shows that rows may differ in it.

    Of packed and nested sequences their lengths; of integers some of which are `ignored`, how many
    are not.
    """
    rows = _first_rows(batch)
    found: dict[str, list[int]] = {}
    for path, leaf in named_leaves(batch):
        if rows is None or _rows(leaf) != rows:
            continue
        if is_packed(leaf):
            counts = [len(sequence) for sequence in unpack_sequence(leaf)]
        elif leaf.is_nested:
            counts = [one.numel() for one in leaf.unbind()]
        elif leaf.dtype in (torch.int64, torch.int32) and leaf.layout is torch.strided:
            counted = (leaf != ignored).reshape(rows, -1).sum(1)
            counts = counted.tolist() if leaf.device.type != "meta" else []
            if sum(counts) == leaf.numel():
                continue
        else:
            continue
        found[path or "the batch"] = counts
    return found


def _cut(leaf: Any, start: int, end: int) -> Any:
    if is_packed(leaf):
        sequences = unpack_sequence(leaf)[start:end]
        return pack_sequence(sequences, enforce_sorted=leaf.sorted_indices is None)
    if leaf.is_nested:
        rows = list(leaf.unbind()[start:end])
        return torch.nested.as_nested_tensor(rows, layout=leaf.layout)
    if leaf.layout is not torch.strided:
        chosen = torch.arange(start, end, device=leaf.device)
        if leaf.layout is torch.sparse_coo:
            return leaf.index_select(0, chosen)
        return leaf.to_sparse_coo().index_select(0, chosen).to_sparse(layout=leaf.layout)
    return leaf[start:end]


def arguments_of(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments in a mapping of keywords, a tuple or list of positional ones, or the only one.
    A PackedSequence, which is a tuple too, is one.
    """
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, (tuple, list)) and not is_packed(batch):
        return tuple(batch), {}
    return (batch,), {}


def call(model: Any, batch: Any) -> Any:
    """`model` with the batch as its arguments."""
    args, kwargs = arguments_of(batch)
    return model(*args, **kwargs)


def loss_in(who: str, output: Any) -> Tensor:
    """The loss among what a model returned: itself, its `loss`, its entry "loss" or its first one.

    Raises:
        TypeError: there is none.
        ValueError: it is no scalar, or has no history.
    """
    loss = output
    if isinstance(output, Mapping):
        loss = output.get("loss")
    elif not isinstance(output, Tensor):
        loss = getattr(output, "loss", None)
        if loss is None and isinstance(output, (tuple, list)) and output:
            loss = output[0]
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"{who}: the model must return a loss (a tensor, or an output with `loss`), or loss= "
            f"must make one of its output, got {type(output).__name__} without one"
        )
    if loss.numel() != 1 or not loss.requires_grad:
        raise ValueError(
            f"{who}: the loss must be one number that requires a gradient, got shape "
            f"{list(loss.shape)}, requires_grad={loss.requires_grad}; {_remedy(loss)}"
        )
    if loss.is_complex():
        raise ValueError(
            f"{who}: the loss must be a real number, got one of {loss.dtype}; loss= makes one of "
            "the model's output, such as its abs() or its real part"
        )
    return loss


def _remedy(loss: Tensor) -> str:
    """The way to a loss with a gradient."""
    if torch.is_inference_mode_enabled():
        return "torch.inference_mode() is on, in which nothing has a gradient: call this outside"
    if not torch.is_grad_enabled():
        return "torch.no_grad() is on, in which no graph is made: call this outside"
    if loss.numel() == 1:
        return "if the weights are frozen, some must be trained: parameter.requires_grad_()"
    return "loss= makes one of the model's output"


def device_of(who: str, model: torch.nn.Module, batch: object) -> torch.device:
    """The device of the model's parameters.

    Raises:
        ValueError: a tensor of the batch is on another one.
    """
    first = next((p for p in model.parameters()), None)
    device = torch.device("cpu") if first is None else first.device
    for path, leaf in named_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.device != device:
            taken_away = (
                ". accelerate's cpu_offload and disk_offload leave parameters on meta: ask first, "
                "or accelerate.hooks.remove_hook_from_submodules(model) brings them back"
            )
            raise ValueError(
                f"{who}: the batch must be on the model's device, {device}, got "
                f"{path or 'a tensor'} on {leaf.device}"
                f"{taken_away if any(hasattr(m, '_hf_hook') for m in model.modules()) else ''}"
            )
    return device
