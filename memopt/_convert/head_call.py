"""A head's call whose product waits: the logits that were asked for, until someone needs them."""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from memopt._checkpoint.flags import is_checkpointing, is_recomputing
from memopt._checkpoint.other import is_in_other_checkpointing
from memopt._compat import may_hook_saved_tensors, saved_tensor_hooks
from memopt._extension import ops
from memopt.functional.cross_entropy import IGNORED
from memopt.memory.saved import saved_unseen

NO_CLASS = torch.iinfo(torch.int64).min
"""An index that no target has: `IGNORED` is an index out of range for gather."""


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


@dataclass(frozen=True)
class AutocastState:
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
    waiting: list[weakref.ref[Pending]] = field(init=False, default_factory=list)
    """All that was derived from the logits and may still be asked for, in the order of calls."""

    of: tuple[int, ...] = field(init=False)
    """The identities of its weight and bias, which live as long as this."""

    was_stepped: bool = False
    """Whether an optimizer of theirs has made a step since."""

    _held: tuple[Tensor | None, ...] = field(init=False)
    _read: list[tuple[Tensor, int]] = field(init=False)
    """The tensors that it is made of, each with its version."""

    _hooks: Any = field(init=False)

    def __post_init__(self) -> None:
        _watch_optimizers()
        _calls.add(self)
        self._held = (self.weight, self.bias)
        self.of = (id(self.weight), id(self.bias))
        self.input, self.weight = _as_flagged(self.input), _as_flagged(self.weight)
        self.bias = None if self.bias is None else _as_flagged(self.bias)
        self.autocast = AutocastState.now(self.input.device.type)
        self._read = []
        for tensor in (self.input, self.weight, self.bias):
            if tensor is not None:
                self.reads(tensor)
        self._hooks = saved_tensor_hooks()
        rows = self.input.numel() // self.input.shape[-1] if self.input.shape[-1] else 0
        itemsize = self.autocast.product_dtype(self.input).itemsize
        self.use = HeadUse(self.path, rows * self.weight.shape[0] * itemsize)
        for uses in _watchers:
            uses.append(self.use)

    def reads(self, tensor: Tensor) -> None:
        """Notes what the logits, or something made of them, will be made of later."""
        self._read.append((tensor, tensor._version))

    def check(self) -> None:
        """Raises RuntimeError unless the tensors are what they were when the head was called."""
        if self.was_stepped or any(tensor._version != before for tensor, before in self._read):
            self._refuse("were written in place since (by an optimizer's step, say)")
        for tensor, _ in self._read:
            if tensor.numel() and not tensor.untyped_storage().nbytes():
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
        hooks = saved_tensor_hooks()
        if hooks == self._hooks or not may_hook_saved_tensors():
            return nullcontext()
        if not (is_checkpointing() or is_recomputing() or is_in_other_checkpointing()):
            return nullcontext()
        return saved_unseen()

    def product(self) -> Tensor:
        self.check()
        with self.autocast.again():
            return F.linear(self.input, self.weight, self.bias)


def _as_flagged(tensor: Tensor) -> Tensor:
    return tensor if tensor.requires_grad else tensor.detach()


def _run_hooks(hooks: Mapping[int, Any], gradient: Tensor) -> Tensor:
    for hook in list(hooks.values()):
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient


@dataclass(eq=False)
class Pending:
    """A tensor that follows from a head's call by operations on its rows, and is not computed.

    The tensor is z, with its rows' order and shape those of `input()`; or the log-softmax of z, or
    that times -1. z = scale * l, or outer * tanh(scale * l), of the linear's l (with `extra` added
    to its bias).
    """

    call: HeadCall
    looks: Tensor
    """A meta tensor of the shape, strides and dtype."""

    input: Callable[[], Tensor]
    """Makes the head's input with the rows of this: of the shape of `looks`, but in dimension
    `class_dim`, which has the features."""

    class_dim: int
    extra: Tensor | None = None
    scale: float = 1.0
    outer: float | None = None
    log_sign: int = 0
    """1: log-probabilities, -1: their negative, 0: logits."""

    replay: Callable[[Tensor], Tensor] | None = None
    """Computes this from `parent`'s tensor."""

    parent: Pending | None = None
    autocast: AutocastState | None = None
    hooks: OrderedDict[int, Any] = field(default_factory=OrderedDict)
    """Hooks for the tensor's gradient."""

    result: Tensor | None = None
    """The tensor, once somebody needed it."""

    def __post_init__(self) -> None:
        self.autocast = AutocastState.now(self.call.input.device.type)
        self.call.waiting.append(weakref.ref(self))

    @property
    def words(self) -> int:
        return self.looks.shape[self.class_dim]

    def derived(self, replay: Callable[[Tensor], Tensor], looks: Tensor, **changes: Any) -> Pending:
        """The tensor that `replay` makes of it."""
        changes |= {"hooks": OrderedDict(), "result": None}
        return replace(self, replay=replay, parent=self, looks=looks, **changes)

    def can_stay(self) -> bool:
        """Whether losses may go around it: nobody has the tensor, or waits for its gradient."""
        seen: Pending | None = self
        while seen is not None:
            if seen.result is not None or seen.hooks:
                return False
            seen = seen.parent
        return not self.call.use.were_made

    def computed(self, by: str = "") -> Tensor:
        """The tensor, with its history. All others that wait are computed with it: what is written
        in place from now on is no part of them.
        """
        if self.result is None:
            call = self.call
            if not call.use.were_made:
                call.use.were_made, call.use.by = True, by
            with torch.inference_mode(False), torch.enable_grad(), call.apart():
                self._compute()
                for other in [ref() for ref in call.waiting]:
                    if other is not None:
                        other._compute()
            call.waiting.clear()
        assert self.result is not None
        return self.result

    def _compute(self) -> Tensor:
        if self.result is None:
            if self.parent is None or self.replay is None:
                made = self.call.product()
            else:
                made = self._again(self.parent._compute())
            self.result = made
            if self.hooks and made.requires_grad:
                made.register_hook(partial(_run_hooks, self.hooks))  # not of this: a cycle
        return self.result

    def _again(self, parent: Tensor) -> Tensor:
        assert self.replay is not None
        assert self.autocast is not None
        with self.autocast.again():
            return self.replay(parent)

    def from_product(self, product: Tensor) -> Tensor:
        """The tensor, of other logits than the call's."""
        return product if self.parent is None else self._again(self.parent.from_product(product))

    def rows(self) -> Tensor:
        """The head's input, features last, with the rows in the order of the tensor."""
        return self.input().movedim(self.class_dim, -1)

    def row_shape(self) -> torch.Size:
        shape = list(self.looks.shape)
        del shape[self.class_dim]
        return torch.Size(shape)

    def bias(self) -> Tensor | None:
        bias = self.call.bias
        if self.extra is None:
            return bias
        return self.extra.to(self.call.weight.dtype) if bias is None else bias + self.extra

    def _cap(self) -> tuple[float | None, float]:
        """The op's softcap and logit_scale: outer * tanh(scale * l) is softcap * tanh(logit_scale *
        l / softcap).
        """
        return self.outer, self.scale if self.outer is None else self.scale * self.outer

    def loss(
        self,
        target: Tensor,
        dtype: torch.dtype,
        weight: Tensor | None = None,
        reduction: str = "mean",
        ignore_index: int | None = IGNORED,
        label_smoothing: float = 0.0,
    ) -> Tensor:
        """The cross entropy, by memopt's op in chunks of rows. target: of `row_shape()`, or the
        shape of the tensor with the classes last.
        """
        found = self._in_chunks(
            ops.linear_cross_entropy,
            target,
            weight=weight,
            reduction=reduction,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            dtype=dtype,
        )
        return self._of_rows(found) if reduction == "none" else found

    def log_probs(self, target: Tensor) -> Tensor:
        """Log-probabilities of classes of `row_shape()`, by memopt's op in chunks of rows."""
        return self._of_rows(self._in_chunks(ops.linear_log_probs, target, ignore_index=NO_CLASS))

    def _in_chunks(self, op: Callable[..., Tensor], target: Tensor, **options: Any) -> Tensor:
        """Call an op with the rows and their targets. A row alone is a batch of one."""
        rows = self._rows_to_use()
        if rows.dim() == 1:
            rows, target = rows.unsqueeze(0), target.unsqueeze(0)
        softcap, logit_scale = self._cap()
        with self.call.autocast.again():
            return op(
                rows,
                self.call.weight,
                target,
                linear_bias=self.bias(),
                softcap=softcap,
                logit_scale=logit_scale,
                **options,
            )

    def _of_rows(self, found: Tensor) -> Tensor:
        """A number for each row, without the dimension that `_in_chunks` gave a row alone."""
        return found.squeeze(0) if len(self.looks.shape) == 1 else found

    def at(self, target: Tensor) -> Tensor:
        """z at classes of `row_shape()`, in float32 (float64 for float64)."""
        rows = self._rows_to_use()
        wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
        bias = self.bias()
        with torch.autocast(rows.device.type, enabled=False):
            words = F.embedding(target, self.call.weight).to(wide)
            z = (rows.to(wide) * words).sum(-1)
            if bias is not None:
                z = z + bias.to(wide)[target]
            z = z * self.scale
            return z if self.outer is None else z.tanh() * self.outer

    def _rows_to_use(self) -> Tensor:
        self.call.check()
        self.call.use.losses += 1
        return self.rows()
