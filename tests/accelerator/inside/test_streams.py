"""What is not ordered goes wrong here, every time: streams, events, host memory, freed memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from tests.accelerator import sim


def _device() -> torch.Stream:
    return torch.accelerator.current_stream()


@pytest.mark.parametrize("touch", ["read", "write"])
def test_host_touch_is_a_fault(touch: str, child_environment: dict[str, str]) -> None:
    program = f"""
import ctypes
from tests.accelerator import sim
import torch
sim.load()
x = torch.zeros(4, device="sim")
torch.accelerator.synchronize()
cells = (ctypes.c_float * 4).from_address(x.data_ptr())
print("reached", flush=True)
{"cells[0] = 1" if touch == "write" else "print(cells[0])"}
"""
    command = [sys.executable, "-c", program]
    ran = subprocess.run(command, env=child_environment, capture_output=True, text=True)
    assert ran.stdout == "reached\n"
    assert ran.returncode < 0
    assert "Segmentation fault" in ran.stderr


def _sum_on(stream: torch.Stream, wait: bool) -> torch.Tensor:
    """Of a tensor that the current stream, paused, has yet to write."""
    with sim.paused():
        x = torch.full((1000,), 2.0, device="sim")
        if wait:
            stream.wait_event(_device().record_event())
        with stream:
            total = x.sum()
        if not wait:
            stream.synchronize()
    stream.synchronize()
    return total.cpu()


def test_missing_wait_gives_wrong_bits(side_stream: torch.Stream) -> None:
    assert _sum_on(side_stream, wait=False).isnan()


def test_wait_gives_right_bits(side_stream: torch.Stream) -> None:
    assert _sum_on(side_stream, wait=True) == 2000


@pytest.mark.parametrize("seed", range(3))
def test_waits_hold_under_random_delays(side_stream: torch.Stream, seed: int) -> None:
    sim.random_delays(2e-3, seed)
    x = torch.ones(100, device="sim")
    for _ in range(5):
        side_stream.wait_stream(_device())
        with side_stream:
            y = x * 2
        _device().wait_stream(side_stream)
        x = y + 1
    assert torch.equal(x.cpu(), torch.full((100,), 63.0))


def test_freed_source_of_a_copy_is_poison(side_stream: torch.Stream) -> None:
    """Freed while another stream has yet to read it."""
    host = torch.empty(8, pin_memory=True)
    x = torch.ones(8, device="sim")
    with sim.paused(side_stream):
        side_stream.wait_stream(_device())
        with side_stream:
            host.copy_(x, non_blocking=True)
        del x
        _device().synchronize()  # the poison is written
    side_stream.synchronize()
    assert host.isnan().all()


def test_held_source_of_a_copy_arrives(side_stream: torch.Stream) -> None:
    host = torch.empty(8, pin_memory=True)
    x = torch.ones(8, device="sim")
    with sim.paused(side_stream):
        side_stream.wait_stream(_device())
        with side_stream:
            host.copy_(x, non_blocking=True)
        _device().synchronize()
    side_stream.synchronize()
    assert host.eq(1).all()


def test_reads_queued_before_the_free_are_fine() -> None:
    x = torch.ones(8, device="sim")
    with sim.paused():
        y = x * 3
        del x
    assert y.cpu().eq(3).all()


def test_freed_block_serves_the_next_allocation_of_its_stream(side_stream: torch.Stream) -> None:
    x = torch.ones(1000, device="sim")
    address = x.data_ptr()
    del x
    with side_stream:
        assert torch.empty(1000, device="sim").data_ptr() != address
    before = sim.memory()
    x = torch.empty(1000, device="sim")
    assert x.data_ptr() == address
    assert sim.memory().reservations == before.reservations
    assert x.cpu().isnan().all()


def test_record_stream_keeps_memory_and_is_counted(side_stream: torch.Stream) -> None:
    x = torch.ones(8, device="sim")
    address = x.data_ptr()
    before = sim.memory().recorded
    side_stream.wait_stream(_device())
    with sim.paused(side_stream):
        with side_stream:
            y = x * 3
        x.record_stream(side_stream)
        del x
        assert torch.empty(8, device="sim").data_ptr() != address
        _device().synchronize()
    assert sim.memory().recorded == before + 1
    side_stream.synchronize()
    assert y.cpu().eq(3).all()
    assert torch.empty(8, device="sim").data_ptr() == address


def test_event_waiters_wait_for_the_version_of_their_time(side_stream: torch.Stream) -> None:
    third = torch.Stream(device="sim:0")
    event = side_stream.record_event()
    event.synchronize()
    with sim.paused(side_stream):
        first = event
        _device().wait_event(first)  # the version that is reached
        event.record(side_stream)
        assert not event.query()
        third.wait_event(event)  # the version that is not
        _device().synchronize()
        assert not third.query()
    third.synchronize()
    assert event.query()


def test_event_that_was_never_recorded_is_reached(side_stream: torch.Stream) -> None:
    event = torch.Event(device="sim:0")
    assert event.query()
    side_stream.wait_event(event)
    side_stream.synchronize()


def test_elapsed_time_is_that_of_the_work_between(side_stream: torch.Stream) -> None:
    sim.delay(sim.Kind.DEVICE_TO_HOST, 0.02, side_stream)
    host = torch.empty(8, pin_memory=True)
    x = torch.ones(8, device="sim")
    with side_stream:
        begin, end = (torch.Event(device="sim:0", enable_timing=True) for _ in range(2))
        begin.record(side_stream)
        host.copy_(x, non_blocking=True)
        end.record(side_stream)
        end.synchronize()
    assert begin.elapsed_time(end) >= 20


def test_elapsed_time_needs_timing() -> None:
    begin, end = (torch.Event(device="sim:0") for _ in range(2))
    for event in (begin, end):
        event.record()
        event.synchronize()
    with pytest.raises(ValueError, match="timing"):
        begin.elapsed_time(end)


def test_copies_to_pinned_memory_are_asynchronous_and_others_are_not() -> None:
    x = torch.ones(8, device="sim")
    host = torch.zeros(8, pin_memory=True)
    torch.accelerator.synchronize()
    with sim.paused():
        host.copy_(x, non_blocking=True)
        assert host.eq(0).all()
        sim.host_patience(0.05)
        with pytest.raises(RuntimeError, match="paused"):
            torch.zeros(8).copy_(x, non_blocking=True)
        sim.host_patience(60)
    torch.accelerator.synchronize()
    assert host.eq(1).all()


def _load_from_freed_buffer() -> torch.Tensor:
    host = torch.ones(8, pin_memory=True)
    with sim.paused():
        x = host.to("sim", non_blocking=True)
        del host
        torch.empty(8, pin_memory=True)
    return x.cpu()


def test_freed_pinned_buffer_waits_for_its_copies() -> None:
    assert _load_from_freed_buffer().eq(1).all()


def test_strict_pinned_buffer_does_not() -> None:
    sim.pinning(strict=True)
    assert _load_from_freed_buffer().isnan().all()


def test_pinning_can_fail() -> None:
    sim.pinning(works=False)
    with pytest.raises(RuntimeError, match="pinning host memory fails"):
        torch.empty(8, pin_memory=True)
    sim.pinning()
    assert torch.empty(8, pin_memory=True).is_pinned()


def test_memory_can_run_out() -> None:
    sim.capacity(sim.memory().allocated + 1024)
    torch.empty(256, device="sim")
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        torch.empty(257, device="sim")


def test_bytes_are_counted() -> None:
    before = sim.memory()
    sim.reset_peak()
    x = torch.empty(1024, device="sim")
    del x
    assert sim.memory().allocated == before.allocated
    assert sim.memory().peak == before.allocated + 4096
    assert torch.accelerator.max_memory_allocated() == before.allocated + 4096


def _fails(x: torch.Tensor) -> None:
    torch.nn.functional.embedding(torch.full((2,), 10, device="sim"), x)


@pytest.mark.parametrize("hears", [torch.accelerator.synchronize, lambda: torch.ones(2).to("sim")])
def test_task_that_fails_is_heard_of_later(hears: Callable[[], object]) -> None:
    x = torch.ones(3, 2, device="sim")
    with sim.paused():
        _fails(x)
    with pytest.raises(RuntimeError, match=r"a task on the device failed: .*index"):
        hears()
    torch.accelerator.synchronize()


def test_trace_says_where_tasks_ran(side_stream: torch.Stream) -> None:
    x = torch.ones(8, device="sim")
    torch.accelerator.synchronize()
    with sim.trace() as ran:
        with side_stream:
            x.cpu()
        side_stream.synchronize()
    copies = [task for task in ran if task.kind == sim.Kind.DEVICE_TO_HOST]
    assert [task.stream for task in copies] == [side_stream.stream_id]


def test_two_devices() -> None:
    x = torch.ones(4, device="sim:1")
    with torch.sim.device(1):
        assert torch.empty(2, device="sim").device == torch.device("sim:1")
        assert torch.accelerator.current_stream().device_index == 1
    assert torch.empty(2, device="sim").device == torch.device("sim:0")
    y = x * 2  # on device 1's stream, whichever device is current
    assert y.device == torch.device("sim:1")
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(4, device="sim:0")
    assert y.to("sim:0").add(1).cpu().eq(3).all()


def test_copies_between_devices_are_ordered() -> None:
    here, there = (torch.accelerator.current_stream(k) for k in range(2))
    with sim.paused(here):
        x = torch.full((8,), 5.0, device="sim:0")
        y = x.to("sim:1")
        z = y + 1
        assert not there.query()
    assert z.cpu().eq(6).all()


def test_streams_have_ids_and_handles() -> None:
    streams = [torch.Stream(device="sim:0", priority=p) for p in (0, -1)]
    assert len({s.stream_id for s in streams} | {_device().stream_id}) == 3
    assert len({s.native_handle for s in streams} | {0}) == 3


def test_the_host_moves_on_while_kernels_wait() -> None:
    """No operator of a training step waits for its stream."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 3))
    model.to("sim")
    optimizer = torch.optim.AdamW(model.parameters())
    x, target = torch.randn(5, 4, device="sim"), torch.zeros(5, dtype=torch.long, device="sim")
    torch.accelerator.synchronize()
    waits = sim.synchronised_calls()
    with sim.paused():
        torch.nn.functional.cross_entropy(model(x), target).backward()
        optimizer.step()
    assert sim.synchronised_calls() == waits
    torch.accelerator.synchronize()
    assert all(p.isfinite().all() for p in model.parameters())
