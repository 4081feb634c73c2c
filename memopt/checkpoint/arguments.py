"""The arguments of a region, kept from its forward until its recompute.

Containers are taken apart into leaves. Each distinct tensor among the leaves is kept once: saved
for backward like the input of any autograd function, so that whatever watches saved tensors (an
enclosing region, `save_on_cpu`, a byte counter) sees it, or offloaded to host memory. Any other
leaf is kept by reference, and so are tensors inside objects that `torch.utils._pytree` cannot take
apart.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from memopt.checkpoint import offload


class Arguments:
    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], offloading: bool) -> None:
        """Keep the arguments of a call, their tensors saved or, where it helps, offloaded."""
        tensors = _DistinctTensors()
        self._positional = [_take_apart(value, tensors) for value in args]
        self._keyword = {name: _take_apart(value, tensors) for name, value in kwargs.items()}
        self.devices = {tensor.device for tensor in tensors.list}
        self._kept = [_keep(tensor, offloading) for tensor in tensors.list]
        to_save = [t for t, kept in zip(tensors.list, self._kept, strict=True) if not kept.holder]
        self._node = _save_for_backward(to_save) if to_save else None

    def restore(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments again: new containers; tensors that were one object are one object."""
        saved = iter(self._node.saved_tensors if self._node is not None else ())
        tensors = [kept.holder.restore() if kept.holder else next(saved) for kept in self._kept]
        return (
            tuple(_put_together(argument, tensors) for argument in self._positional),
            {name: _put_together(argument, tensors) for name, argument in self._keyword.items()},
        )

    def check_unwritten(self, region: str) -> None:
        """Raise RuntimeError if a tensor was written in place since it was kept."""
        for number, kept in enumerate(self._kept):
            if kept.witness is not None and kept.witness._version != kept.version:
                raise RuntimeError(
                    f"checkpoint: {self._name(number)} of region {region} must not be written in "
                    "place before backward has used it, got a tensor at version "
                    f"{kept.witness._version}; forward was called with version {kept.version}"
                )

    def _name(self, number: int) -> str:
        """The first argument that holds the tensor with this number."""
        named = [(f"positional argument {i}", a) for i, a in enumerate(self._positional)]
        named += [(f"argument {name!r}", a) for name, a in self._keyword.items()]
        return next(
            name
            for name, argument in named
            for leaf in argument.leaves
            if isinstance(leaf, _TensorLeaf) and leaf.number == number
        )


class _TensorLeaf(NamedTuple):
    """Stands among the leaves for the tensor with this number."""

    number: int


class _Argument(NamedTuple):
    leaves: list[Any]
    spec: pytree.TreeSpec | None
    """How the leaves were put together; None for an argument that is one leaf."""


class _DistinctTensors:
    def __init__(self) -> None:
        self.list: list[Tensor] = []
        self._numbers: dict[int, int] = {}

    def number(self, tensor: Tensor) -> int:
        number = self._numbers.setdefault(id(tensor), len(self.list))
        if number == len(self.list):
            self.list.append(tensor)
        return number


def _take_apart(value: Any, tensors: _DistinctTensors) -> _Argument:
    leaves, spec = ([value], None) if pytree.tree_is_leaf(value) else pytree.tree_flatten(value)
    return _Argument(
        [
            _TensorLeaf(tensors.number(leaf)) if isinstance(leaf, Tensor) else leaf
            for leaf in leaves
        ],
        spec,
    )


def _put_together(argument: _Argument, tensors: list[Tensor]) -> Any:
    leaves = [
        tensors[leaf.number] if isinstance(leaf, _TensorLeaf) else leaf for leaf in argument.leaves
    ]
    return leaves[0] if argument.spec is None else pytree.tree_unflatten(leaves, argument.spec)


class _ByReference(NamedTuple):
    tensor: Tensor

    def restore(self) -> Tensor:
        return self.tensor


class _Kept(NamedTuple):
    witness: Tensor | None
    version: int
    """The witness's version when the tensor was kept."""
    holder: offload.HostCopy | _ByReference | None
    """What holds the tensor; None if autograd does."""


def _keep(tensor: Tensor, offloading: bool) -> _Kept:
    witness = _version_witness(tensor)
    holder: offload.HostCopy | _ByReference | None = None
    if tensor.is_inference():  # autograd refuses to save these; nothing can write them in place
        holder = _ByReference(tensor)
    elif offloading and offload.is_worth_offloading(tensor):
        holder = offload.copy_to_host(tensor)
    return _Kept(witness, 0 if witness is None else witness._version, holder)


def _version_witness(tensor: Tensor) -> Tensor | None:
    """An empty tensor that shares `tensor`'s version counter and nothing of its memory.

    It tells later whether `tensor` was written in place, also after the tensor itself is gone from
    the device. None where PyTorch has no such alias: tensor subclasses and layouts other than
    strided, for which autograd's own check remains, and inference tensors, which have no counter.
    """
    if (
        type(tensor) not in (Tensor, torch.nn.Parameter)
        or tensor.layout is not torch.strided
        or tensor.is_quantized
        or tensor.is_nested
        or tensor.is_inference()
    ):
        return None
    witness = tensor.detach()
    witness.data = torch.empty(0, device=tensor.device)
    return witness


class _SaveForBackward(torch.autograd.Function):
    """Saves tensors for backward. Its node is kept for them and never runs."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0, device="cpu")


# Autograd makes a node only for an input that requires grad, which a region's need not do. Made
# outside inference mode even if this module is imported inside it.
with torch.inference_mode(False):
    _ANCHOR = torch.empty(0, device="cpu", requires_grad=True)


def _save_for_backward(tensors: list[Tensor]) -> Any:
    """The autograd node that holds `tensors` now, as the active saved-tensor hooks want."""
    return _SaveForBackward.apply(_ANCHOR, *tensors).grad_fn  # type: ignore[no-untyped-call]
