"""Proves memopt.checkpoint.buffers: the bits of the plain run; a slab of exactly the bytes that are
needed at one time, allocated once, and no allocation of a region's input that lives from forward to
backward; what differs from step to step is kept and learnt; threads; samples and plans; copies of a
model have no buffers, and remove() gives the memory back.
"""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt._checkpoint import checkpoint_wrapper, unwrap
from memopt.memory.allocator import LiveBytes
from tests.checkpoint.buffers import (
    BLOCKS,
    WIDTH,
    Model,
    batch,
    input_bytes,
    nothing_left,
    plain,
    row,
    train,
    wrapped,
)
from tests.checkpoint.support import mlp
from tests.support.bits import assert_same_bits


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_training_has_the_bits_of_the_plain_run(dropout: float) -> None:
    model = wrapped(lambda: mlp(WIDTH, dropout))
    expected = plain(model, 8)
    with memopt.checkpoint.buffers(model) as buffers, nothing_left():
        for _ in range(4):
            assert_same_bits(train(model, 8), expected)
    assert row(buffers).copies == 3 * BLOCKS


@pytest.mark.parametrize("rows", [4, 5])
def test_the_slab_has_exactly_what_is_needed_at_one_time(rows: int) -> None:
    """Each input rounded up to 512 bytes; the first step learns, the second has it."""
    model = wrapped()
    buffers = memopt.checkpoint.buffers(model)
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

    model = wrapped(Block, Inner)
    expected = plain(model, 16)
    buffers = memopt.checkpoint.buffers(model)
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
    with memopt.checkpoint.buffers(model) as buffers:
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
    buffers = memopt.checkpoint.buffers(model)
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
    buffers = memopt.checkpoint.buffers(model)
    for rows in (16, 16, *[8] * 15, 16, *[4] * 15, 8):
        train(model, rows)
    assert row(buffers).slab_bytes == BLOCKS * input_bytes(16)  # never 16 in a row
    train(model, 8)
    assert row(buffers).slab_bytes == BLOCKS * input_bytes(8)
    assert (row(buffers).relearned, row(buffers).fallbacks) == (1, 0)


def test_evaluation_between_is_no_step() -> None:
    model = wrapped()
    buffers = memopt.checkpoint.buffers(model)
    for _ in range(3):
        train(model, 8)
        with torch.no_grad():
            model(batch(64))
    assert (row(buffers).steps, row(buffers).relearned, row(buffers).fallbacks) == (3, 0, 0)


def test_two_forwards_before_one_backward() -> None:
    model = wrapped()
    expected = plain(model, 8)
    buffers = memopt.checkpoint.buffers(model)
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
    buffers = memopt.checkpoint.buffers(model)
    generator = torch.Generator().manual_seed(0)

    def step() -> None:
        count = int(torch.randint(1, 6, (), generator=generator))
        order = torch.randperm(len(blocks), generator=generator)[:count]
        inputs = [torch.randn(30, sizes[i], requires_grad=True) for i in order]
        losses = [blocks[i](x * 1).square().sum() for i, x in zip(order, inputs, strict=True)]
        found = []
        for i in torch.randperm(len(losses), generator=generator):
            found.append((i, *torch.autograd.grad(losses[i], inputs[i])))
        with memopt.checkpoint.disable():
            for i, gradient in found:
                loss = blocks[order[i]](inputs[i]).square().sum()
                assert_same_bits([gradient], torch.autograd.grad(loss, inputs[i]))

    for _ in range(20):
        step()
    assert row(buffers).in_use == row(buffers).kept_bytes == 0
    assert row(buffers).copies > 0


def test_threads() -> None:
    model = wrapped()
    x = [batch(8 + 4 * number) for number in range(3)]
    with memopt.checkpoint.disable():
        expected = [
            torch.autograd.grad(model(each).square().sum(), list(model.parameters())) for each in x
        ]
    buffers = memopt.checkpoint.buffers(model)
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
    buffers = memopt.checkpoint.buffers(block)
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
    buffers = memopt.checkpoint.buffers(model)
    expected = train(model, 8)
    train(model, 8)
    before = row(buffers)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same_bits(train(twin, 8), expected)
        assert row(buffers) == before
        with memopt.checkpoint.buffers(twin) as own:
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
        buffers = memopt.checkpoint.buffers(model)
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
    buffers = memopt.checkpoint.buffers(model)
    for _ in range(2):
        train(model, 8)
    unwrap(model)
    before = row(buffers)
    train(model, 8)
    assert row(buffers) == before
    assert not any("memopt" in name for module in model.modules() for name in module.__dict__)
    for block in model.blocks:
        checkpoint_wrapper(block)
    memopt.checkpoint.buffers(model).remove()


@pytest.mark.parametrize("sample", ["tensor", "tuple", "mapping"])
def test_a_sample_sizes_the_slab_at_once(sample: str) -> None:
    model = wrapped(lambda: mlp(WIDTH, dropout=0.1))
    expected = plain(model, 8)
    x = batch(8)
    made = {"tensor": x, "tuple": (x,), "mapping": {"x": x}}[sample]
    model.first.weight.grad = torch.ones_like(model.first.weight)
    state = torch.get_rng_state()
    buffers = memopt.checkpoint.buffers(model, made)
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
        memopt.checkpoint.buffers(model, plan)
    for block in model.blocks:
        checkpoint_wrapper(block)
    buffers = memopt.checkpoint.buffers(model, plan)
    assert row(buffers).slab_bytes == BLOCKS * input_bytes(8)
    assert all(p.grad is None for p in model.parameters())


def test_a_sample_that_does_not_run_leaves_the_model_as_it_was() -> None:
    model = wrapped()
    with pytest.raises(RuntimeError):
        memopt.checkpoint.buffers(model, torch.randn(3, WIDTH + 1))
    memopt.checkpoint.buffers(model).remove()


def test_bad_input() -> None:
    with pytest.raises(
        TypeError, match=r"checkpoint.buffers: model must be an nn\.Module, got int"
    ):
        memopt.checkpoint.buffers(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"must have modules that are wrapped.*got Linear"):
        memopt.checkpoint.buffers(nn.Linear(2, 2))
    model = wrapped()
    with (
        memopt.checkpoint.buffers(model),
        pytest.raises(ValueError, match="must not have buffers already"),
    ):
        memopt.checkpoint.buffers(model)
    memopt.checkpoint.buffers(model).remove()
