"""Lazy logits: a tensor that a head returns in place of its product.

`__torch_function__` sees each function that is called with it, above autograd. What
operations.py and losses.py know makes another lazy tensor, or the loss by memopt's op;
for everything else the product is computed once, and the function runs on that, as if it had been
there from the beginning. So no dispatcher mode, no autograd node and no hook ever meets logits that
are not there; what they see is the op, or PyTorch's.

Code below Python's functions (autograd Functions, other libraries' C++) gets the lazy tensor
itself. Its node in the graph has the gradients of the head's input and weights, and
`__torch_dispatch__` computes with the product.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.overrides import enable_reentrant_dispatch
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from memopt._compat import leave_to_python
from memopt._extension import _C
from memopt._head import gradients
from memopt._head.call import AutocastState, HeadCall
from memopt._head.losses import LOSSES
from memopt._head.operations import OPERATIONS, quietly
from memopt._head.pending import Pending
from memopt.memory.storages import Deferred

_RULES: dict[Any, Callable[..., Any]] = {**OPERATIONS, **LOSSES}

# What a tensor can be asked for without its elements.
_ATTRIBUTES = """
    shape dtype device ndim requires_grad is_leaf layout is_cuda is_cpu is_meta is_sparse is_mps
    is_quantized is_nested is_mkldnn is_xpu is_xla is_vulkan is_maia is_mtia is_ipu
    itemsize nbytes output_nr
"""
_METHODS = """
    size dim ndimension numel nelement stride is_contiguous is_floating_point is_complex
    is_signed is_conj is_neg is_inference element_size get_device storage_offset __len__
"""
_LOOKS = {getattr(Tensor, name) for name in re.findall(r"\w+", _METHODS)}
_LOOKS |= {getattr(Tensor, name).__get__ for name in re.findall(r"\w+", _ATTRIBUTES)}
_LOOKS |= {torch.is_floating_point, torch.is_complex, torch.numel}
# What the lazy tensor always answers itself. Autograd resets the hooks of what was written.
_OWN: set[Any] = {Tensor.__hash__, vars(torch._C.TensorBase)["_backward_hooks"].__set__}
_NODE, _NUMBER = (vars(torch._C.TensorBase)[name].__get__ for name in ("grad_fn", "output_nr"))


class LazyLogits(Deferred):
    """Logits, or what follows from them, that nobody has computed."""

    _pending: Pending

    def made(self) -> Tensor | None:
        return self._pending.result

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if is_dynamo_compiling():  # code that is compiled apart from the model
            torch._dynamo.graph_break()
        kwargs = kwargs or {}
        first = args[0] if args else kwargs.get("input")
        rule = _RULES.get(func)
        if rule is not None and isinstance(first, LazyLogits):  # of what follows, none is asked
            pending = first._pending
            if _C.may_stay_lazy(first) and pending.can_stay():
                kept = kwargs if args else {n: v for n, v in kwargs.items() if n != "input"}
                found = rule(pending, func, args[1:], kept)
                if found is not NotImplemented:
                    return _as_tensors(found, first)
        is_lazy = isinstance(first, LazyLogits)
        is_made = is_lazy and first._pending.result is not None
        is_asked_late = is_lazy and first._pending.call.use.losses > 0
        if is_asked_late and (func == _NUMBER or (func == _NODE and is_made)):
            gradients.warn_of_node()
        # Made logits may have been exchanged since (unsqueeze_): they are asked themselves.
        looks = func in _LOOKS or (func == _NODE and is_asked_late)
        if func in _OWN or (looks and not is_made):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if is_lazy:
            rest = args[1:]
            pending = first._pending
            if is_asked_late and func is Tensor.register_hook:
                gradients.warn_of_hook(rest[0] if rest else kwargs.get("hook"))
            if func is Tensor.register_hook and not is_made:
                return _hooked(pending, *rest, **kwargs)
            if func is Tensor.retain_grad and is_asked_late:
                raise RuntimeError(gradients.GONE_AROUND)
            _check_history(first)
        if func is torch.autograd.grad or func is torch.autograd.backward:
            _check_inputs(func, args, kwargs)
        name = getattr(func, "__name__", str(func))
        if name == "__get__":
            name = getattr(getattr(func, "__self__", None), "__name__", name)
        return func(*computed(args, name), **computed(kwargs, name))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        def values(leaf: Any) -> Any:
            if not isinstance(leaf, LazyLogits):
                return leaf
            with enable_reentrant_dispatch():
                return leaf._pending.computed(str(func)).detach()

        args, kwargs = pytree.tree_map(values, (args, kwargs or {}))
        return func(*args, **kwargs)


leave_to_python(LazyLogits.__torch_function__.__func__)  # type: ignore[attr-defined]


def lazy_logits(path: str, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """linear(input, weight, bias), which is computed when somebody needs it."""
    autocast = AutocastState.now(input.device.type)
    shape = (*input.shape[:-1], weight.shape[0])
    with quietly():
        looks = torch.empty(shape, dtype=autocast.product_dtype(input), device="meta")
    nbytes = looks.numel() * looks.itemsize  # `nbytes` refuses sizes that are traced
    call = HeadCall(path, input, weight, bias, autocast, nbytes)
    return _lazy(Pending(call, looks, lambda: call.input, len(shape) - 1))


def pending_of(tensor: object) -> Pending | None:
    """The pending tensor behind a lazy one; None for any other object, and once it was computed."""
    if not isinstance(tensor, LazyLogits) or tensor._pending.result is not None:
        return None
    return tensor._pending


def _lazy(pending: Pending) -> Tensor:
    looks, call = pending.looks, pending.call
    tensor: Tensor = Tensor._make_wrapper_subclass(
        LazyLogits,
        looks.shape,
        strides=looks.stride(),
        dtype=looks.dtype,
        device=call.input.device,
    )
    tensor._pending = pending  # type: ignore[attr-defined]
    _C.place_in_graph(tensor, call.input, call.weight, call.bias, call, pending.steps)
    return tensor


def _as_tensors(found: Any, first: LazyLogits) -> Any:
    if isinstance(found, tuple):
        return tuple(_as_tensors(each, first) for each in found)
    if not isinstance(found, Pending):
        return found
    return first if found is first._pending else _lazy(found)


def computed(value: Any, by: str) -> Any:
    """The value with each lazy tensor in it computed; `by`: the function that asks."""

    def tensor(leaf: Any) -> Any:
        if not isinstance(leaf, LazyLogits):
            return leaf
        _check_history(leaf)
        return leaf._pending.computed(by)

    return pytree.tree_map(tensor, value)


def _hooked(pending: Pending, hook: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
    """A hook for a gradient: losses that are computed from now on go through the logits."""
    if pending.hooks is None:
        pending.hooks = OrderedDict()
    handle = RemovableHandle(pending.hooks)
    pending.hooks[handle.id] = hook
    return handle


def _check_inputs(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises RuntimeError where a gradient is asked for of logits that a loss has gone around."""
    is_grad = func is torch.autograd.grad
    inputs = args[1] if is_grad and len(args) > 1 else kwargs.get("inputs")
    of = args[0] if args else kwargs["outputs" if is_grad else "tensors"]
    lazy = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, LazyLogits)]
    around = {key for leaf in lazy for key in leaf._pending.call.around}
    roots = [leaf for leaf in pytree.tree_leaves(of) if not isinstance(leaf, LazyLogits)]
    gradients.check_around(roots, around)


def _check_history(logits: LazyLogits) -> None:
    """Raises RuntimeError where an autograd Function has written them, which only PyTorch saw."""
    if not _C.is_in_place(logits):
        raise RuntimeError(gradients.WRITTEN)
