"""Proves: who asks for the gradient of lazy logits gets what plain logits have, or is told that a
loss has gone around them; and logits that were computed and changed since look like what they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook

from tests.convert.lazy import Model, gradients, lazy_and_plain, shifted, words

Gradient = Callable[[Tensor, Tensor], Any]

ASKED: dict[str, Gradient] = {
    "retain_grad": lambda logits, loss: logits.retain_grad(),
    "grad": lambda logits, loss: torch.autograd.grad(loss, logits),
    "grad, allow_unused": lambda logits, loss: torch.autograd.grad(
        loss * 2, [logits], allow_unused=True
    ),
    "backward": lambda logits, loss: loss.backward(inputs=[logits]),
    "backward of several": lambda logits, loss: torch.autograd.backward(
        [loss, loss.square()], inputs=[logits]
    ),
}


@pytest.mark.parametrize("made", [False, True])
@pytest.mark.parametrize("name", ASKED)
def test_a_gradient_of_a_loss_that_has_gone_around_is_an_error(name: str, made: bool) -> None:
    lazy, _ = lazy_and_plain()
    logits = lazy(words())
    loss = shifted(logits, words(2))
    if made:
        logits.argmax(-1)
    with pytest.raises(RuntimeError, match="head=False"):
        ASKED[name](logits, loss)


def test_the_gradient_of_another_loss_is_there() -> None:
    found = []
    for model in lazy_and_plain():
        logits = model(words())
        shifted(logits, words(2)).backward()
        found.append(torch.autograd.grad(logits.softmax(-1).square().sum(), logits)[0])
    torch.testing.assert_close(*found)


HOOKS: dict[str, Callable[[Tensor, Callable[[Any], None]], Any]] = {
    "hook": lambda logits, seen: logits.register_hook(seen),
    "node's hook": lambda logits, seen: logits.grad_fn.register_hook(lambda _, out: seen(out[0])),
    "node's prehook": lambda logits, seen: logits.grad_fn.register_prehook(
        lambda out: seen(out[0])
    ),
    "hook of several": lambda logits, seen: register_multi_grad_hook(
        [logits], lambda gradients: seen(gradients[0])
    ),
    "hook of any": lambda logits, seen: register_multi_grad_hook([logits], seen, mode="any"),
}


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_before_the_loss_sees_the_gradient(name: str) -> None:
    seen: list[Tensor] = []
    for model in lazy_and_plain():
        logits = model(words())
        HOOKS[name](logits, seen.append)
        shifted(logits, words(2)).backward()
    torch.testing.assert_close(*seen)


@pytest.mark.parametrize("made", [False, True])
@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_after_the_loss_warns(name: str, made: bool) -> None:
    lazy, plain = lazy_and_plain()
    logits = lazy(words())
    loss = shifted(logits, words(2))
    if made:
        logits.argmax(-1)
    with pytest.warns(UserWarning, match="head=False"):
        HOOKS[name](logits, lambda _: None)
    ours, theirs = gradients(lazy, loss), gradients(plain, shifted(plain(words()), words(2)))
    torch.testing.assert_close(ours, theirs)


def on_all_outputs(gradient: Tensor) -> None:
    raise AssertionError


def test_hooks_of_libraries_on_all_outputs_warn_of_nothing(recwarn: Any) -> None:
    lazy, _ = lazy_and_plain()
    logits = lazy(words())
    loss = shifted(logits, words(2))
    on_all_outputs.__module__ = "lightning.fabric.wrappers"
    for hook in (on_all_outputs, functools.partial(on_all_outputs)):
        logits.register_hook(hook)
    loss.backward()
    assert not [each for each in recwarn if "head=False" in str(each.message)]


def test_an_edge_after_the_loss_warns() -> None:
    lazy, _ = lazy_and_plain()
    logits = lazy(words())
    shifted(logits, words(2))
    with pytest.warns(UserWarning, match="the node of logits"):
        get_gradient_edge(logits)


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "unsqueeze_": lambda z: z.unsqueeze_(0),
    "transpose_": lambda z: z.transpose_(0, 1),
    "detach_": lambda z: z.detach_(),
    "data": lambda z: setattr(z, "data", torch.zeros(2, 2)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_logits_look_as_they_are(name: str) -> None:
    def look(model: Model) -> Any:
        logits = model(words())
        CHANGES[name](logits)
        names = ("shape", "requires_grad", "is_leaf")
        node = type(logits.grad_fn).__name__
        return [*(getattr(logits, name) for name in names), logits.stride(), node]

    ours, theirs = map(look, lazy_and_plain())
    assert ours == theirs


class Tripled(torch.autograd.Function):
    """In place."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        logits.mul_(3)
        ctx.mark_dirty(logits)
        return logits

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 3


def test_logits_that_an_autograd_function_has_written_are_refused() -> None:
    """Their gradient was that of logits that nobody has written."""
    lazy, _ = lazy_and_plain()
    logits = lazy(words())
    Tripled.apply(logits)  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match="mark_dirty"):
        logits.square().sum()


@pytest.mark.parametrize("made", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_weights_that_were_exchanged_are_those_of_the_call(frozen: bool, made: bool) -> None:
    found = []
    for model in lazy_and_plain(bias=True):
        model.head.requires_grad_(not frozen)
        logits = model(words())
        for parameter in (model.head.weight, model.head.bias):
            parameter.data = torch.zeros_like(parameter)
        loss = logits.softmax(-1).square().sum() if made else shifted(logits, words(2))
        found.append((loss.detach(), gradients(model, loss)))
    torch.testing.assert_close(*found)


def test_a_bias_that_was_exchanged_is_that_of_the_addition() -> None:
    found = []
    for model in lazy_and_plain():
        bias = torch.nn.Parameter(torch.ones(model.head.out_features))
        logits = model(words()) + bias
        bias.data = torch.zeros_like(bias)
        found.append(logits.square().mean())
    torch.testing.assert_close(*found)
