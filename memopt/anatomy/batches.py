"""A batch, and its parts: the micro-batches of gradient accumulation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def rows_of(who: str, batch: object) -> int:
    """The size of the first dimension that the batch's tensors have.

    Raises:
        ValueError: there is no tensor with a dimension.
    """
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.dim():
            return leaf.shape[0]
    raise ValueError(f"{who}: batch must hold a tensor with a first dimension, got none")


def parts(who: str, batch: Any, rows: int) -> list[Any]:
    """The batch in parts of `rows` rows, the last of what is left.

    Tensors whose first dimension is the batch's are cut, as views; all else is in every part.
    """
    total = rows_of(who, batch)
    return [slice_of(batch, start, min(start + rows, total)) for start in range(0, total, rows)]


def slice_of(batch: Any, start: int, end: int) -> Any:
    """Rows `start` to `end` of a batch."""
    total = rows_of("slice_of", batch)

    def cut(leaf: Any) -> Any:
        has_rows = isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == total
        return leaf[start:end] if has_rows else leaf

    return pytree.tree_map(cut, as_dict(batch))


def as_dict(batch: Any) -> Any:
    """A mapping of another class (transformers' BatchEncoding) as a dict, which pytree opens."""
    return dict(batch) if isinstance(batch, Mapping) else batch


def call(model: Any, batch: Any) -> Any:
    """`model` with the batch as keyword arguments, as positional ones, or as the only one."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, (tuple, list)):
        return model(*batch)
    return model(batch)


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
            f"{list(loss.shape)}, requires_grad={loss.requires_grad}; loss= makes one of the "
            "model's output"
        )
    return loss


def device_of(who: str, model: torch.nn.Module, batch: object) -> torch.device:
    """The device of the model's parameters.

    Raises:
        ValueError: a tensor of the batch is on another one.
    """
    first = next((p for p in model.parameters()), None)
    device = torch.device("cpu") if first is None else first.device
    for path, leaf in pytree.tree_leaves_with_path(as_dict(batch)):
        if isinstance(leaf, Tensor) and leaf.device != device:
            raise ValueError(
                f"{who}: the batch must be on the model's device, {device}, got "
                f"{pytree.keystr(path) or 'a tensor'} on {leaf.device}"
            )
    return device
