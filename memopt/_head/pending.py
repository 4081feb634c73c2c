"""Tensors that follow from a head's call by operations on its rows, and are not computed."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import has_torch_function

from memopt._extension import _C, ops
from memopt._head.call import AutocastState, HeadCall, Replayed, made_by
from memopt.functional.cross_entropy import IGNORED

NO_CLASS = torch.iinfo(torch.int64).min
"""An index that no target has: `IGNORED` is an index out of range for gather."""


def _run_hooks(hooks: Mapping[int, Any], gradient: Tensor) -> Tensor:
    for hook in list(hooks.values()):
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient


class Pending:
    """A tensor that follows from a head's call by operations on its rows, and is not computed.

    The tensor is z, with its rows' order and shape those of `input()`; or the log-softmax of z, or
    that times -1. z = scale * l, or outer * tanh(scale * l), of the linear's l (with `extra` added
    to its bias).

    Args:
        looks: a meta tensor of the shape, strides and dtype.
        input: makes the head's input with the rows of this: of the shape of `looks`, but in
            dimension `class_dim`, which has the features.
    """

    extra: Tensor | None = None
    scale: float = 1.0
    outer: float | None = None
    log_sign: int = 0
    """1: log-probabilities, -1: their negative, 0: logits."""

    parent: Pending | None = None
    steps: Replayed = ()
    """The functions that make it of the call's logits; the last one makes it of `parent`."""

    hooks: OrderedDict[int, Any] | None = None
    """Hooks for the tensor's gradient."""

    result: Tensor | None = None
    """The tensor, once somebody needed it."""

    def __init__(
        self, call: HeadCall, looks: Tensor, input: Callable[[], Tensor], class_dim: int
    ) -> None:
        self.call, self.looks, self.input, self.class_dim = call, looks, input, class_dim
        call.waiting.append(weakref.ref(self))

    @property
    def words(self) -> int:
        return self.looks.shape[self.class_dim]

    def derived(self, replay: Callable[[Tensor], Tensor], looks: Tensor, **changes: Any) -> Pending:
        """The tensor that `replay` makes of it."""
        made = object.__new__(Pending)  # dataclasses.replace takes the host three times as long
        made.__dict__.update(self.__dict__, hooks=None, result=None, looks=looks, parent=self)
        made.__dict__.update(changes)
        made.steps = (*self.steps, (replay, AutocastState.now(self.call.autocast.device)))
        self.call.waiting.append(weakref.ref(made))
        return made

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
            if self.parent is None:
                made = self.call.product()
            else:
                made = made_by(self.steps[-1:], self.parent._compute())
            self.result = made
            if self.hooks and made.requires_grad:
                made.register_hook(partial(_run_hooks, self.hooks))  # not of this: a cycle
        return self.result

    def rows(self) -> Tensor:
        """The head's input, features last, with the rows in the order of the tensor."""
        rows = self.input()
        return rows if self.class_dim == rows.dim() - 1 else rows.movedim(self.class_dim, -1)

    def row_shape(self) -> torch.Size:
        shape = list(self.looks.shape)
        del shape[self.class_dim]
        return torch.Size(shape)

    def bias(self) -> Tensor | None:
        bias = self.call.bias
        if self.extra is None:
            return bias
        return self.extra.to(self.call.weight.dtype) if bias is None else bias + self.extra

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
            _cross_entropy,
            target,
            dtype=dtype,
            weight=weight,
            reduction=reduction,
            ignore_index=None if ignore_index == IGNORED else ignore_index,
            label_smoothing=label_smoothing,
        )
        return self._of_rows(found) if reduction == "none" else found

    def log_probs(self, target: Tensor) -> Tensor:
        """Log-probabilities of classes of `row_shape()`, by memopt's op in chunks of rows."""
        return self._of_rows(self._in_chunks(ops.linear_log_probs, target, ignore_index=NO_CLASS))

    def logsumexp(self) -> Tensor:
        """The logsumexp over the classes, of `row_shape()`, by memopt's op in chunks of rows."""
        return self._of_rows(self._in_chunks(ops.linear_logsumexp))

    def _in_chunks(self, op: Callable[..., Tensor], *target: Tensor, **options: Any) -> Tensor:
        """Call an op with the rows and their target, if any. A row alone is a batch of one."""
        rows = self._rows_to_use()
        if rows.dim() == 1:
            rows, target = rows.unsqueeze(0), tuple(each.unsqueeze(0) for each in target)
        if self.outer is not None:  # outer * tanh(scale * l) is softcap * tanh(x / softcap)
            options["softcap"], options["logit_scale"] = self.outer, self.scale * self.outer
        elif self.scale != 1.0:
            options["logit_scale"] = self.scale
        with self.call.autocast.again():
            found = op(rows, self.call.weight, *target, linear_bias=self.bias(), **options)
        return self._around(found)

    def _around(self, found: Tensor) -> Tensor:
        """Notes what was computed without the logits, of which they get no gradient."""
        key = _C.node_key(found)
        if key is not None:
            self.call.around.add(key)
        return found

    def _of_rows(self, found: Tensor) -> Tensor:
        """A number for each row, without the dimension that `_in_chunks` gave a row alone."""
        return found.squeeze(0) if len(self.looks.shape) == 1 else found

    def at(self, target: Tensor) -> Tensor:
        """z at classes of `row_shape()`, in float32 (float64 for float64); the linear's l rounded
        as in the product, so that a logsumexp less it loses no more than there.
        """
        rows = self._rows_to_use()
        product = self.call.autocast.product_dtype(rows)
        wide = torch.promote_types(product, torch.float32)
        bias = self.bias()
        with torch.autocast(rows.device.type, enabled=False):
            words = F.embedding(target, self.call.weight)
            z = (rows.to(product).to(wide) * words.to(product).to(wide)).sum(-1)
            if bias is not None:
                z = z + bias.to(product).to(wide)[target]
            z = z.to(product).to(wide) * self.scale
            return self._around(z if self.outer is None else z.tanh() * self.outer)

    def _rows_to_use(self) -> Tensor:
        self.call.check()
        self.call.use.losses += 1
        self.call.leave_region()
        return self.rows()


def _cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    reduction: str,
    ignore_index: int | None,
    label_smoothing: float,
    dtype: torch.dtype,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> Tensor:
    """The op, without what torch.ops takes of the host's time where no class of tensors sees it."""
    if has_torch_function((input, linear_weight, target, linear_bias, weight)):
        return ops.linear_cross_entropy(  # type: ignore[no-any-return]
            input,
            linear_weight,
            target,
            linear_bias=linear_bias,
            weight=weight,
            reduction=reduction,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            softcap=softcap,
            logit_scale=logit_scale,
            dtype=dtype,
        )
    return _C.linear_cross_entropy(
        input, linear_weight, target, linear_bias, weight, reduction, ignore_index,
        label_smoothing, softcap, logit_scale, dtype,
    )  # fmt: skip
