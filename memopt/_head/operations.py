"""Operations under which lazy logits stay lazy: views and copies of their rows, scales, a cap, a
bias.

A rule gets what is pending, the function, and its other arguments. It answers with what is pending
then, or with NotImplemented: the logits are computed. Shapes, strides and errors are those of
PyTorch's own functions, which run on meta tensors. The rows are followed by calling the function on
the head's input in place of the logits, which is done where a loss needs it. Which dimension has
the classes then is seen on a second meta tensor with one class more.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memopt._head.call import AutocastState
from memopt._head.pending import Pending

HeadRule = Callable[[Pending, Any, tuple[Any, ...], dict[str, Any]], Any]


def tried(rule: HeadRule) -> HeadRule:
    """Answers NotImplemented where a rule raises: the function says itself what is wrong."""

    def careful(pending: Pending, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return rule(pending, func, args, kwargs)
        except (RuntimeError, ValueError, TypeError, IndexError):
            return NotImplemented

    return careful


quietly: Any = torch._C._DisableTorchDispatch
"""A context for meta tensors, which no mode of the caller is to see."""


@tried
def _rows(pending: Pending, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Follows a function that moves rows and names no size of the classes."""
    if any(isinstance(value, Tensor) for value in (*args, *kwargs.values())):
        return NotImplemented
    args = tuple(list(value) if isinstance(value, list) else value for value in args)
    return _moved(pending, lambda tensor: func(tensor, *args, **kwargs))


def _moved(pending: Pending, move: Callable[[Tensor], Any]) -> Any:
    """Moves the rows of pending logits; answers with several if `move` returns several."""
    features = pending.call.input.shape[-1]
    with quietly():
        found = move(pending.looks)
        more = move(_of_classes(pending, pending.words + 1))
        inputs = move(_of_classes(pending, features))
    if isinstance(found, Tensor):
        place = _class_dim(pending, found, more, inputs)
        if place is None:
            return NotImplemented
        return pending.derived(move, found, input=lambda: move(pending.input()), class_dim=place)
    places = [_class_dim(pending, *each) for each in zip(found, more, inputs, strict=True)]
    if None in places:
        return NotImplemented

    def part(i: int) -> Pending:
        return pending.derived(
            lambda tensor: move(tensor)[i],
            found[i],
            input=lambda: move(pending.input())[i],
            class_dim=places[i],
        )

    return tuple(map(part, range(len(places))))


def _of_classes(pending: Pending, count: int) -> Tensor:
    """A tensor like the logits with another number of classes."""
    shape = list(pending.looks.shape)
    shape[pending.class_dim] = count
    return torch.empty(shape, dtype=pending.looks.dtype, device="meta")


def _class_dim(pending: Pending, found: Tensor, more: Tensor, inputs: Tensor) -> int | None:
    """The only dimension that follows the number of classes, which are all there."""
    if not found.dim() == more.dim() == inputs.dim():
        return None
    differing = [d for d in range(found.dim()) if found.shape[d] != more.shape[d]]
    if len(differing) != 1:
        return None
    (place,) = differing
    sizes = found.shape[place], more.shape[place], inputs.shape[place]
    features = pending.call.input.shape[-1]
    return place if sizes == (pending.words, pending.words + 1, features) else None


@tried
def _reshaped(pending: Pending, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """view and reshape: the classes stay the last dimension."""
    sizes = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
    sizes = kwargs.get("shape", kwargs.get("size", sizes))
    if isinstance(sizes, torch.dtype) or not sizes:
        return NotImplemented
    args = tuple([tuple(value) if isinstance(value, list) else value for value in args])
    with quietly():
        found = func(pending.looks, *args, **kwargs)
    if pending.class_dim != pending.looks.dim() - 1 or found.shape[-1:] != (pending.words,):
        return NotImplemented
    rows = found.shape[:-1]
    return pending.derived(
        lambda tensor: func(tensor, *args, **kwargs),
        found,
        input=lambda: (x := pending.input()).reshape(*rows, x.shape[-1]),
        class_dim=found.dim() - 1,
    )


@tried
def _indexed(pending: Pending, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """logits[index]: slices, numbers, masks of rows, numbers of rows."""
    index = _whole_index(args[0], pending)
    tensors = [each for each in index if isinstance(each, Tensor)]
    others = (each for each in index if not isinstance(each, Tensor))
    if any(isinstance(each, (bool, list, tuple)) or hasattr(each, "__array__") for each in others):
        return NotImplemented
    if not tensors:
        return _moved(pending, lambda tensor: tensor[index])
    # The size of a masked tensor is known where the mask is: the rows of the input say it.
    is_last = pending.class_dim == pending.looks.dim() - 1
    if not is_last or index[-1] != slice(None) or any(t.requires_grad for t in tensors):
        return NotImplemented
    pending.call.check()
    index = tuple(part.clone() if isinstance(part, Tensor) else part for part in index)
    rows = pending.input()[index]
    with quietly():
        shape = (*rows.shape[:-1], pending.words)
        looks = torch.empty(shape, dtype=pending.looks.dtype, device="meta")
    return pending.derived(
        lambda tensor: tensor[index], looks, input=lambda: rows, class_dim=looks.dim() - 1
    )


def _whole_index(index: Any, pending: Pending) -> tuple[Any, ...]:
    """The index with a part for each dimension; all classes as slice(None)."""
    parts = list(index) if isinstance(index, tuple) else [index]
    used = sum(
        (part.dim() if part.dtype in (torch.bool, torch.uint8) else 1)
        if isinstance(part, Tensor)
        else part is not None and part is not Ellipsis
        for part in parts
    )
    dims = pending.looks.dim()
    dots = [i for i, part in enumerate(parts) if part is Ellipsis]
    at = dots[0] if dots else len(parts)
    parts[at : at + len(dots)] = [slice(None)] * (dims - used)
    dim = 0
    for i, part in enumerate(parts):
        is_classes = dim == pending.class_dim and isinstance(part, slice)
        if is_classes and part.indices(pending.words) == (0, pending.words, 1):
            parts[i] = slice(None)
        if isinstance(part, Tensor):
            dim += part.dim() if part.dtype in (torch.bool, torch.uint8) else 1
        elif part is not None:
            dim += 1
    return tuple(parts)


@tried
def _copied(pending: Pending, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """contiguous and clone, which move no row."""
    with quietly():
        looks = func(pending.looks, *args, **kwargs)
    if func is Tensor.contiguous and looks is pending.looks:
        return pending
    return pending.derived(lambda tensor: func(tensor, *args, **kwargs), looks)


@tried
def _cast(pending: Pending, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """float and to, of a dtype that all values have."""
    if func is Tensor.float and pending.looks.dtype is torch.float32 and not args and not kwargs:
        return pending
    device = pending.call.input.device
    given = [*args, *kwargs.values()]
    if any(isinstance(value, Tensor) for value in given):
        return NotImplemented
    for value in given:
        if _is_place(value) and torch.device(value) not in (device, torch.device(device.type)):
            return NotImplemented
    on_meta = tuple("meta" if _is_place(value) else value for value in args)
    meta = {name: "meta" if _is_place(value) else value for name, value in kwargs.items()}
    with quietly():
        looks = func(pending.looks, *on_meta, **meta)
    if looks is pending.looks:
        return pending
    wider = looks.dtype == torch.float32 and pending.looks.dtype in (torch.float16, torch.bfloat16)
    if looks.dtype != pending.looks.dtype and not wider:
        return NotImplemented
    return pending.derived(lambda tensor: func(tensor, *args, **kwargs), looks)


def _is_place(value: object) -> bool:
    return isinstance(value, (str, torch.device)) or type(value) is int


def _scaled(pending: Pending, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Times a number, or divided by one."""
    if len(args) != 1 or kwargs or type(args[0]) not in (int, float) or pending.log_sign:
        return NotImplemented
    number = float(args[0])
    factor = (1 / number if number else 0.0) if func in _DIVISIONS else number
    if not factor or not math.isfinite(factor):
        return NotImplemented
    changes: dict[str, Any] = {"scale": pending.scale * factor}
    if pending.outer is not None:
        changes = {"outer": pending.outer * factor}
        if factor < 0:
            return NotImplemented
    return _on_elements(pending, lambda tensor: func(tensor, args[0]), **changes)


def _on_elements(pending: Pending, function: Callable[[Tensor], Tensor], **changes: Any) -> Pending:
    """A function of each element, whose result has strides of its own."""
    with quietly():
        looks = function(pending.looks)
    return pending.derived(function, looks, **changes)


def _bounded(pending: Pending, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """tanh: with a factor before and one behind, a soft cap."""
    if args or kwargs or pending.outer is not None or pending.log_sign:
        return NotImplemented
    return _on_elements(pending, func, outer=1.0)


def _negated(pending: Pending, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args or kwargs or not pending.log_sign:
        return NotImplemented
    return _on_elements(pending, func, log_sign=-pending.log_sign)


def _with_bias(pending: Pending, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Plus one number for each class, in front of all scales."""
    if len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
        return NotImplemented
    bias, call = args[0], pending.call
    is_untouched = pending.scale == 1.0 and pending.outer is None and not pending.log_sign
    if not is_untouched or pending.extra is not None:
        return NotImplemented
    last = pending.looks.dim() - 1
    fits = (
        type(bias) in (Tensor, torch.nn.Parameter)
        and pending.class_dim == last
        and bias.numel() == bias.shape[-1:].numel() == pending.words
        and bias.dim() <= last + 1
        and bias.device == call.input.device
        and bias.dtype == call.weight.dtype
    )
    dtype = torch.promote_types(pending.looks.dtype, bias.dtype)
    if not fits or dtype not in (pending.looks.dtype, torch.float32):
        return NotImplemented
    if bias.requires_grad:
        call.reads(bias)
        bias = bias.view_as(bias)  # its memory may be exchanged
    else:
        bias = bias.clone()  # it may be written before the sum is asked for
    flat = bias.reshape(pending.words)
    with quietly():
        looks = func(pending.looks, bias.detach().to("meta"))
    return pending.derived(lambda tensor: func(tensor, bias), looks, extra=flat)


@functools.cache
def _log_dtype(autocast: AutocastState, dtype: torch.dtype) -> torch.dtype:
    """The dtype of log-probabilities: autocast computes them in float32 on CUDA, not on a CPU."""
    if not autocast.enabled:
        return dtype
    with autocast.again():
        return F.log_softmax(torch.zeros(1, dtype=dtype, device=autocast.device), 0).dtype


def _log_softmax(pending: Pending, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = dict(zip(_LOG_SOFTMAX.get(func, ("dim", "dtype")), args, strict=False)) | kwargs
    dim, dtype = given.get("dim"), given.get("dtype")
    if type(dim) is not int or dim % pending.looks.dim() != pending.class_dim or pending.log_sign:
        return NotImplemented
    now = AutocastState.now(pending.call.input.device.type)
    own = pending.looks.dtype
    wide = _log_dtype(now, own)
    if (dtype or wide) not in (own, torch.float32):
        return NotImplemented
    with quietly():
        looks = F.log_softmax(pending.looks, dim, dtype=dtype or wide)
    return pending.derived(lambda tensor: func(tensor, *args, **kwargs), looks, log_sign=1)


_LOG_SOFTMAX: dict[Any, tuple[str, ...]] = {F.log_softmax: ("dim", "_stacklevel", "dtype")}
_DIVISIONS = {Tensor.div, Tensor.true_divide, Tensor.__truediv__, torch.div, torch.true_divide}


def _named(*names: str) -> list[Any]:
    """The functions of these names: methods of tensors, and in torch."""
    owners = (Tensor, torch)
    return [getattr(owner, name) for name in names for owner in owners if hasattr(owner, name)]


_MOVES = _named(
    "transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "squeeze", "unsqueeze",
    "select", "narrow", "unbind", "split", "chunk", "flatten", "unflatten", "tensor_split",
)  # fmt: skip

_PROPERTIES = [vars(torch._C.TensorBase)[name].__get__ for name in ("mT", "T")]

OPERATIONS: dict[Any, HeadRule] = {
    **dict.fromkeys((*_MOVES, *_PROPERTIES), _rows),
    Tensor.__iter__: lambda pending, func, args, kwargs: _rows(pending, Tensor.unbind, (0,), {}),
    Tensor.__getitem__: _indexed,
    **dict.fromkeys((Tensor.view, *_named("reshape")), _reshaped),
    **dict.fromkeys((Tensor.contiguous, *_named("clone")), _copied),
    **dict.fromkeys((Tensor.float, Tensor.to), _cast),
    **dict.fromkeys((*_named("mul", "multiply"), Tensor.__mul__, Tensor.__rmul__), _scaled),
    **dict.fromkeys(_DIVISIONS, _scaled),
    **dict.fromkeys((*_named("tanh"), F.tanh), _bounded),
    **dict.fromkeys((*_named("neg", "negative"), Tensor.__neg__), _negated),
    **dict.fromkeys((*_named("add"), Tensor.__add__), _with_bias),
    **dict.fromkeys(
        (*_named("log_softmax"), F.log_softmax, torch.special.log_softmax), _log_softmax
    ),
}
