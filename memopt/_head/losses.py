"""Losses and log-probabilities of lazy logits, by memopt's ops in chunks of rows.

Rules like those of operations.py, which answer with the function's result. What an argument
asks for that the ops do not have is left to PyTorch's functions on the logits, errors included.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor

from memopt._head.call import AutocastState
from memopt._head.operations import HeadRule
from memopt._head.pending import Pending
from memopt.functional.cross_entropy import IGNORED

TRACED_OR_PLAIN = {Tensor, FunctionalTensor}
"""Classes of tensors that ask nothing of their functions; AOTAutograd traces with the second."""

# Read once: binding arguments to a signature takes longer than the loss's own host time.
_NAMES = {f: tuple(inspect.signature(f).parameters)[1:] for f in (F.cross_entropy, F.nll_loss)}


def _loss(pending: Pending, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """cross_entropy of logits, nll_loss of log-probabilities."""
    is_of_logs = func is F.nll_loss
    if pending.log_sign != (1 if is_of_logs else 0):
        return NotImplemented
    names = _NAMES[func]
    given = dict(zip(names, args, strict=False)) | kwargs
    if (
        len(given) < len(args) + len(kwargs)
        or "target" not in given
        or not given.keys() <= {*names}
    ):
        return NotImplemented
    if given.get("size_average") is not None or given.get("reduce") is not None:
        return NotImplemented
    target, weight = given["target"], given.get("weight")
    reduction, smoothing = given.get("reduction", "mean"), given.get("label_smoothing", 0.0)
    place = 1 if pending.looks.dim() > 1 else 0
    if pending.class_dim != place or not _is_plain(target, pending) or target.requires_grad:
        return NotImplemented
    if reduction not in ("none", "mean", "sum") or not 0.0 <= smoothing <= 1.0:
        return NotImplemented
    if weight is not None and not _fits_weight(weight, pending):
        return NotImplemented
    ignore_index: int | None = given.get("ignore_index", IGNORED)
    if type(ignore_index) is not int:
        return NotImplemented
    if target.dtype == torch.int64 and target.shape == pending.row_shape():
        pass
    elif (
        target.dtype == pending.looks.dtype
        and target.shape == pending.looks.shape
        and ignore_index == IGNORED
        and not is_of_logs
    ):
        target = target.movedim(place, -1)
        ignore_index = None
    else:
        return NotImplemented
    dtype = _loss_dtype(pending)
    return pending.loss(target, dtype, weight, reduction, ignore_index, smoothing)


def _gathered(pending: Pending, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """gather of one class a row: its log-probability, or its logit."""
    given = dict(zip(("dim", "index"), args, strict=False)) | kwargs
    if set(given) != {"dim", "index"} or not _is_class_dim(given["dim"], pending):
        return NotImplemented
    index = given["index"]
    wanted = list(pending.looks.shape)
    wanted[pending.class_dim] = 1
    if not _is_plain(index, pending) or index.dtype != torch.int64 or list(index.shape) != wanted:
        return NotImplemented
    target = index.squeeze(pending.class_dim)
    sign = pending.log_sign
    found = pending.log_probs(target) if sign else pending.at(target)
    found = found.to(pending.looks.dtype).unsqueeze(pending.class_dim)
    return -found if sign < 0 else found


def _logsumexp(pending: Pending, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = dict(zip(("dim", "keepdim"), args, strict=False)) | kwargs
    if not _is_class_dim(given.get("dim"), pending) or pending.log_sign or not pending.words:
        return NotImplemented
    found = pending.logsumexp().to(pending.looks.dtype)
    return found.unsqueeze(pending.class_dim) if given.get("keepdim") else found


def _summed(pending: Pending, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The sum or mean of the log-probabilities of all classes: a loss of smoothing alone."""
    given = dict(zip(("dim", "keepdim"), args, strict=False)) | kwargs
    dim, dtype = given.get("dim"), given.get("dtype")
    if not pending.log_sign or not _is_class_dim(dim, pending):
        return NotImplemented
    if dtype not in (None, torch.float32, pending.looks.dtype):
        return NotImplemented
    first = torch.zeros(pending.row_shape(), dtype=torch.int64, device=pending.call.input.device)
    wide = torch.promote_types(pending.looks.dtype, torch.float32)
    mean = pending.loss(first, wide, None, "none", IGNORED, 1.0)
    factor = -pending.log_sign * (1 if func in _MEANS else pending.words)
    found = (mean * factor).to(dtype or pending.looks.dtype)
    return found.unsqueeze(pending.class_dim) if given.get("keepdim") else found


def _is_class_dim(dim: Any, pending: Pending) -> bool:
    if isinstance(dim, (tuple, list)) and len(dim) == 1:
        dim = dim[0]
    dims = pending.looks.dim()
    return type(dim) is int and -dims <= dim < dims and dim % dims == pending.class_dim


def _is_plain(tensor: Any, pending: Pending) -> bool:
    return type(tensor) in TRACED_OR_PLAIN and tensor.device == pending.call.input.device


def _fits_weight(weight: Any, pending: Pending) -> bool:
    return (
        _is_plain(weight, pending)
        and weight.shape == (pending.words,)
        and weight.dtype in (pending.looks.dtype, _loss_dtype(pending))
        and not weight.requires_grad
    )


def _loss_dtype(pending: Pending) -> torch.dtype:
    """The dtype that PyTorch's loss has: autocast computes it in float32."""
    own = pending.looks.dtype
    if own in _WIDE:
        return own
    now = AutocastState.now(pending.call.input.device.type)
    return torch.promote_types(own, torch.float32) if now.enabled else own


_WIDE = (torch.float32, torch.float64)
_MEANS = {Tensor.mean, torch.mean}

LOSSES: dict[Any, HeadRule] = {
    **dict.fromkeys((F.cross_entropy, F.nll_loss), _loss),
    **dict.fromkeys((Tensor.gather, torch.gather), _gathered),
    **dict.fromkeys((Tensor.logsumexp, torch.logsumexp, torch.special.logsumexp), _logsumexp),
    **dict.fromkeys((Tensor.sum, torch.sum, *_MEANS), _summed),
}
