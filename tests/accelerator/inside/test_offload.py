"""memopt.offload on the simulated accelerator: streams of its own, events, pinned memory and
prefetching give the bits of the plain run however late the device is, with pinned memory that is
poisoned as soon as it is freed; what leaves is given back to the device; a steady state allocates
nothing; and each error that a stream engine can have shows here.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt._offload.stats import PlaceStats
from tests.accelerator import sim
from tests.support.bits import assert_same_bits

from .gpt import GPT, train

WIDTH, ROWS, LAYERS = 32, 64, 6
SAVED = WIDTH * ROWS * 4


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    memopt.offload.empty_cache()
    memopt.offload.stats(reset=True)
    yield
    memopt.offload.configure()


def stack(device: str = "sim") -> nn.Sequential:
    """A layer saves one tensor of SAVED bytes: what tanh gives, which the next linear reads."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
    return nn.Sequential(*layers).to(device)


def inputs(device: str = "sim") -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).to(device)


def everything(keep_last: int = 0) -> AbstractContextManager[None]:
    return memopt.offload(min_bytes=1, keep_last=keep_last)


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


def cpu(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.cpu() for tensor in tensors]


def reference() -> list[Tensor]:
    model = stack()
    return cpu(gradients(model, model(inputs() * 1).square().sum()))


def assert_bits(actual: list[Tensor], expected: list[Tensor]) -> None:
    for a, e in zip(cpu(actual), expected, strict=True):
        assert torch.equal(a, e)


def place() -> PlaceStats:
    (used,) = [p for p in memopt.offload.stats(wait=True).places if p.out.copies]
    return used


@pytest.mark.parametrize("to", ["cpu", "disk"])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_training_has_the_bits_of_the_plain_run(
    p: float, to: Literal["cpu", "disk"], tmp_path: Path
) -> None:
    recorded = sim.memory().recorded

    def around() -> AbstractContextManager[None]:
        directory = tmp_path if to == "disk" else None
        return memopt.offload(to, directory=directory, min_bytes=1)

    assert_same_bits(train("sim", around=around, p=p, steps=3), train("sim", p=p, steps=3))
    assert place().out.copies > 0
    assert sim.memory().recorded == recorded
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("seed", range(3))
def test_whatever_the_delays(seed: int) -> None:
    sim.pinning(strict=True)
    sim.random_delays(1e-3, seed)
    model = stack()
    expected = reference()
    for _ in range(3):
        with everything(keep_last=seed):
            loss = model(inputs() * 1).square().sum()
        assert_bits(gradients(model, loss), expected)


@pytest.mark.parametrize("late", ["forward", "backward", "both"])
def test_a_host_that_runs_far_ahead(late: str) -> None:
    """The device has not begun when the host is done: only waits between streams order anything."""
    sim.pinning(strict=True)
    expected = reference()
    model, x = stack(), inputs()
    memopt.offload.configure(copies_in_flight=2)
    with sim.paused() if late == "both" else nullcontext():
        with sim.paused() if late == "forward" else nullcontext(), everything():
            loss = model(x * 1).square().sum()
        with sim.paused() if late == "backward" else nullcontext():
            found = gradients(model, loss)
            del loss
    gc.collect()
    assert_bits(found, expected)


def test_memory_is_given_back_and_a_steady_state_allocates_nothing() -> None:
    sim.pinning(strict=True)
    memopt.offload.configure(copies_in_flight=2)
    model, x = stack(), inputs()
    context = everything()
    reservations, pinned, rooms = [], [], []
    for _ in range(8):
        before = sim.memory().allocated
        with context:
            loss = model(x * 1).square().sum()
        memopt.offload.stats(wait=True)
        # Of LAYERS + 1 tensors none is left but the loss and what is smaller.
        assert sim.memory().allocated - before < SAVED
        loss.backward()
        model.zero_grad()
        del loss
        reservations.append(sim.memory().reservations)
        pinned.append(sim.pinned().reservations)
        rooms.append(place().room_high_water)
    assert len(set(reservations[2:])) == 1
    assert len(set(pinned[1:])) == 1
    assert set(rooms) == {place().out.bytes // 8}


def test_what_leaves_never_takes_more_than_the_bound() -> None:
    memopt.offload.configure(copies_in_flight=2)
    sim.delay(sim.Kind.DEVICE_TO_HOST, 2e-3)
    model, x = stack(), inputs()
    before = sim.memory().allocated
    sim.reset_peak()
    with everything():
        loss = model(x * 1).square().sum()
    torch.accelerator.synchronize()
    # Two that leave, one that is being made, its input and the linear's result, and small things;
    # LAYERS + 3 if all could leave at once.
    assert sim.memory().peak - before < 6 * SAVED
    assert place().out.most_in_flight <= 2
    assert_bits(gradients(model, loss), reference())
    assert place().back.most_in_flight <= 2


def test_the_stream_is_asked_for_at_each_call() -> None:
    """Forward on one side stream, backward in another thread: nothing remembers a stream."""
    expected = reference()
    model, x = stack(), inputs()
    torch.accelerator.synchronize()
    found: list[Tensor] = []
    for _ in range(2):
        stream = torch.Stream("sim")
        with stream:
            sim.delay(sim.Kind.KERNEL, 1e-3, stream)
            with everything():
                loss = model(x * 1).square().sum()
        worker = threading.Thread(target=lambda loss=loss: found.extend(gradients(model, loss)))
        worker.start()
        worker.join()
        torch.accelerator.synchronize()
        assert_bits(found, expected)
        found.clear()
        del loss


def test_two_devices_have_an_engine_each() -> None:
    expected = reference()
    models = [stack(f"sim:{k}") for k in range(2)]
    losses = []
    for k, model in enumerate(models):
        with everything():  # device 0 is current
            losses.append(model(inputs(f"sim:{k}") * 1).square().sum())
    for k in (0, 1):
        assert_bits(gradients(models[k], losses[k]), expected)
    assert {p.device for p in memopt.offload.stats().places if p.out.copies} == {"sim:0", "sim:1"}


def warnings_of_two_steps() -> list[str]:
    """That offload everything, and have the bits of the plain run."""
    model = stack()
    expected = reference()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with everything():
                loss = model(inputs() * 1).square().sum()
            assert_bits(gradients(model, loss), expected)
    return [str(warning.message) for warning in caught]


def test_a_pool_that_cannot_be_pinned_is_ordinary_memory() -> None:
    sim.pinning(works=False)
    assert sum("cannot be pinned" in text for text in warnings_of_two_steps()) == 1
    assert place().room_pageable > 0
    assert any("could not be pinned" in text for text in memopt.offload.stats().advice)


def test_a_pool_that_is_full_keeps_tensors_on_the_device() -> None:
    memopt.offload.configure(max_host_bytes=2 * SAVED)
    texts = warnings_of_two_steps()
    assert sum("pool of host memory has no space" in text for text in texts) == 1
    assert place().room_high_water <= 2 * SAVED
    assert place().refused_bytes > 0


def test_no_memory_for_what_comes_back_raises_and_the_graph_is_usable() -> None:
    model = stack()
    expected = reference()
    with everything():
        loss = model(inputs() * 1).square().sum()
    memopt.offload.stats(wait=True)
    sim.capacity(sim.memory().allocated + 1024)
    with pytest.raises(torch.OutOfMemoryError):
        torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    sim.capacity(1 << 36)
    assert_bits(gradients(model, loss), expected)


def test_inference_tensors_never_come_back() -> None:
    """Though the model ran in inference mode first: what comes back can be saved again."""
    model = stack()
    with torch.inference_mode():
        model(inputs())
    with everything():
        loss = model(inputs() * 1).square().sum()
    found = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    assert not any(tensor.is_inference() for tensor in found)
    total = torch.stack([grad.square().sum() for grad in found]).sum()
    total.backward()


def test_an_aborted_step_gives_everything_back() -> None:
    model, x = stack(), inputs()
    torch.accelerator.synchronize()
    gc.collect()
    before = sim.memory().allocated
    for _ in range(3):
        with contextlib.suppress(ValueError), everything():
            loss = model(x * 1).square().sum()
            raise ValueError("planted")
        del loss
    now = place()
    assert (now.bytes_away, now.bytes_held, now.room_in_use) == (0, 0, 0)
    assert sim.memory().allocated == before


def test_no_new_stream_per_step() -> None:
    """Copies run on two streams, the same in each step."""
    model, x = stack(), inputs()
    streams: list[set[int]] = []
    for _ in range(4):
        with sim.trace() as ran:
            with everything():
                loss = model(x * 1).square().sum()
            gradients(model, loss)
            torch.accelerator.synchronize()
        copies = (sim.Kind.DEVICE_TO_HOST, sim.Kind.HOST_TO_DEVICE)
        streams.append({task.stream for task in ran if task.kind in copies})
    assert len(streams[0]) == 2
    assert all(used == streams[0] for used in streams)


def test_regions_of_a_model_prefetch_each_other() -> None:
    model = GPT().to("sim")
    for block in model.blocks:
        memopt.checkpoint_wrapper(block, offload_to_cpu=True)
    tokens = torch.zeros(3, 12, dtype=torch.long, device="sim")
    for _ in range(2):
        loss = model(tokens).square().sum()
        memopt.offload.stats(wait=True)
        loss.backward()
        del loss
    assert place().prefetch_hits >= 2
