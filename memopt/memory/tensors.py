"""Tensors as they were: what each one is, and the bytes that are behind them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from memopt._compat import (
    set_versions,
    without_dispatch_modes,
    without_function_modes,
    wraps_tensors,
)
from memopt.memory.containers import Restore, kept_dict
from memopt.memory.histories import has_history, without_history
from memopt.memory.storages import parts_of, storages_of


@contextmanager
def unseen() -> Iterator[None]:
    """A scope for reading and writing tensors that nobody sees: no mode and no gradient."""
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        without_function_modes(),
        without_dispatch_modes(),
    ):
        yield


class Contents:
    """Copies of storages, each as it was when it was asked for first.

    Those of an accelerator are copied to the host: what is measured there does not count them.
    """

    def __init__(self) -> None:
        self._copies: dict[int, tuple[torch.UntypedStorage, Tensor | None]] = {}
        self._adopted: set[int] = set()

    def adopt(self, tensor: Tensor) -> None:
        """It was reached, so its memory is there again at the end, even where it was released."""
        self._adopted.update(storage._cdata for storage in storages_of(tensor))

    def keep(self, tensor: Tensor) -> None:
        for storage in storages_of(tensor):
            if storage._cdata not in self._copies:
                # The storage is held too, so that no other one gets its address.
                self._copies[storage._cdata] = storage, _copy_of(storage)

    def restores(self) -> Iterator[Restore]:
        """Yield what restores each storage."""
        for storage, copy in self._copies.values():
            yield partial(self._restore, storage, copy)

    def _restore(self, storage: torch.UntypedStorage, copy: Tensor | None) -> None:
        nbytes = 0 if copy is None else copy.numel()
        if storage.nbytes() != nbytes:
            if storage._cdata not in self._adopted:
                return  # FSDP2 releases and refills what is whole only for a time
            storage.resize_(nbytes)
        if copy is None:
            return
        now = _bytes_of(storage)
        here = copy.to(now.device)
        if not torch.equal(now, here):
            now.copy_(here)


def _copy_of(storage: torch.UntypedStorage) -> Tensor | None:
    return _bytes_of(storage).to("cpu", copy=True) if storage.nbytes() else None


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """A tensor of its own, with a version of its own, over a storage."""
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return whole.set_(storage, 0, (storage.nbytes(),), (1,))


class KeptTensor:
    """A tensor without its bytes: its class, memory, geometry, gradient, hooks and version.

    Args:
        ended: called when the tensor ends, which is not held. None: the tensor is held.
    """

    def __init__(self, tensor: Tensor, ended: Callable[[], object] | None = None) -> None:
        self._held = tensor if ended is None else None
        self._reference = weakref.ref(tensor, None if ended is None else lambda _: ended())
        self._class = type(tensor)
        self._requires, self._is_leaf = tensor.requires_grad, tensor.is_leaf
        self._geometry = _geometry_of(tensor)
        # Another tensor over the same memory, which no change of this one's geometry reaches.
        self._view = None if self._geometry is None else _view_of(tensor)
        self.version = None if tensor.is_inference() else tensor._version
        self.has_gradient = self._is_leaf or tensor.retains_grad
        self.gradient = tensor.grad if self.has_gradient else None
        self._hooks = [(name, _hooks_of(tensor, name)) for name in _HOOKS] if tensor.is_leaf else []

    @property
    def tensor(self) -> Tensor | None:
        """The tensor; None if it has ended."""
        return self._reference()

    def restore(self, tensor: Tensor) -> None:
        if type(tensor) is not self._class:
            object.__setattr__(tensor, "__class__", self._class)
        if self._is_leaf and has_history(tensor):
            without_history(tensor)
        if self._geometry is not None and _geometry_of(tensor) != self._geometry:
            assert self._view is not None
            tensor.data = self._view
        if tensor.requires_grad is not self._requires and tensor.is_leaf:
            tensor.requires_grad_(self._requires)
        for name, (hooks, restored) in self._hooks:
            if getattr(tensor, name, None) is not hooks:
                setattr(tensor, name, hooks)
            if restored is not None:
                restored()

    def restore_gradient(self, tensor: Tensor) -> None:
        if self.has_gradient and tensor.grad is not self.gradient:
            tensor.grad = self.gradient


def restore_versions(found: Iterable[tuple[Tensor, int | None]]) -> None:
    """Restores versions: a graph from before can be differentiated, since it saved these bytes."""
    moved = [(t, v) for t, v in reversed([*found]) if v is not None and t._version != v]
    if moved:
        set_versions(tuple(t for t, _ in moved), tuple(v for _, v in moved))


_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def _hooks_of(tensor: Tensor, name: str) -> tuple[object, Restore | None]:
    hooks = getattr(tensor, name, None)
    return hooks, kept_dict(hooks) if isinstance(hooks, dict) else None


def _geometry_of(tensor: Tensor) -> tuple[object, ...] | None:
    """The memory that a tensor is over, with its shape and strides; None for a tensor that wraps
    others, or holds no memory.
    """
    if wraps_tensors(tensor):
        return None
    try:
        places = [(part.untyped_storage()._cdata, *_look_of(part)) for part in parts_of(tensor)]
    except (NotImplementedError, RuntimeError):
        return None
    return (*places, tensor.size())


def _look_of(tensor: Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride()


def _view_of(tensor: Tensor) -> Tensor:
    with unseen():
        return tensor.detach()
