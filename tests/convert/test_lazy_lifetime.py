"""Proves: lazy logits are what they were when the head was called, or say that they cannot be,
whatever is written, stepped, frozen or hooked between the call and the use; they leave nothing
behind; and gradients are there, or not, as those of plain logits are.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import memopt
from memopt.memory.allocator import LiveBytes
from tests.convert.lazy import LENGTH, ROWS, WIDTH, WORDS, Model, lazy_and_plain, words


def loss_of(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, WORDS), words(2).flatten())


@pytest.mark.parametrize("fused", [True, False])
def test_logits_after_an_optimizer_s_step_are_refused(fused: bool) -> None:
    """A fused optimizer does not count what it writes; another model's says nothing."""
    lazy, plain = lazy_and_plain()
    optimizers = [torch.optim.AdamW(m.parameters(), 0.1, fused=fused) for m in (lazy, plain)]
    logits = lazy(words())
    loss_of(logits).backward()
    loss_of(plain(words())).backward()
    optimizers[1].step()
    loss_of(logits)
    optimizers[0].step()
    with pytest.raises(RuntimeError, match="used before what they are made of changes"):
        logits.detach()
    loss_of(lazy(words())).backward()


def test_a_step_that_does_not_write_the_head_refuses_nothing() -> None:
    lazy, plain = lazy_and_plain()
    optimizer = torch.optim.SGD(lazy.parameters(), 0.1)
    logits = lazy(words())
    optimizer.step()  # there are no gradients yet
    torch.testing.assert_close(loss_of(logits), loss_of(plain(words())))


def test_hooks_on_logits_keep_nothing_alive() -> None:
    """Lightning Fabric and FSDP put one on all that a model returns, at each step."""
    lazy, _ = lazy_and_plain()
    for _ in range(5):
        logits = lazy(words())
        logits.register_hook(lambda gradient: None)
        loss_of(logits).backward()
        del logits
    gc.collect()
    shape = (ROWS, LENGTH, WORDS)
    assert not [o for o in gc.get_objects() if type(o) is Tensor and o.shape == shape]


def test_retain_grad_after_the_loss_is_refused() -> None:
    """The loss has gone around the logits, which get no gradient."""
    lazy, _ = lazy_and_plain()
    logits = lazy(words())
    loss_of(logits)
    with pytest.raises(RuntimeError, match="a loss that was made of the logits themselves"):
        logits.retain_grad()


def sharpness(logits: Tensor) -> Tensor:
    return logits.softmax(-1).square().sum()


CHECKPOINTS: dict[str, Callable[[Tensor], Tensor]] = {
    "PyTorch's": lambda z: torch_checkpoint(sharpness, z, use_reentrant=False),
    "PyTorch's, reentrant": lambda z: torch_checkpoint(sharpness, z, use_reentrant=True),
    "memopt's": lambda z: memopt.checkpoint(sharpness, z),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_that_a_checkpointed_function_gets(name: str) -> None:
    lazy, plain = lazy_and_plain(bias=True)
    CHECKPOINTS[name](lazy(words())).backward()
    sharpness(plain(words())).backward()
    for ours, theirs in zip(lazy.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


class Whole(nn.Module):
    """Logits are made, and used, in one call."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()

    def forward(self, ids: Tensor) -> Tensor:
        return sharpness(self.model(ids))


def test_a_region_around_the_head_and_the_use_drops_what_the_product_saves() -> None:
    whole, ids = Whole(), words()
    memopt.convert(whole)
    memopt.checkpoint_wrapper(whole)
    live = LiveBytes()
    with live:
        loss = whole(ids)
        live.mark()
    hidden = ROWS * LENGTH * WIDTH * loss.element_size()
    assert live.marks[0].nbytes < hidden


def reused_noise(logits: Tensor) -> Tensor:
    noise = torch.zeros(WORDS)
    noisy = logits + noise
    noise.add_(torch.arange(WORDS))
    return loss_of(noisy)


def reused_mask(logits: Tensor) -> Tensor:
    mask = words() > 8
    chosen = logits[mask]
    mask.zero_()
    return chosen.square().sum()


def reused_numbers(logits: Tensor) -> Tensor:
    rows = torch.tensor([0, 2])
    chosen = logits[rows]
    rows.fill_(1)
    return chosen.square().sum()


def reused_array(logits: Tensor) -> Tensor:
    rows = np.array([0, 2])
    chosen = logits[rows]
    rows[:] = 1
    return chosen.square().sum()


def reused_sizes(logits: Tensor) -> Tensor:
    sizes = [ROWS * LENGTH, WORDS]
    flat = logits.reshape(sizes)
    sizes[0] = 1
    return flat.square().sum()


@pytest.mark.parametrize(
    "use", [reused_noise, reused_mask, reused_numbers, reused_array, reused_sizes]
)
def test_arguments_that_are_written_after_an_operation(use: Callable[[Tensor], Tensor]) -> None:
    lazy, plain = lazy_and_plain()
    torch.testing.assert_close(use(lazy(words())), use(plain(words())))


def test_a_bias_with_a_gradient_that_is_written_is_refused() -> None:
    lazy, _ = lazy_and_plain()
    bias = nn.Parameter(torch.zeros(WORDS))
    logits = lazy(words()) + bias
    with torch.no_grad():
        bias.add_(1)
    with pytest.raises(RuntimeError, match="were written in place since"):
        loss_of(logits)


def test_logits_that_no_gradient_reaches_leave_the_head_without_one() -> None:
    """A full backward hook passes all outputs through one node; so does DistributedDataParallel
    that finds unused parameters.
    """

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
            hidden = self.model.inner(self.model.embed(ids))
            return hidden, self.model.head(hidden)

    model = Two()
    memopt.convert(model)
    model.register_full_backward_hook(lambda *_: None)
    hidden, logits = model(words())
    hidden.sum().backward()
    assert logits.shape == (ROWS, LENGTH, WORDS)
    assert model.model.head.weight.grad is None
    assert model.model.inner.weight.grad is not None


@pytest.mark.parametrize("made", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_flags_are_those_of_the_call(frozen: bool, made: bool) -> None:
    """Discriminators are frozen and thawed within a step."""
    found: list[list[Any]] = []
    for model in lazy_and_plain(bias=True):
        model.head.requires_grad_(not frozen)
        logits = model(words())
        model.head.requires_grad_(frozen)
        (sharpness if made else loss_of)(logits).backward()
        found.append([p.grad is None for p in model.parameters()])
    assert found[0] == found[1]


def one_row(logits: Tensor) -> Tensor:
    return torch.vmap(lambda row: logits[row].sum())(torch.arange(ROWS))


def scaled(logits: Tensor) -> Tensor:
    return torch.func.grad(lambda scale: loss_of(logits) * scale)(torch.tensor(2.0))


@pytest.mark.parametrize("use", [one_row, scaled])
def test_transforms_of_a_function_that_uses_logits_from_outside(
    use: Callable[[Tensor], Tensor],
) -> None:
    torch.testing.assert_close(*(use(model(words())) for model in lazy_and_plain()))


def test_log_probabilities_have_autocast_s_dtype() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = (model(words()).log_softmax(-1) for model in lazy_and_plain())
    index = words(2).unsqueeze(-1)
    assert ours.dtype is theirs.dtype
    assert ours.gather(-1, index).dtype is theirs.gather(-1, index).dtype
    assert ours.exp().dtype is theirs.exp().dtype


REGIONS: dict[str, Callable[..., Tensor]] = {
    "PyTorch's": lambda head, x: torch_checkpoint(head, x, use_reentrant=False),
    "memopt's": memopt.checkpoint,
}


@pytest.mark.parametrize("name", REGIONS)
def test_logits_from_a_region_do_not_keep_its_arguments(name: str) -> None:
    lazy, _ = lazy_and_plain()
    hidden = torch.ones(ROWS, LENGTH, WIDTH, requires_grad=True) * 1
    alive = weakref.ref(hidden)
    logits = REGIONS[name](lambda x: lazy.head(lazy.inner(x)), hidden)
    loss_of(logits).backward()
    del hidden
    gc.collect()
    assert alive() is None
    assert logits.shape == (ROWS, LENGTH, WORDS)
