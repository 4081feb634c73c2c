"""Proves memopt.checkpoint_buffers: the bits of the plain run; a slab of exactly the bytes that are
needed at one time, allocated once, and no allocation of a region's input that lives from forward to
backward; what differs from step to step is kept and learnt; memory that anything still reads is not
used again; copies of a model have no buffers.
"""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import memopt
from memopt._extension import _C
from memopt.checkpoint import checkpoint_wrapper, is_recomputing, unwrap
from memopt.live_bytes import LiveBytes
from tests.checkpoint.support import (
    assert_same_bits,
    collector_disabled,
    live_tensors_and_regions,
    mlp,
    step_results,
    taken_for_an_accelerator,
)

WIDTH, BLOCKS = 32, 5


class Model(nn.Module):
    """Blocks whose inputs nothing else holds: BLOCKS of them, of rows * WIDTH floats each."""

    def __init__(self, block: Callable[[], nn.Module] | None = None) -> None:
        super().__init__()
        make = block if block is not None else lambda: mlp(WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([make() for _ in range(BLOCKS)])

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, *args)
        return x


def wrapped(block: Callable[[], nn.Module] | None = None) -> Model:
    torch.manual_seed(0)
    model = Model(block)
    for module in model.blocks:
        checkpoint_wrapper(module)
    return model


def batch(rows: int) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows))


def train(model: nn.Module, rows: int, *args: Any) -> list[Tensor | None]:
    return step_results(lambda: model(batch(rows), *args), model.parameters())


def plain(model: nn.Module, rows: int, *args: Any) -> list[Tensor | None]:
    with memopt.disable_checkpointing():
        return train(model, rows, *args)


def row(buffers: memopt.CheckpointBuffers) -> Any:
    (found,) = buffers.stats()
    return found


def input_bytes(rows: int) -> int:
    return rows * WIDTH * 4


@contextmanager
def nothing_left() -> Iterator[None]:
    with collector_disabled():
        before = (*live_tensors_and_regions(), _C.live_handles())
        yield
        assert (*live_tensors_and_regions(), _C.live_handles()) == before


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_training_has_the_bits_of_the_plain_run(dropout: float) -> None:
    model = wrapped(lambda: mlp(WIDTH, dropout))
    expected = plain(model, 8)
    with memopt.checkpoint_buffers(model) as buffers, nothing_left():
        for _ in range(4):
            assert_same_bits(train(model, 8), expected)
    assert row(buffers).copies == 3 * BLOCKS


@pytest.mark.parametrize("rows", [4, 5])
def test_the_slab_has_exactly_what_is_needed_at_one_time(rows: int) -> None:
    """Each input rounded up to 512 bytes; the first step learns, the second has it."""
    model = wrapped()
    buffers = memopt.checkpoint_buffers(model)
    assert buffers.stats() == ()
    slab = BLOCKS * -(-input_bytes(rows) // 512) * 512
    for step in range(4):
        output = model(batch(rows))
        now = row(buffers)
        assert now.slab_bytes == now.in_use == (slab if step else 0)
        assert now.kept_bytes == (0 if step else BLOCKS * input_bytes(rows))
        output.sum().backward()
        now = row(buffers)
        assert (now.in_use, now.kept_bytes, now.steps) == (0, 0, step + 1)
    assert now.high_water == slab
    assert now.copied_bytes == 3 * BLOCKS * input_bytes(rows)
    assert (now.fallbacks, now.relearned, now.found_elsewhere_bytes) == (0, 0, 0)
    assert now.fragmented_bytes is None


def test_dtypes_share_the_slab() -> None:
    """One for each device: what others would add is at most 511 bytes an input."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, half: Tensor, index: Tensor) -> Tensor:
            return self.linear(x).tanh() * half.float() + index.double().sin().float()

    class Inner(Model):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for number, block in enumerate(self.blocks):
                half, index = (x.detach() * number).bfloat16(), (x.detach() * 9).int() + number
                x = block(x, half, index)
            return x

    torch.manual_seed(0)
    model = Inner(Block)
    for block in model.blocks:
        checkpoint_wrapper(block)
    expected = plain(model, 16)
    buffers = memopt.checkpoint_buffers(model)
    for _ in range(3):
        assert_same_bits(train(model, 16), expected)
    assert row(buffers).slab_bytes == BLOCKS * (2048 + 1024 + 2048)
    assert row(buffers).fallbacks == 0


def test_nothing_is_allocated_for_inputs_after_the_second_step() -> None:
    """By the allocator's own count: what forward leaves there until backward is less than one
    input, and the slab is not among what the step allocates.
    """
    rows = 64
    model = wrapped()
    x = batch(rows)

    def step() -> LiveBytes:
        with LiveBytes() as live:
            loss = model(x).sum()
            live.mark()
            loss.backward()
            del loss
        model.zero_grad()
        return live

    step()
    without = step().marks[0].nbytes
    assert without >= BLOCKS * input_bytes(rows)
    with memopt.checkpoint_buffers(model) as buffers:
        first, second, *later = (step() for _ in range(5))
        assert first.marks[0].nbytes >= BLOCKS * input_bytes(rows)
        assert second.most >= row(buffers).slab_bytes
        for live in later:
            assert live.marks[0].nbytes < input_bytes(rows)
            assert live.marks[0].nbytes == without - BLOCKS * input_bytes(rows)
            assert live.left <= sum(p.nbytes for p in model.parameters())


def test_other_batches_are_kept_and_learnt() -> None:
    model = wrapped()
    expected = {rows: plain(model, rows) for rows in (8, 16)}
    buffers = memopt.checkpoint_buffers(model)
    seen = []
    for rows in (8, 8, 16, 16, 8, 16):
        assert_same_bits(train(model, rows), expected[rows])
        seen.append((row(buffers).slab_bytes // input_bytes(8), row(buffers).relearned))
    assert seen == [(0, 0), (5, 0), (5, 0), (10, 1), (10, 1), (10, 1)]
    # Two of twice the size fit into five.
    assert row(buffers).fallbacks == BLOCKS - 2
    assert row(buffers).fallback_bytes == (BLOCKS - 2) * input_bytes(16)


def test_a_slab_that_is_too_large_for_long_is_made_smaller() -> None:
    model = wrapped()
    buffers = memopt.checkpoint_buffers(model)
    for rows in (16, 16, *[8] * 15, 16, *[4] * 15, 8):
        train(model, rows)
    assert row(buffers).slab_bytes == BLOCKS * input_bytes(16)  # never 16 in a row
    train(model, 8)
    assert row(buffers).slab_bytes == BLOCKS * input_bytes(8)
    assert (row(buffers).relearned, row(buffers).fallbacks) == (1, 0)


def test_evaluation_between_is_no_step() -> None:
    model = wrapped()
    buffers = memopt.checkpoint_buffers(model)
    for _ in range(3):
        train(model, 8)
        with torch.no_grad():
            model(batch(64))
    assert (row(buffers).steps, row(buffers).relearned, row(buffers).fallbacks) == (3, 0, 0)


def test_two_forwards_before_one_backward() -> None:
    model = wrapped()
    expected = plain(model, 8)
    buffers = memopt.checkpoint_buffers(model)
    train(model, 8)
    for step in range(3):
        outputs = [model(batch(8)) for _ in range(2)]
        losses = [out.double().square().mean() for out in outputs]
        for loss in losses if step % 2 else losses[::-1]:
            loss.backward()
        assert_same_bits(
            [p.grad for p in model.parameters()],
            [None if g is None else 2 * g for g in expected[1:]],
        )
        model.zero_grad()
    assert row(buffers).slab_bytes == 2 * BLOCKS * input_bytes(8)
    assert (row(buffers).relearned, row(buffers).fallbacks) == (1, BLOCKS)
    assert row(buffers).steps == 4


def test_another_order_and_other_regions() -> None:
    """Of inputs with other sizes: what finds no room between the others is kept."""
    sizes = [40, 8, 24, 64, 16]
    blocks = [checkpoint_wrapper(mlp(size)) for size in sizes]
    model = nn.ModuleList(blocks)
    buffers = memopt.checkpoint_buffers(model)
    generator = torch.Generator().manual_seed(0)

    def step() -> None:
        count = int(torch.randint(1, 6, (), generator=generator))
        order = torch.randperm(len(blocks), generator=generator)[:count]
        inputs = [torch.randn(30, sizes[i], requires_grad=True) for i in order]
        losses = [blocks[i](x * 1).square().sum() for i, x in zip(order, inputs, strict=True)]
        found = []
        for i in torch.randperm(len(losses), generator=generator):
            found.append((i, *torch.autograd.grad(losses[i], inputs[i])))
        with memopt.disable_checkpointing():
            for i, gradient in found:
                loss = blocks[order[i]](inputs[i]).square().sum()
                assert_same_bits([gradient], torch.autograd.grad(loss, inputs[i]))

    for _ in range(20):
        step()
    assert row(buffers).in_use == row(buffers).kept_bytes == 0
    assert row(buffers).copies > 0


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
    buffers = memopt.checkpoint_buffers(model)
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

    with memopt.disable_checkpointing():
        expected = derivatives()
    buffers = memopt.checkpoint_buffers(model)
    for _ in range(4):
        assert_same_bits(derivatives(), expected)
    assert row(buffers).in_use == 0
    assert row(buffers).fallbacks == 0


def test_writing_to_an_input_raises() -> None:
    model = wrapped()
    memopt.checkpoint_buffers(model)
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
    buffers = memopt.checkpoint_buffers(model)
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

    torch.manual_seed(0)
    model = Shares(Block)
    for block in model.blocks:
        checkpoint_wrapper(block)
    expected = plain(model, 8)
    buffers = memopt.checkpoint_buffers(model)
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
    buffers = memopt.checkpoint_buffers(block)
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
    buffers = memopt.checkpoint_buffers(model)
    for _ in range(3):
        assert_same_bits(train(model, 8, *others), expected)
    assert row(buffers).slab_bytes == BLOCKS * input_bytes(8)
    assert row(buffers).copies == 2 * BLOCKS
    assert (row(buffers).fallbacks, row(buffers).found_elsewhere_bytes) == (0, 0)


def test_what_is_held_by_others_until_backward_is_said() -> None:
    model = wrapped()
    buffers = memopt.checkpoint_buffers(model)
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

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in [*args, result]:
            if isinstance(tensor, Tensor):
                self.seen.append((tensor, tensor._version, tensor.detach().clone()))
        return result


def test_nothing_that_an_observer_keeps_is_written() -> None:
    model = wrapped()
    expected = plain(model, 8)
    memopt.checkpoint_buffers(model)
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
    buffers = memopt.checkpoint_buffers(model)
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
    buffers = memopt.checkpoint_buffers(model)
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
    buffers = memopt.checkpoint_buffers(model)
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
    memopt.apply_checkpointing(model)
    buffers = memopt.checkpoint_buffers(model)
    for _ in range(3):
        assert_same_bits(step_results(lambda: model(x), model.parameters()), expected)
    assert row(buffers).fallbacks == 0
    assert row(buffers).slab_bytes == 2 * x.nbytes  # the first layer's is held by the loop


def test_modules_that_offload_do_so() -> None:
    model = wrapped()
    checkpoint_wrapper(model.blocks[1], offload_to_cpu=True)
    expected = plain(model, 8)
    buffers = memopt.checkpoint_buffers(model)
    with taken_for_an_accelerator("cpu"):
        for _ in range(3):
            assert_same_bits(train(model, 8), expected)
    assert row(buffers).slab_bytes == (BLOCKS - 1) * input_bytes(8)


def test_threads() -> None:
    model = wrapped()
    x = [batch(8 + 4 * number) for number in range(3)]
    with memopt.disable_checkpointing():
        expected = [
            torch.autograd.grad(model(each).square().sum(), list(model.parameters())) for each in x
        ]
    buffers = memopt.checkpoint_buffers(model)
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(25):
            loss = model(x[number]).square().sum()
            found = torch.autograd.grad(loss, list(model.parameters()))
            if not all(map(torch.equal, found, expected[number])):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert row(buffers).copies > 0
    assert row(buffers).in_use == row(buffers).kept_bytes == 0


def test_a_loop_in_which_a_graph_is_always_alive() -> None:
    """No step ends by itself; one counts as ended when all has come and gone some times."""
    block = checkpoint_wrapper(nn.Tanh())
    buffers = memopt.checkpoint_buffers(block)
    before = block(torch.zeros(4, requires_grad=True) * 1)
    for _ in range(200):
        after = block(torch.zeros(4, requires_grad=True) * 1)
        before.sum().backward()
        before = after
    assert row(buffers).slab_bytes == 2 * 512
    assert row(buffers).copies > 100
    assert row(buffers).steps == 3


def test_copies_of_the_model_have_no_buffers() -> None:
    model = wrapped(nn.Tanh)
    buffers = memopt.checkpoint_buffers(model)
    expected = train(model, 8)
    train(model, 8)
    before = row(buffers)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same_bits(train(twin, 8), expected)
        assert row(buffers) == before
        with memopt.checkpoint_buffers(twin) as own:
            assert_same_bits(train(twin, 8), expected)
            assert row(own).steps == 1
    assert list(model.state_dict()) == list(Model(nn.Tanh).state_dict())
    assert_same_bits(train(model, 8), expected)
    assert row(buffers).copies == before.copies + BLOCKS


@pytest.mark.parametrize("graph_lives", [False, True])
def test_remove_gives_the_memory_back(graph_lives: bool) -> None:
    rows = 64
    model = wrapped()
    expected = plain(model, rows)
    with LiveBytes() as live:
        buffers = memopt.checkpoint_buffers(model)
        train(model, rows)
        train(model, rows)
        assert row(buffers).slab_bytes == BLOCKS * input_bytes(rows)
        loss = model(batch(rows)).double().square().mean() if graph_lives else None
        live.mark()
        buffers.remove()
        live.mark()
        if loss is not None:
            loss.backward()
            assert_same_bits([p.grad for p in model.parameters()], expected[1:])
            model.zero_grad()
        del loss
        live.mark()
    with_slab, removed, ended = (mark.nbytes for mark in live.marks)
    assert with_slab - (removed if not graph_lives else ended) >= BLOCKS * input_bytes(rows)
    if graph_lives:
        assert removed == with_slab
    copies = row(buffers).copies
    assert_same_bits(train(model, rows), expected)
    assert row(buffers).copies == copies
    buffers.remove()


def test_unwrap_takes_the_buffers_off() -> None:
    model = wrapped()
    buffers = memopt.checkpoint_buffers(model)
    for _ in range(2):
        train(model, 8)
    unwrap(model)
    before = row(buffers)
    train(model, 8)
    assert row(buffers) == before
    assert not any("memopt" in name for module in model.modules() for name in module.__dict__)
    for block in model.blocks:
        checkpoint_wrapper(block)
    memopt.checkpoint_buffers(model).remove()


@pytest.mark.parametrize("sample", ["tensor", "tuple", "mapping"])
def test_a_sample_sizes_the_slab_at_once(sample: str) -> None:
    model = wrapped(lambda: mlp(WIDTH, dropout=0.1))
    expected = plain(model, 8)
    x = batch(8)
    made = {"tensor": x, "tuple": (x,), "mapping": {"x": x}}[sample]
    model.first.weight.grad = torch.ones_like(model.first.weight)
    state = torch.get_rng_state()
    buffers = memopt.checkpoint_buffers(model, made)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(model.first.weight.grad, torch.ones_like(model.first.weight))
    assert row(buffers).slab_bytes == BLOCKS * input_bytes(8)
    model.zero_grad()
    for _ in range(2):
        assert_same_bits(train(model, 8), expected)
    assert (row(buffers).copies, row(buffers).fallbacks) == (2 * BLOCKS, 0)


def test_a_plan_sizes_the_slab_at_once() -> None:
    torch.manual_seed(0)
    model = Model()
    plan = memopt.plan(model, batch(8), budget="1GB", loss=torch.sum, measure=False)
    with pytest.raises(ValueError, match="must have modules that are wrapped"):
        memopt.checkpoint_buffers(model, plan)
    for block in model.blocks:
        checkpoint_wrapper(block)
    buffers = memopt.checkpoint_buffers(model, plan)
    assert row(buffers).slab_bytes == BLOCKS * input_bytes(8)
    assert all(p.grad is None for p in model.parameters())


def test_a_sample_that_does_not_run_leaves_the_model_as_it_was() -> None:
    model = wrapped()
    with pytest.raises(RuntimeError):
        memopt.checkpoint_buffers(model, torch.randn(3, WIDTH + 1))
    memopt.checkpoint_buffers(model).remove()


def test_bad_input() -> None:
    with pytest.raises(TypeError, match=r"checkpoint_buffers: model must be an nn\.Module, got int"):
        memopt.checkpoint_buffers(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must have modules that are wrapped.*got Linear"):
        memopt.checkpoint_buffers(nn.Linear(2, 2))
    model = wrapped()
    with memopt.checkpoint_buffers(model):
        with pytest.raises(ValueError, match="must not have buffers already"):
            memopt.checkpoint_buffers(model)
    memopt.checkpoint_buffers(model).remove()
