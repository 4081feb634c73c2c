"""Offloading on streams: the races that others had do not occur, and a fault that is planted below
the engine shows in the bits. (The list: tests/offload/test_races.py.)
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import memopt
from tests.accelerator import sim

WIDTH, ROWS, LAYERS = 32, 24, 6


def _stack() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
    return nn.Sequential(*layers).to("sim")


@pytest.fixture(autouse=True)
def _few_copies_at_a_time() -> None:
    memopt.offload.empty_cache()
    memopt.offload.configure(copies_in_flight=2)


def _forward(model: nn.Module, x: Tensor, *, offload: bool) -> Tensor:
    if not offload:
        return model(x * 1).square().sum()
    with memopt.offload(min_bytes=1, keep_last=0):
        return model(x * 1).square().sum()


def _step(model: nn.Module, x: Tensor, *, offload: bool) -> list[Tensor]:
    """The gradients, while they may still be under way."""
    loss = _forward(model, x, offload=offload)
    return list(torch.autograd.grad(loss, list(model.parameters())))


def _is_right(
    step: Callable[[nn.Module, Tensor], list[Tensor]],
    slow: Callable[[], None],
    fault: sim.Fault,
) -> bool:
    """Whether offloaded steps have the plain run's bits, where `slow` delays and `fault` breaks."""
    model, x = _stack(), torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).sim()
    expected = [tensor.cpu() for tensor in _step(model, x, offload=False)]
    torch.accelerator.synchronize()
    slow()
    sim.plant(fault)
    found = [step(model, x) for _ in range(2)]
    sim.plant(sim.Fault.NONE)
    torch.accelerator.synchronize()
    return all(
        torch.equal(one.cpu(), other)
        for gradients in found
        for one, other in zip(gradients, expected, strict=True)
    )


def _shows(
    step: Callable[[nn.Module, Tensor], list[Tensor]], slow: Callable[[], None], fault: sim.Fault
) -> bool:
    """Whether a planted fault changes a bit in one of five runs: where other work holds the host
    up, what is late may be in time once.
    """
    return any(not _is_right(step, slow, fault) for _ in range(5))


def _slow_kernels() -> None:
    sim.delay(sim.Kind.KERNEL, 5e-4)


def _slow_copies_away() -> None:
    sim.delay(sim.Kind.DEVICE_TO_HOST, 2e-3)


def _slow_copies_back() -> None:
    sim.delay(sim.Kind.HOST_TO_DEVICE, 2e-3)


@pytest.mark.parametrize(
    ("slow", "fault"),
    [
        # 1: the source is freed before its copy ends.
        pytest.param(_slow_copies_away, sim.Fault.MOMENTS_ARE_REACHED, id="source-freed"),
        pytest.param(_slow_copies_away, sim.Fault.WAITS_ARE_IGNORED, id="source-let-go-of"),
        # 7: what comes back is used before it is there; or its memory still is.
        pytest.param(_slow_copies_back, sim.Fault.WAITS_ARE_IGNORED, id="used-too-early"),
        # A copy reads what is not written yet.
        pytest.param(_slow_kernels, sim.Fault.WAITS_ARE_IGNORED, id="read-too-early"),
    ],
)
def test_late_streams_change_no_bit_and_missing_waits_show(
    slow: Callable[[], None], fault: sim.Fault
) -> None:
    def step(model: nn.Module, x: Tensor) -> list[Tensor]:
        return _step(model, x, offload=True)

    assert _is_right(step, slow, sim.Fault.NONE)
    assert _shows(step, slow, fault)


def test_the_current_stream_is_asked_for_each_time(side_stream: torch.Stream) -> None:
    """Race 2. Forward and backward on a stream that was made after the engine."""

    def step(model: nn.Module, x: Tensor) -> list[Tensor]:
        side_stream.wait_stream(torch.accelerator.current_stream())
        with side_stream:
            gradients = _step(model, x, offload=True)
        side_stream.synchronize()
        return gradients

    def slow() -> None:
        sim.delay(sim.Kind.KERNEL, 5e-4)
        sim.delay(sim.Kind.HOST_TO_DEVICE, 2e-3)

    assert _is_right(step, slow, sim.Fault.NONE)
    assert _shows(step, slow, sim.Fault.STREAM_IS_REMEMBERED)


def test_what_is_not_contiguous_is_copied_as_it_lies() -> None:
    """Race 3. No kernel makes it contiguous, on whichever stream: only copies run beside."""
    x = torch.randn(ROWS, WIDTH, device="sim")
    weight = torch.randn(ROWS, ROWS, device="sim", requires_grad=True)

    def loss(*, offload: bool) -> Tensor:
        columns = (x * 2).t()  # (WIDTH, ROWS), strides (1, WIDTH)
        if not offload:
            return (columns @ weight).square().sum()
        with memopt.offload(min_bytes=1, keep_last=0):
            return (columns @ weight).square().sum()

    (expected,) = torch.autograd.grad(loss(offload=False), [weight])
    sim.random_delays(1e-3)
    computes = torch.accelerator.current_stream().stream_id
    with sim.trace() as ran:
        made = loss(offload=True)
        memopt.offload.stats(wait=True)  # it has left when backward asks
        (found,) = torch.autograd.grad(made, [weight])
        torch.accelerator.synchronize()
    assert torch.equal(found.cpu(), expected.cpu())
    beside = {task.kind for task in ran if task.stream != computes}
    assert beside >= {sim.Kind.DEVICE_TO_HOST, sim.Kind.HOST_TO_DEVICE}
    assert sim.Kind.KERNEL not in beside


def test_a_clone_beside_the_computation_would_show() -> None:
    """Race 3 as others had it: made contiguous on the copying stream, after its wait."""
    copies = torch.Stream("sim")
    computes = torch.accelerator.current_stream()

    def pack(tensor: Tensor) -> Tensor:
        copies.wait_stream(computes)
        with copies:
            return tensor.contiguous().to("cpu")

    weight = torch.randn(ROWS, ROWS, device="sim", requires_grad=True)
    with sim.trace() as ran:
        columns = (torch.randn(ROWS, WIDTH, device="sim") * 2).t()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor.to("sim")):
            (columns @ weight).sum().backward()
        torch.accelerator.synchronize()
    beside = {task.kind for task in ran if task.stream != computes.stream_id}
    assert beside & {sim.Kind.KERNEL, sim.Kind.DEVICE_TO_DEVICE}


def test_an_address_that_is_used_again_is_another_tensor() -> None:
    """Race 6. What has left gives its memory to what comes next, at the same address."""
    weight = torch.randn(WIDTH, WIDTH, device="sim", requires_grad=True)

    def gradient(*, offload: bool) -> tuple[Tensor, int]:
        addresses = set()
        loss = torch.zeros((), device="sim")
        for i in range(6):
            x = torch.full((ROWS, WIDTH), float(i + 1), device="sim")
            addresses.add(x.data_ptr())
            if offload:
                with memopt.offload(min_bytes=1, keep_last=0):
                    part = (x @ weight).sum()
                memopt.offload.stats(wait=True)  # it has left
            else:
                part = (x @ weight).sum()
            loss = loss + part * (i + 1)
            del x
        return torch.autograd.grad(loss, [weight])[0].cpu(), len(addresses)

    expected, distinct = gradient(offload=False)
    found, reused = gradient(offload=True)
    assert torch.equal(found, expected)
    assert (distinct, reused) == (6, 1)


def _streams_and_reservations(
    steps: int, between: Callable[[], object]
) -> tuple[list[set[int]], list[tuple[int, int]]]:
    """Of each step: the streams that did something, and how often memory was reserved so far."""
    gc.collect()
    model, x = _stack(), torch.randn(ROWS, WIDTH, device="sim")
    streams, reserved = [], []
    for _ in range(steps):
        with sim.trace() as ran:
            _step(model, x, offload=True)
            torch.accelerator.synchronize()
        # A device that is synchronised records an event on every stream that there is.
        streams.append({task.stream for task in ran if task.kind is not sim.Kind.EVENT})
        reserved.append((sim.memory().reservations, sim.pinned().reservations))
        between()
    return streams, reserved


def test_steps_make_no_streams_and_reserve_nothing_after_the_second() -> None:
    """Race 8; and no use of record_stream."""
    recorded = sim.memory().recorded
    streams, reserved = _streams_and_reservations(12, between=lambda: None)
    assert all(seen == streams[0] for seen in streams)
    assert len(streams[0]) == 3  # one computes, one copies away, one back
    assert len(set(reserved[2:])) == 1
    assert sim.memory().recorded == recorded


def test_an_engine_of_each_step_s_own_would_show() -> None:
    """Race 8 as others had it: what looks at the streams above does see it."""
    streams, _ = _streams_and_reservations(6, between=memopt.offload.empty_cache)
    assert any(seen != streams[0] for seen in streams)


def _bytes_of_the_pool_given_back(hold: list[Tensor]) -> tuple[int, int]:
    """How much a step has pinned, and how much of it empty_offload_cache() gives back."""
    model, x = _stack(), torch.randn(ROWS, WIDTH, device="sim")
    memopt.offload.empty_cache()
    before = sim.pinned().allocated
    loss = _forward(model, x, offload=True)
    if hold is not _NOTHING:
        hold.append(loss)
    memopt.offload.stats(wait=True)
    torch.autograd.grad(loss, list(model.parameters()), retain_graph=hold is not _NOTHING)
    del loss
    torch.accelerator.synchronize()
    held = sim.pinned().allocated - before
    given = memopt.offload.empty_cache()
    assert sim.pinned().allocated == before + held - given
    return held, given


_NOTHING: list[Tensor] = []


def test_host_memory_is_given_back() -> None:
    """Race 12. A graph that somebody holds is seen: its memory is not."""
    held, given = _bytes_of_the_pool_given_back(_NOTHING)
    assert held > 0  # for the next step
    assert given == held
    graphs: list[Tensor] = []
    held, given = _bytes_of_the_pool_given_back(graphs)
    assert held > 0
    assert given < held
    graphs.clear()
    assert memopt.offload.empty_cache() == held - given


def test_a_step_that_is_given_up_gives_everything_back() -> None:
    """Race 9: by an exception in forward, by one in backward, and by dropping the loss."""
    model, x = _stack(), torch.randn(ROWS, WIDTH, device="sim")
    _step(model, x, offload=True)
    torch.accelerator.synchronize()
    memopt.offload.stats(wait=True)
    gc.collect()  # of other tests
    before = sim.memory().allocated

    def fails(gradient: Tensor) -> None:
        raise ValueError("planned")

    def in_forward() -> None:
        handle = model[4].register_forward_pre_hook(lambda *_: fails(x))
        try:
            _forward(model, x, offload=True)
        finally:
            handle.remove()

    def in_backward() -> None:
        with memopt.offload(min_bytes=1, keep_last=0):
            middle = model[:3](x)
            middle.register_hook(fails)
            loss = model[3:](middle).sum()
        loss.backward()

    for raises in (in_forward, in_backward):
        with pytest.raises(ValueError, match="planned"):
            raises()
    _forward(model, x, offload=True)
    torch.accelerator.synchronize()
    for place in memopt.offload.stats(wait=True).places:
        assert (place.bytes_away, place.bytes_held, place.room_in_use) == (0, 0, 0)
    model.zero_grad()
    torch.accelerator.synchronize()
    assert sim.memory().allocated == before


def test_a_write_after_the_copy_was_queued_raises() -> None:
    """Race 13. The copy has not begun when the write is made."""
    x = torch.randn(ROWS, WIDTH, device="sim")
    weight = torch.randn(WIDTH, WIDTH, device="sim", requires_grad=True)
    with sim.paused():
        saved = x * 2
        with memopt.offload(min_bytes=1, keep_last=0):
            loss = (saved @ weight).sum()
        saved.zero_()
    with pytest.raises(RuntimeError, match="must not be written in place"):
        loss.backward()


def test_two_devices_in_one_scope_have_their_own_order() -> None:
    """What is prefetched is a device's own: two engines know nothing of each other."""
    parts = [torch.nn.Linear(WIDTH, WIDTH).to(f"sim:{i % 2}") for i in range(8)]
    x = torch.randn(ROWS, WIDTH, device="sim:0")

    def loss(*, offload: bool) -> Tensor:
        def run() -> Tensor:
            y = x
            for i, part in enumerate(parts):
                y = part(y.to(f"sim:{i % 2}")).tanh()
            return y.square().sum()

        if not offload:
            return run()
        with memopt.offload(min_bytes=1, keep_last=1):
            return run()

    parameters = [parameter for part in parts for parameter in part.parameters()]
    expected = [t.cpu() for t in torch.autograd.grad(loss(offload=False), parameters)]
    for _ in range(3):
        found = torch.autograd.grad(loss(offload=True), parameters)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one.cpu(), other)
    rows = {place.device: place for place in memopt.offload.stats(wait=True).places}
    assert rows["sim:0"].prefetch_hits > 0
    assert rows["sim:1"].prefetch_hits > 0
