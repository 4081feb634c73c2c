"""memopt.checkpoint.buffers on the simulated accelerator: the bits of the plain run however late
the device is, on one stream and on several; no allocation of inputs after the second step; memory
goes back to the device when nothing reads it any more; no record_stream.
"""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn

import memopt
from tests.accelerator import sim
from tests.support.bits import assert_same_bits

from .gpt import GPT, train

WIDTH, ROWS, BLOCKS = 32, 64, 5
INPUT = WIDTH * ROWS * 4


def _wrap(model: GPT) -> None:
    for block in model.blocks:
        memopt.checkpoint_wrapper(block)
    memopt.checkpoint.buffers(model)


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS)]
    return nn.Sequential(*blocks).to("sim")


def wrapped() -> nn.Sequential:
    model = stack()
    for block in model:
        memopt.checkpoint_wrapper(block)
    return model


def inputs(seed: int = 1) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)).to("sim")


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(model(x * 1).square().sum(), list(model.parameters())))


def cpu(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.cpu() for tensor in tensors]


def assert_bits(actual: list[Tensor], expected: list[Tensor]) -> None:
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a, e)


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_training_has_the_bits_of_the_plain_run(p: float) -> None:
    recorded = sim.memory().recorded
    assert_same_bits(train("sim", _wrap, p=p, steps=4), train("sim", p=p, steps=4))
    assert sim.memory().recorded == recorded


@pytest.mark.parametrize("seed", range(2))
def test_whatever_the_delays(seed: int) -> None:
    expected = train("sim", p=0.3, steps=3)
    sim.random_delays(1e-3, seed)
    assert_same_bits(train("sim", _wrap, p=0.3, steps=3), expected)


def test_a_host_that_runs_far_ahead() -> None:
    """Three steps are queued before the device begins: ranges are written again while earlier
    readers have not run.
    """
    expected = [cpu(gradients(stack(), inputs(seed))) for seed in range(4)]
    model = wrapped()
    memopt.checkpoint.buffers(model, inputs())
    xs = [inputs(seed) for seed in range(4)]
    with sim.paused():
        found = [gradients(model, x) for x in xs]
    for actual, wanted in zip(found, expected, strict=True):
        assert_bits(cpu(actual), wanted)


def take_turns(model: nn.Module, side_stream: torch.Stream) -> list[list[Tensor]]:
    """Three times, one stream is late with a backward that the host has queued, while the other one
    is given a whole step.
    """
    main = torch.accelerator.current_stream()
    xs = [inputs(seed) for seed in range(6)]
    torch.accelerator.synchronize()
    found: list[list[Tensor]] = []
    for late, other in ((main, side_stream), (side_stream, main), (main, side_stream)):
        with late:
            loss = model(xs[len(found)] * 1).square().sum()
        torch.accelerator.synchronize()
        with sim.paused(late):
            with late:
                found.append(list(torch.autograd.grad(loss, list(model.parameters()))))
                del loss
            with other:
                found.append(gradients(model, xs[len(found)]))
        torch.accelerator.synchronize()
    return [cpu(each) for each in found]


def test_streams_that_take_turns(side_stream: torch.Stream) -> None:
    """What one stream still reads, the other one does not write."""
    model = wrapped()
    buffers = memopt.checkpoint.buffers(model, inputs())
    for actual, wanted in zip(
        take_turns(model, side_stream), take_turns(stack(), side_stream), strict=True
    ):
        assert_bits(actual, wanted)
    assert buffers.stats()[0].fallbacks == 0


def test_streams_that_do_not_wait_show_there(side_stream: torch.Stream) -> None:
    """And it is the slab that needs the waits: the plain model does without."""
    expected = take_turns(stack(), side_stream)
    model = wrapped()
    memopt.checkpoint.buffers(model, inputs())
    sim.plant(sim.Fault.WAITS_ARE_IGNORED)
    plain, found = take_turns(stack(), side_stream), take_turns(model, side_stream)
    for actual, wanted in zip(plain, expected, strict=True):
        assert_bits(actual, wanted)
    assert not all(
        torch.equal(a, e)
        for f, x in zip(found, expected, strict=True)
        for a, e in zip(f, x, strict=True)
    )


def test_a_steady_state_allocates_nothing_for_inputs() -> None:
    model, x = wrapped(), inputs()
    gc.collect()
    before = sim.memory().allocated
    buffers = memopt.checkpoint.buffers(model)
    held, reservations = [], []
    for _ in range(6):
        start = sim.memory().allocated
        loss = model(x * 1).square().sum()
        held.append(sim.memory().allocated - start)
        loss.backward()
        model.zero_grad()
        del loss
        reservations.append(sim.memory().reservations)
    (row,) = buffers.stats()
    assert row.slab_bytes == row.high_water == BLOCKS * INPUT
    reserved, allocated = torch.accelerator.memory_reserved(), torch.accelerator.memory_allocated()
    assert row.fragmented_bytes == reserved - allocated
    assert held[0] >= BLOCKS * INPUT
    assert held[1] >= row.slab_bytes
    # The loss, and what belongs to it.
    assert max(held[2:]) < INPUT + INPUT // 2
    assert len(set(reservations[2:])) == 1
    buffers.remove()
    gc.collect()
    assert sim.memory().allocated == before


def test_memory_that_is_not_there_is_said_once() -> None:
    model, x = wrapped(), inputs()
    expected = cpu(gradients(stack(), x))
    buffers = memopt.checkpoint.buffers(model)
    assert_bits(cpu(gradients(model, x)), expected)
    sim.capacity(sim.memory().allocated + 4 * INPUT)
    with pytest.warns(UserWarning, match="checkpoint.buffers: sim:0 has no space for one piece"):
        loss = model[0](x * 1)
    sim.capacity(1 << 36)
    for _ in range(2):
        assert_bits(cpu(gradients(model, x)), expected)
    del loss
    (row,) = buffers.stats()
    assert (row.slab_bytes, row.copies) == (0, 0)


def test_two_devices_have_a_slab_each() -> None:
    blocks = [memopt.checkpoint_wrapper(nn.Tanh()) for _ in range(2)]
    model = nn.ModuleList(blocks)
    buffers = memopt.checkpoint.buffers(model)
    for _ in range(3):
        x = [torch.ones(ROWS, device=f"sim:{k}", requires_grad=True) for k in range(2)]
        for block, leaf in zip(blocks, x, strict=True):
            block(leaf * 1).sum().backward()
    assert {row.device for row in buffers.stats()} == {"sim:0", "sim:1"}
    assert all((row.slab_bytes, row.copies) == (512, 2) for row in buffers.stats())
