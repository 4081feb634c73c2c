"""Tensors that have a history: what an encoder made of a batch, a transposed weight that a loss
closes over. A backward through it would add to gradients of others, and free a graph that is not
its own; an operator in place would write itself into it.

So for a time such a tensor, the same object over the same memory, is a result of something
outside: it has a gradient, at which backward ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from memopt._compat import exchange_implementations, view_base, without_transforms
from memopt.memory.containers import Restore
from memopt.memory.storages import Deferred, graph_leaves, node_of, nodes_behind


def with_gradient_as(original: Tensor, copy: Tensor) -> Tensor:
    """Return a copy without a history, with a gradient where the original has one: a leaf, or the
    result of something before, which may be written in place.
    """
    if original.requires_grad:
        return copy.requires_grad_() if original.is_leaf else _outside(copy)
    return copy


def _outside(alias: Tensor) -> Tensor:
    with torch.enable_grad():
        found: Tensor = _Outside.apply(torch.empty(0, requires_grad=True), [alias])  # type: ignore[no-untyped-call]
    return found


def has_history(tensor: Tensor) -> bool:
    """Whether it is no leaf. A view that was made without gradients has none, and PyTorch raises
    where that is asked after its base was written with one.
    """
    try:
        return not tensor.is_leaf
    except RuntimeError:
        return False


def is_used_up(tensor: Tensor) -> bool:
    """Whether a backward freed what its history saved, so that no other can go through it."""
    return has_history(tensor) and any(map(_is_freed, nodes_behind([node_of(tensor)])))


def _is_freed(node: Any) -> bool:
    for name in dir(node):
        if name.startswith("_saved_") or name == "saved_tensors":
            try:
                getattr(node, name)
            except RuntimeError:
                return True
    return False


def without_history(tensor: Tensor) -> None:
    """Makes a tensor a leaf again, into which something was written that has a gradient."""
    base = view_base(tensor)
    if base is None:
        tensor.detach_()
        return
    if not base.is_leaf:
        base.detach_()
    with torch.enable_grad():
        view = base.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
    exchange_implementations(tensor, view)


class _Outside(torch.autograd.Function):
    """Takes a leaf of no size, so that its result has a gradient, and hands on a tensor."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, held: list[Tensor]) -> Tensor:
        return held[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        return None, None


class _Written(torch.autograd.Function):
    """Writes over a tensor what it is."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class Histories:
    """Histories that tensors have now.

    Args:
        tensors: all that a run is known to use. A history that begins at leaves among these, which
            are no parameters, stays: the run may differentiate with respect to them.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        tensors = list(tensors)
        inputs = {id(t) for t in tensors if t.is_leaf and t.requires_grad and not _is_parameter(t)}
        self._tensors = [
            tensor
            for tensor in tensors
            if _can_be_cut(tensor) and not tensor.is_leaf and not _begins_at(tensor, inputs)
        ]
        self.of_parameters = [t for t in self._tensors if _is_parameter(view_base(t))]
        """Tensors that are views of parameters, which they are not while the histories are cut."""
        self._cut: list[tuple[Tensor, Tensor, Any]] = []

    def __len__(self) -> int:
        return len(self._tensors)

    def cut(self) -> None:
        """From now on the tensors have none, until it is put back."""
        for tensor in self._tensors:
            try:
                other = _outside(tensor.detach())
                exchange_implementations(tensor, other)
            except (NotImplementedError, RuntimeError):
                continue  # it retains its gradient, for one: its graph refers to it
            self._cut.append((tensor, other, tensor._backward_hooks))
            tensor._backward_hooks = None

    def put_back(self) -> None:
        """The tensors have their own again, whatever became of the one meanwhile."""
        for restore in self.restores():
            restore()

    def restores(self) -> Iterator[Restore]:
        """Yield what puts each back."""
        while self._cut:
            yield partial(_put_back, *self._cut.pop())


def _put_back(tensor: Tensor, other: Tensor, hooks: Any) -> None:
    if tensor.retains_grad and tensor.grad_fn is not None:
        # Its graph, which may be held, refers to it: a new one does then, which ends here.
        with torch.enable_grad():
            _Written.apply(tensor)  # type: ignore[no-untyped-call]
    tensor.detach_()
    tensor._backward_hooks = hooks
    exchange_implementations(tensor, other)


def _is_parameter(tensor: Tensor | None) -> bool:
    return isinstance(tensor, nn.Parameter)


def _can_be_cut(tensor: Tensor) -> bool:
    return not isinstance(tensor, Deferred) and without_transforms(tensor) is tensor


def _begins_at(tensor: Tensor, leaves: set[int]) -> bool:
    """Whether a history begins at some of these leaves, by id, and at no others."""
    return bool(leaves) and all(id(leaf) in leaves for leaf in graph_leaves([tensor.grad_fn]))
