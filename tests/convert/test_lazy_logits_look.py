"""Proves: a head that convert made lazy returns a tensor that looks like its logits and is not
computed: metadata, errors, pickles, hooks and retained gradients are those of plain ones, or an
error says what is different. Modes never see logits that are not there. Autocast, several
backwards, and code that is compiled work.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from memopt._head.call import watched_heads
from memopt._head.logits import LazyLogits
from tests.convert.lazy import (
    LENGTH,
    LOSSES,
    ROWS,
    WORDS,
    compare,
    gradients,
    lazy_and_plain,
    shifted,
    words,
)

OP = torch.ops.memopt._linear_cross_entropy.default


SHAPES: list[Callable[[Tensor], Tensor]] = [
    lambda z: z,
    lambda z: z[:, 1:].float(),
    lambda z: z.transpose(1, 2),
]


def test_it_looks_like_the_logits() -> None:
    lazy, plain = lazy_and_plain(dtype=torch.bfloat16)
    with watched_heads() as uses:
        for shape in SHAPES:
            ours, theirs = shape(lazy(words())), shape(plain(words()))
            assert isinstance(ours, Tensor)
            for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf"):
                assert getattr(ours, name) == getattr(theirs, name), name
            for name in ("size", "dim", "numel", "stride", "is_contiguous", "is_floating_point"):
                assert getattr(ours, name)() == getattr(theirs, name)(), name
            assert len(ours) == len(theirs)
            assert hash(ours) != hash(theirs)
    assert not any(use.were_made or use.losses for use in uses)


def test_a_view_that_pytorch_refuses_is_refused() -> None:
    lazy, plain = lazy_and_plain()
    for model in (plain, lazy):
        with pytest.raises(RuntimeError, match="view size is not compatible"):
            model(words())[:, :-1].view(-1, WORDS)
        with pytest.raises(ValueError, match="Expected input batch_size"):
            F.cross_entropy(model(words()).view(-1, WORDS), torch.zeros(4, dtype=torch.long))
        with pytest.raises(IndexError, match=r"out of bounds|must be in"):
            F.cross_entropy(model(words()).view(-1, WORDS), torch.full((15,), WORDS))


@pytest.mark.parametrize("change", ["eval", "no_grad", "inference_mode", "frozen"])
def test_plain_outside_of_training(change: str) -> None:
    lazy, _ = lazy_and_plain()
    if change == "eval":
        lazy.eval()
    if change == "frozen":
        lazy.requires_grad_(False)
    context: Any = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}.get(
        change, torch.enable_grad
    )
    with context():
        assert type(lazy(words())) is Tensor
    assert type(lazy.train().requires_grad_()(words())) is LazyLogits


def test_pickled_and_saved_it_is_the_logits() -> None:
    lazy, plain = lazy_and_plain()
    file = io.BytesIO()
    torch.save(lazy(words()), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for copied in (pickle.loads(pickle.dumps(lazy(words()))), loaded):
        assert type(copied) is Tensor
        assert torch.equal(copied, plain(words()))
    for model in (lazy, plain):
        with pytest.raises(RuntimeError, match="support the deepcopy"):
            copy.deepcopy(model(words()))
    assert repr(lazy(words()).detach()) == repr(plain(words()).detach())


def test_hooks_and_retained_gradients_see_the_gradient() -> None:
    lazy, plain = lazy_and_plain()
    found: list[list[Tensor]] = []
    for model in (lazy, plain):
        seen: list[Tensor] = []
        logits = model(words())
        logits.retain_grad()
        shifted(logits, words(2)).backward()
        seen.append(logits.grad)
        logits = model(words())
        logits.register_hook(seen.append)
        removed = logits.register_hook(seen.append)
        removed.remove()
        shifted(logits, words(2)).backward()
        logits = model(words())
        seen += torch.autograd.grad(logits.square().sum(), logits)
        found.append(seen)
    assert len(found[0]) == len(found[1]) == 3
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


def test_a_gradient_of_logits_that_a_loss_went_around_is_an_error() -> None:
    lazy, _ = lazy_and_plain()
    logits = lazy(words())
    loss = shifted(logits, words(2))
    with pytest.raises(RuntimeError, match="head=False"):
        torch.autograd.grad(loss, logits)


def test_a_head_with_hooks_of_others_returns_its_logits() -> None:
    lazy, plain = lazy_and_plain()
    seen: list[Any] = []
    handle = lazy.head.register_forward_hook(lambda *call: seen.append(call[-1]))
    assert type(lazy(words())) is Tensor
    assert torch.equal(seen[0], plain(words()))
    handle.remove()
    assert type(lazy(words())) is LazyLogits
    handle = lazy.head.register_full_backward_hook(lambda *call: seen.append(call))
    shifted(lazy(words()), words(2)).backward()
    assert len(seen) == 2
    handle.remove()
    lazy.head.register_forward_pre_hook(lambda *call: None)
    assert type(lazy(words())) is LazyLogits


def test_weights_written_since_are_an_error() -> None:
    lazy, _ = lazy_and_plain()
    for change in (lazy.head.weight, None):
        logits = lazy(words())
        with torch.no_grad():
            (logits._pending.call.input if change is None else change).mul_(1.0)
        for use in (lambda z: z.sum(), lambda z: shifted(z, words(2))):
            with pytest.raises(RuntimeError, match="written in place since"):
                use(logits)
    logits = lazy(words())
    values = logits.argmax(-1)  # computed before
    with torch.no_grad():
        lazy.head.weight.mul_(-1)
    assert torch.equal(logits.argmax(-1), values)


class Watching(TorchDispatchMode):
    """Keeps a copy of every tensor that it sees, and compares at the end."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[Tensor, Tensor]] = []
        self.ops: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.ops.append(func)
        for leaf in torch.utils._pytree.tree_leaves((args, kwargs, out)):
            if isinstance(leaf, Tensor):
                assert type(leaf) is not LazyLogits, func
                assert not leaf.is_meta, func
                self.seen.append((leaf, leaf.detach().clone()))
        return out


@pytest.mark.parametrize("name", ["shifted", "masked rows", "label smoother", "TRL", "softcap"])
def test_a_mode_sees_the_op_and_nothing_of_the_logits(name: str) -> None:
    lazy, _ = lazy_and_plain()
    lazy(words())
    with Watching() as watching:
        loss = LOSSES[name](lazy(words()), words(2))
        loss.backward()
    assert OP in watching.ops
    logits = ROWS * LENGTH * WORDS
    for tensor, before in watching.seen:
        assert tensor.numel() < logits or tensor.shape[-1] != WORDS
        is_gradient = tensor.shape == before.shape and tensor._version
        assert is_gradient or torch.equal(tensor, before)


def test_retain_graph_and_accumulation() -> None:
    lazy, plain = lazy_and_plain()
    for model in (lazy, plain):
        loss = shifted(model(words()), words(2))
        loss.backward(retain_graph=True)
        loss.backward()
        shifted(model(words(3)), words(4)).backward()
    for ours, theirs in zip(lazy.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("outside", [False, True], ids=["loss in autocast", "loss outside"])
def test_autocast(outside: bool) -> None:
    lazy, plain = lazy_and_plain()
    results = []
    for model in (lazy, plain):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(words())
            loss = None if outside else shifted(logits, words(2))
        assert logits.dtype == torch.bfloat16
        loss = shifted(logits, words(2)) if loss is None else loss
        results.append((loss, gradients(model, loss)))
    (ours, of_lazy), (theirs, of_plain) = results
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)
    for name, gradient in of_lazy.items():
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(gradient, of_plain[name], rtol=3e-2, atol=3e-3)


def test_a_bias_for_all_classes_is_the_heads() -> None:
    """BART's final_logits_bias."""
    bias = torch.linspace(-1, 1, WORDS)
    use = compare(lambda z, t: shifted(z + bias.to(z.dtype)[None], t), bias=True)
    assert use.losses
    assert not use.were_made
    use = compare(lambda z, t: shifted(z + torch.ones(LENGTH, 1, dtype=z.dtype), t))
    assert use.were_made


def test_compiled_models_step_aside() -> None:
    lazy, plain = lazy_and_plain()
    torch.compiler.reset()
    with watched_heads() as uses:
        compiled = torch.compile(lazy, backend="aot_eager", fullgraph=True)
        loss = shifted(compiled(words()), words(2))
    assert not uses
    torch.testing.assert_close(loss, shifted(plain(words()), words(2)))


@pytest.mark.filterwarnings("ignore:Dynamo does not know")
def test_a_compiled_loss_gets_the_logits() -> None:
    lazy, plain = lazy_and_plain()
    torch.compiler.reset()
    loss = torch.compile(shifted, backend="aot_eager")
    for seed in (1, 3):
        ours, theirs = loss(lazy(words(seed)), words(2)), shifted(plain(words(seed)), words(2))
        torch.testing.assert_close(ours, theirs)
        for a, b in zip(
            gradients(lazy, ours).values(), gradients(plain, theirs).values(), strict=True
        ):
            torch.testing.assert_close(a, b)
