"""Proves: the ways that spare the host time give the results of those that ask more closely, bit by
bit; classes of tensors see the op of a loss of lazy logits; and a lazy tensor's node looks as one
of PyTorch's, under compiled autograd too, and keeps nothing alive.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from memopt._convert import head
from memopt._extension import _C
from memopt._head.call import watched_heads
from memopt.memory.storages import node_of
from tests.convert.lazy import LOSSES, WORDS, Squares, gradients, lazy_and_plain, shifted, words


class Noted(Tensor):
    """Notes the names of functions that it is called with."""

    names: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        cls.names.append(str(getattr(func, "__name__", func)))
        found = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        return found


@pytest.mark.parametrize("has_gradient", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_a_class_of_tensors_sees_the_op_and_changes_no_bit(name: str, has_gradient: bool) -> None:
    found = []
    for of_class in (Tensor, Noted):
        lazy, _ = lazy_and_plain(bias=True)
        hidden = lazy.inner(lazy.embed(words())).detach().as_subclass(of_class)
        Noted.names.clear()
        loss = LOSSES[name](lazy.head(hidden.requires_grad_(has_gradient)), words(2))
        assert any(seen.startswith("linear_") for seen in Noted.names) == (of_class is Noted)
        grads = gradients(lazy.head, loss)
        found.append({"loss": loss.detach(), **grads, "input": hidden.grad})
    for key, value in found[0].items():
        assert value is found[1][key] is None or torch.equal(value, found[1][key]), key


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_asking_more_closely_changes_no_bit(
    bias: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for is_asked in (False, True):
        if is_asked:
            monkeypatch.setattr(_C, "is_plain_head", lambda *_: False)
        lazy, _ = lazy_and_plain(bias=bias, dtype=dtype)
        with watched_heads() as uses:
            loss = shifted(lazy(words()), words(2))
        assert [use.losses for use in uses] == [1]
        found.append({"loss": loss.detach(), **gradients(lazy, loss)})
    for key, value in found[0].items():
        assert torch.equal(value, found[1][key]), key


CALLS: dict[str, tuple[Any, Any, Any]] = {
    "plain": (torch.ones(2, 3, requires_grad=True), torch.ones(4, 3), None),
    "bias": (torch.ones(3), torch.ones(4, 3, requires_grad=True), torch.ones(4)),
    "mixed": (torch.ones(3, dtype=torch.bfloat16), torch.ones(4, 3, requires_grad=True), None),
    "no gradient": (torch.ones(2, 3), torch.ones(4, 3), None),
    "no dimension": (torch.ones(()), torch.ones(4, 3, requires_grad=True), None),
    "one class": (torch.ones(2, 3), torch.ones(1, 3, requires_grad=True), None),
    "one feature": (torch.ones(2, 1), torch.ones(4, 1, requires_grad=True), None),
    "other features": (torch.ones(2, 4), torch.ones(4, 3, requires_grad=True), None),
    "integers": (torch.ones(2, 3, dtype=torch.int64), torch.ones(4, 3, requires_grad=True), None),
    "sparse": (torch.ones(2, 3).to_sparse(), torch.ones(4, 3, requires_grad=True), None),
    "device": (torch.ones(2, 3, device="meta"), torch.ones(4, 3, requires_grad=True), None),
    "no tensor": ([1.0], torch.ones(4, 3, requires_grad=True), None),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_short_question_says_yes_only_where_the_long_one_does(name: str) -> None:
    call = CALLS[name]
    is_known = {"plain", "bias", "mixed"}
    assert _C.is_plain_head(*call) == (name in is_known)
    if name != "no tensor":
        assert not _C.is_plain_head(*call) or head._may_wait(*call)
    with torch.no_grad():
        assert not _C.is_plain_head(*call)


def test_transforms_are_left_to_the_long_question() -> None:
    weight, seen = torch.ones(4, 3, requires_grad=True), []

    def call(input: Tensor) -> Tensor:
        seen.append(_C.is_plain_head(input, weight, None))
        return F.linear(input, weight).sum()

    torch.func.grad(call)(torch.ones(2, 3))
    torch.func.vmap(call)(torch.ones(2, 3))
    with torch.autograd.forward_ad.dual_level():
        call(torch.ones(2, 3))
    call(torch.ones(2, 3))
    assert seen == [False, False, False, True]


def test_hooks_that_hold_the_logits_keep_nothing_alive() -> None:
    """A node of C++ is not seen by Python's collector."""
    lazy, _ = lazy_and_plain()
    logits = lazy(words())
    flat = logits.view(-1, WORDS)
    both = weakref.ref(logits), weakref.ref(flat)
    logits.register_hook(lambda gradient, kept=(logits, flat): None)
    flat.register_hook(lambda gradient, kept=(logits, flat): None)
    del logits, flat
    gc.collect()
    assert [each() for each in both] == [None, None]


def test_the_node_looks_as_one_of_pytorch() -> None:
    lazy, _ = lazy_and_plain()
    node = node_of(lazy(words()))
    assert node.name() == type(node).__name__ == "LazyLogitsBackward"
    assert len(node.next_functions) == 3
    assert node.requires_grad


def test_compiled_autograd_has_the_same_gradients() -> None:
    """Twice: the second call of the head is another one."""
    from torch._dynamo import compiled_autograd

    lazy, plain = lazy_and_plain()
    for seed in (1, 2):
        with compiled_autograd._enable(lambda graph: graph):
            ours = gradients(lazy, Squares.apply(lazy(words(seed))))  # type: ignore[no-untyped-call]
        theirs = gradients(plain, Squares.apply(plain(words(seed))))  # type: ignore[no-untyped-call]
        torch.testing.assert_close(ours, theirs)
