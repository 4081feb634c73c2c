"""A head's call whose product waits: the logits that were asked for, until someone needs them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from memopt._checkpoint.flags import is_checkpointing, is_recomputing
from memopt._checkpoint.other import is_in_other_checkpointing
from memopt._compat import may_hook_saved_tensors, saved_tensor_hooks
from memopt._extension import _C
from memopt._head.gradients import warn_of_hook
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
            return _state(device, False, torch.float32)
        return _state(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))

    def again(self) -> Any:
        """A context in which it is as it was."""
        if AutocastState.now(self.device) is self:
            return _NOTHING  # PyTorch's takes the host ten times as long
        return torch.autocast(self.device, self.dtype, enabled=self.enabled)

    def product_dtype(self, input: Tensor) -> torch.dtype:
        return self.dtype if self.enabled and input.dtype != torch.float64 else input.dtype


_state = functools.cache(AutocastState)  # one object for each state
_NOTHING = nullcontext()


def _before_a_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Fused optimizers write weights without counting it in their versions."""
    if _C.HeadTensors.any():
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        _C.HeadTensors.stepped([p for p in parameters if p.grad is not None])


@functools.cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_before_a_step)


class HeadCall:
    """linear(input, weight, bias), which nobody has computed. What requires no gradient when it is
    called gets none, whatever becomes of its flag.

    Args:
        path: the head's, for messages and reports.
        autocast: as it is in the call.
        nbytes: of the logits.
    """

    def __init__(
        self,
        path: str,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        autocast: AutocastState,
        nbytes: int,
    ) -> None:
        _watch_optimizers()
        self.path, self.autocast = path, autocast
        self.input = input if input.requires_grad else input.detach()
        self.weight = weight if weight.requires_grad else weight.detach()
        self.bias = bias if bias is None or bias.requires_grad else bias.detach()
        self._tensors = _C.HeadTensors(self.input, self.weight, self.bias, (weight, bias))
        # All `Pending`s that were derived from the logits and may still be asked for, in the order
        # of calls.
        self.waiting: list[weakref.ref[Any]] = []
        # The names and numbers of the nodes of losses that were computed without the logits.
        self.around: set[tuple[str, int]] = set()
        # The innermost hook for saved tensors of the call, if it is alive.
        self._pack = _weakly(_innermost_pack())
        self.use = HeadUse(path, nbytes)
        for uses in _watchers:
            uses.append(self.use)

    def reads(self, tensor: Tensor) -> None:
        """Notes what something made of the logits will be made of later."""
        self._tensors.reads(tensor)

    def check(self) -> None:
        """Raises RuntimeError unless the tensors are what they were when the head was called. Those
        whose memory was exchanged (`weight.data = other`) are those with the memory of then.
        """
        changed = self._tensors.check()
        if changed is None:
            return
        self.input, self.weight, self.bias = self._tensors.now()
        if changed:
            raise RuntimeError(
                f"convert: the logits of {self.path or 'the head'} must be used before what "
                f"they are made of changes: they are computed when they are asked for, and its "
                f"input or weights {changed}; use them earlier, or convert with head=False"
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

    def gradients(self, steps: Replayed, grad: Tensor, wanted: tuple[bool, ...]) -> Any:
        """The gradients of input, weight and bias by one of what `steps` make of the logits: of
        code below Python's functions, which got a lazy tensor itself.
        """
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "convert: create_graph=True must not meet logits that code below Python's "
                "functions was given; convert with head=False"
            )
        self.check()
        given = (self.input, self.weight, self.bias)
        with torch.enable_grad():
            leaves = [
                None if t is None else t.detach().requires_grad_(wants)
                for t, wants in zip(given, wanted, strict=True)
            ]
            with self.autocast.again():
                product = F.linear(*leaves)  # type: ignore[arg-type]
            again = made_by(steps, product)
        asked = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
        found = iter(torch.autograd.grad(again, asked, grad))
        return [next(found) if leaf is not None and leaf.requires_grad else None for leaf in leaves]

    def hooked(self, hook: Any) -> None:
        """Warns of a hook on the node of a lazy tensor that nobody will run."""
        if self.use.losses:
            warn_of_hook(hook)


Replayed = tuple[tuple[Callable[[Tensor], Tensor], AutocastState], ...]
"""Functions that were called with the logits one after the other, and how autocast was then."""


def made_by(steps: Replayed, tensor: Tensor) -> Tensor:
    """The tensor that they make of one."""
    for function, autocast in steps:
        with autocast.again():
            tensor = function(tensor)
    return tensor


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
