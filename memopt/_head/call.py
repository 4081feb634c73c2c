"""A head's call whose product waits: the logits that were asked for, until someone needs them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from memopt._checkpoint.flags import is_checkpointing, is_recomputing
from memopt._checkpoint.other import is_in_other_checkpointing
from memopt._compat import may_hook_saved_tensors, saved_tensor_hooks
from memopt._extension import _C
from memopt.memory.saved import saved_unseen


@dataclass
class HeadUse:
    """The use that was made of the logits of one call of a head."""

    path: str
    nbytes: int
    """The bytes of the logits."""

    losses: int = 0
    """How many losses were computed in chunks of rows."""

    were_made: bool = False
    """Whether something asked for the logits themselves."""

    by: str = ""
    """The function that asked first."""


_watchers: list[list[HeadUse]] = []


@contextmanager
def watched_heads() -> Iterator[list[HeadUse]]:
    """Collects the uses of all heads that are called in the scope; they go on being updated."""
    uses: list[HeadUse] = []
    _watchers.append(uses)
    try:
        yield uses
    finally:
        _watchers[:] = [each for each in _watchers if each is not uses]


class AutocastState(NamedTuple):
    """Whether autocast is on for a device, and its dtype."""

    device: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def now(cls, device: str) -> AutocastState:
        if device == "meta":  # PyTorch's own autocast knows no such device
            return cls(device, False, torch.float32)
        return cls(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))

    def again(self) -> Any:
        """A context in which it is as it was."""
        if AutocastState.now(self.device) == self:
            return nullcontext()  # PyTorch's takes the host ten times as long
        return torch.autocast(self.device, self.dtype, enabled=self.enabled)

    def product_dtype(self, input: Tensor) -> torch.dtype:
        return self.dtype if self.enabled and input.dtype != torch.float64 else input.dtype


_calls: weakref.WeakSet[HeadCall] = weakref.WeakSet()
"""Calls whose products may still be asked for."""


def _before_a_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Fused optimizers write weights without counting it in their versions."""
    if not _calls:
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    written = {id(p) for p in parameters if p.grad is not None}
    for call in list(_calls):
        call.was_stepped |= not written.isdisjoint(call.of)


@functools.cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_before_a_step)


@dataclass(eq=False)
class HeadCall:
    """linear(input, weight, bias), which nobody has computed. What requires no gradient when it is
    called gets none, whatever becomes of its flag.

    Args:
        path: the head's, for messages and reports.
    """

    path: str
    input: Tensor
    weight: Tensor
    bias: Tensor | None
    use: HeadUse = field(init=False)
    autocast: AutocastState = field(init=False)
    waiting: list[weakref.ref[Any]] = field(init=False, default_factory=list)
    """All `Pending`s that were derived from the logits and may still be asked for, in the order of
    calls."""

    of: tuple[int, ...] = field(init=False)
    """The identities of its weight and bias, which live as long as this."""

    was_stepped: bool = False
    """Whether an optimizer of theirs has made a step since."""

    around: set[tuple[str, int]] = field(init=False, default_factory=set)
    """The names and numbers of the nodes of losses that were computed without the logits."""

    _held: tuple[Tensor | None, ...] = field(init=False)
    _read: list[tuple[Tensor, int]] = field(init=False)
    """The tensors that it is made of, each with its version."""

    _seen: dict[str, Tensor] = field(init=False, default_factory=dict)
    """Views of its input, weight and bias: they keep the memory if `.data` is exchanged."""

    _pack: Callable[[], Any] = field(init=False)
    """The innermost hook for saved tensors of the call, if it is alive."""

    def __post_init__(self) -> None:
        _watch_optimizers()
        _calls.add(self)
        self._held = (self.weight, self.bias)
        self.of = (id(self.weight), id(self.bias))
        self.input, self.weight = _as_flagged(self.input), _as_flagged(self.weight)
        self.bias = None if self.bias is None else _as_flagged(self.bias)
        self.autocast = AutocastState.now(self.input.device.type)
        self._read = []
        for name in ("input", "weight", "bias"):
            tensor = getattr(self, name)
            if tensor is not None:
                self.reads(tensor)
                if tensor.requires_grad:
                    self._seen[name] = tensor.view_as(tensor)
        self._pack = _weakly(_innermost_pack())
        rows = self.input.numel() // self.input.shape[-1] if self.input.shape[-1] else 0
        itemsize = self.autocast.product_dtype(self.input).itemsize
        self.use = HeadUse(self.path, rows * self.weight.shape[0] * itemsize)
        for uses in _watchers:
            uses.append(self.use)

    def reads(self, tensor: Tensor) -> None:
        """Notes what the logits, or something made of them, will be made of later."""
        self._read.append((tensor, tensor._version))

    def check(self) -> None:
        """Raises RuntimeError unless the tensors are what they were when the head was called. Those
        whose memory was exchanged (`weight.data = other`) are those with the memory of then.
        """
        held = [tensor for tensor, _ in self._read]
        for name, seen in self._seen.items():
            now = getattr(self, name)
            if now is seen or not _C.is_same_memory(now, seen):
                setattr(self, name, seen)
                held.append(seen)
        if self.was_stepped or any([tensor._version != before for tensor, before in self._read]):
            self._refuse("were written in place since (by an optimizer's step, say)")
        for tensor in held:
            if not tensor.untyped_storage().nbytes() and tensor.numel():
                self._refuse("were freed since (FSDP2 frees weights after their module's forward)")

    def _refuse(self, why: str) -> None:
        raise RuntimeError(
            f"convert: the logits of {self.path or 'the head'} must be used before what "
            f"they are made of changes: they are computed when they are asked for, and its input "
            f"or weights {why}; use them earlier, or convert with head=False"
        )

    def apart(self) -> Any:
        """A context in which a checkpoint that runs around the use, but not around the call, sees
        nothing of what the product saves: its recompute finds the product there.
        """
        if _innermost_pack() is self._pack() or not may_hook_saved_tensors():
            return nullcontext()
        if not (is_checkpointing() or is_recomputing() or is_in_other_checkpointing()):
            return nullcontext()
        return saved_unseen()

    def leave_region(self) -> None:
        """Forgets the call's hooks for saved tensors, which memopt's regions cannot be asked for
        weakly and which hold a region's arguments, once the logits are used outside of them.
        """
        if _innermost_pack() is not self._pack():
            self._pack = _weakly(object())

    def product(self) -> Tensor:
        self.check()
        with self.autocast.again():
            return F.linear(self.input, self.weight, self.bias)


def _innermost_pack() -> Any:
    hooks = saved_tensor_hooks()
    return None if hooks is None else hooks[0]


def _weakly(pack: Any) -> Callable[[], Any]:
    """A reference that answers with an object of its own once the hook is gone: None stands for no
    hooks.
    """
    if pack is None:
        return lambda: None
    gone = object()
    try:
        ref = weakref.ref(pack)
    except TypeError:  # memopt's own, and builtins
        return lambda: pack
    return lambda: gone if (found := ref()) is None else found


def _as_flagged(tensor: Tensor) -> Tensor:
    return tensor if tensor.requires_grad else tensor.detach()
