"""Proves of memopt.checkpoint.buffers that nothing which anything still reads is used again or
written: what a user keeps, retained graphs, writes in place, views, inputs of several regions, what
others hold, a mode that keeps every tensor; and how it goes together with other regions, offloading
and converted models.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import memopt
from memopt._checkpoint import checkpoint_wrapper, is_recomputing
from tests.checkpoint.buffers import (
    BLOCKS,
    WIDTH,
    Model,
    batch,
    input_bytes,
    plain,
    row,
    train,
    wrapped,
)
from tests.checkpoint.support import mlp, step_results, taken_for_an_accelerator
from tests.support.bits import assert_same_bits


class Keeps(nn.Module):
    """Keeps what its recompute was given, if it is to."""

    keeps = False

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.keeps and is_recomputing():
            self.kept.append(x)
        return self.linear(x).tanh()


def test_what_a_user_keeps_is_not_used_again() -> None:
    model = wrapped(Keeps)
    expected = plain(model, 8)
    buffers = memopt.checkpoint.buffers(model)
    for keeps in (False, True):
        for block in model.blocks:
            block.keeps = keeps
        train(model, 8)
    for block in model.blocks:
        block.keeps = False
    kept = [x for block in model.blocks for x in block.kept]
    values = [x.detach().clone() for x in kept]
    assert row(buffers).in_use == BLOCKS * input_bytes(8)
    for _ in range(3):
        assert_same_bits(train(model, 8), expected)
        assert_same_bits([x.detach() for x in kept], values)
    assert row(buffers).fallbacks == 3 * BLOCKS
    assert row(buffers).slab_bytes == BLOCKS * input_bytes(8)  # no other slab for the user's sake
    kept.clear()
    for block in model.blocks:
        block.kept.clear()
    assert row(buffers).in_use == 0
    train(model, 8)
    assert row(buffers).fallbacks == 3 * BLOCKS


def test_graphs_that_are_retained_and_differentiated_twice() -> None:
    model = wrapped()
    x = batch(8).requires_grad_()

    def derivatives() -> list[Tensor]:
        loss = model(x * 1).square().sum()
        first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        again = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        (second,) = torch.autograd.grad(slope.square().sum(), x)
        return [*first, *again, second]

    with memopt.checkpoint.disable():
        expected = derivatives()
    buffers = memopt.checkpoint.buffers(model)
    for _ in range(4):
        assert_same_bits(derivatives(), expected)
    assert row(buffers).in_use == 0
    assert row(buffers).fallbacks == 0


def test_writing_to_an_input_raises() -> None:
    model = wrapped()
    memopt.checkpoint.buffers(model)
    for _ in range(3):
        hidden = model.first(batch(8))
        output = model.blocks[0](hidden)
        with torch.no_grad():
            hidden.zero_()
        with pytest.raises(RuntimeError, match="must not be written in place"):
            output.sum().backward()
        del output, hidden


def test_writing_to_what_the_recompute_got_raises_in_the_next_one() -> None:
    model = wrapped(Keeps)
    buffers = memopt.checkpoint.buffers(model)
    train(model, 8)
    model.blocks[2].keeps = True
    loss = model(batch(8)).sum()
    loss.backward(retain_graph=True)
    with torch.no_grad():
        model.blocks[2].kept[-1].view(-1)[3:5].zero_()
    with pytest.raises(RuntimeError, match="must not be written in place while its graph"):
        loss.backward()
    model.blocks[2].kept.clear()
    del loss
    model.zero_grad()
    assert row(buffers).in_use == 0
    assert_same_bits(train(model, 8), plain(model, 8))


def test_an_input_of_several_regions_is_copied_once() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, shared: Tensor) -> Tensor:
            return self.linear(x).tanh() * shared

    class Shares(Model):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            shared = x.exp()
            for number, block in enumerate(self.blocks):
                x = block(x, shared if number % 2 else shared.t().contiguous().t()[:, :])
            return x

    model = wrapped(Block, Shares)
    expected = plain(model, 8)
    buffers = memopt.checkpoint.buffers(model)
    for _ in range(3):
        assert_same_bits(train(model, 8), expected)
    # Of the input of each block, of the shared one, and of three that are copies.
    assert row(buffers).copies == 2 * (BLOCKS + 1 + 3)


def test_strides_of_views_are_kept() -> None:
    seen: list[tuple[Any, ...]] = []

    class Looks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append((x.shape, x.stride(), x.storage_offset(), x.requires_grad))
            return x.exp()

    views = [
        lambda x: x.t(),
        lambda x: x[2:5],
        lambda x: x[:, ::2],
        lambda x: x[:, :1].expand(-1, 7),
        lambda x: x.unfold(1, 4, 2),
        lambda x: x.detach(),
        lambda x: x[3:3],
    ]
    block = checkpoint_wrapper(Looks())
    buffers = memopt.checkpoint.buffers(block)
    for view in views:
        for _ in range(3):
            x = torch.randn(8, WIDTH, requires_grad=True)
            seen.clear()
            y = block(view(x * 1))
            if not y.requires_grad:
                continue
            y.sum().backward()
            assert seen[0] == seen[1]
            (expected,) = torch.autograd.grad(view(x * 1).exp().sum(), x)
            assert torch.equal(x.grad, expected)
    assert row(buffers).copies >= 2 * (len(views) - 3)


def test_what_is_held_anyway_is_left_alone() -> None:
    """A module's buffer, a tensor that the loop holds from step to step, leaves and parameters."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, *others: Tensor) -> Tensor:
            for other in others:
                x = x * other
            return self.linear(x).tanh()

    class Masked(Model):
        def forward(self, x: Tensor, *args: Any) -> Tensor:
            return super().forward(x, self.mask, *args)

    torch.manual_seed(0)
    model = Masked(Block)
    model.register_buffer("mask", torch.rand(8, WIDTH))
    for block in model.blocks:
        checkpoint_wrapper(block)
    others = (torch.rand(8, WIDTH), torch.rand(8, WIDTH, requires_grad=True), model.first.bias)
    expected = plain(model, 8, *others)
    buffers = memopt.checkpoint.buffers(model)
    for _ in range(3):
        assert_same_bits(train(model, 8, *others), expected)
    assert row(buffers).slab_bytes == BLOCKS * input_bytes(8)
    assert row(buffers).copies == 2 * BLOCKS
    assert (row(buffers).fallbacks, row(buffers).found_elsewhere_bytes) == (0, 0)


def test_what_is_held_by_others_until_backward_is_said() -> None:
    model = wrapped()
    buffers = memopt.checkpoint.buffers(model)
    for _ in range(2):
        hidden = [model.first(batch(8))]
        for block in model.blocks:
            hidden.append(block(hidden[-1]))
        hidden[-1].sum().backward()
        del hidden
    assert row(buffers).found_elsewhere_bytes == BLOCKS * input_bytes(8)


class Observer(TorchDispatchMode):
    """Keeps every tensor that it sees, and a copy, to compare at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Tensor, int, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in [*args, result]:
            if isinstance(tensor, Tensor):
                self.seen.append((tensor, tensor._version, tensor.detach().clone()))
        return result


def test_nothing_that_an_observer_keeps_is_written() -> None:
    model = wrapped()
    expected = plain(model, 8)
    memopt.checkpoint.buffers(model)
    train(model, 8)
    with Observer() as observer:
        for _ in range(3):
            assert_same_bits(train(model, 8), expected)
    assert len(observer.seen) > 100
    for tensor, version, values in observer.seen:
        if tensor._version == version:
            assert torch.equal(tensor.detach(), values)


def test_graphs_without_backward_give_their_room_back() -> None:
    model = wrapped()
    expected = plain(model, 8)
    buffers = memopt.checkpoint.buffers(model)
    for _ in range(3):
        model(batch(8))
    assert row(buffers).copies == 2 * BLOCKS
    assert row(buffers).in_use == 0
    assert_same_bits(train(model, 8), expected)


@pytest.mark.parametrize("in_recompute", [False, True])
def test_errors_give_the_room_back(in_recompute: bool) -> None:
    class Fails(nn.Module):
        fails = False

        def forward(self, x: Tensor) -> Tensor:
            if self.fails and is_recomputing() == in_recompute:
                raise ArithmeticError
            return x.exp().sin()

    model = wrapped(Fails)
    expected = plain(model, 8)
    buffers = memopt.checkpoint.buffers(model)
    for step in range(6):
        model.blocks[2].fails = bool(step % 2)
        if step % 2:
            with pytest.raises(ArithmeticError):
                train(model, 8)
            model.zero_grad()
        else:
            assert_same_bits(train(model, 8), expected)
    assert (row(buffers).in_use, row(buffers).kept_bytes, row(buffers).fallbacks) == (0, 0, 0)


def test_regions_in_regions() -> None:
    """Only what the outer ones get is kept, so only that is in the slab."""
    model = wrapped(lambda: nn.Sequential(checkpoint_wrapper(mlp(WIDTH)), mlp(WIDTH)))
    expected = plain(model, 8)
    buffers = memopt.checkpoint.buffers(model)
    for _ in range(3):
        assert_same_bits(train(model, 8), expected)
    assert row(buffers).slab_bytes == BLOCKS * input_bytes(8)


def test_after_apply_checkpointing_and_convert() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.1, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    x = torch.randn(2, 8, WIDTH)
    memopt.convert(model)
    expected = step_results(lambda: model(x), model.parameters())
    memopt.apply_activation_checkpointing(model)
    buffers = memopt.checkpoint.buffers(model)
    for _ in range(3):
        assert_same_bits(step_results(lambda: model(x), model.parameters()), expected)
    assert row(buffers).fallbacks == 0
    assert row(buffers).slab_bytes == 2 * x.nbytes  # the first layer's is held by the loop


def test_modules_that_offload_do_so() -> None:
    model = wrapped()
    checkpoint_wrapper(model.blocks[1], offload_to_cpu=True)
    expected = plain(model, 8)
    buffers = memopt.checkpoint.buffers(model)
    with taken_for_an_accelerator("cpu"):
        for _ in range(3):
            assert_same_bits(train(model, 8), expected)
    assert row(buffers).slab_bytes == (BLOCKS - 1) * input_bytes(8)
