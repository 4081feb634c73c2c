"""memopt's regions, host copies and generators on the simulated accelerator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt.compat.deepspeed import checkpointing
from tests.accelerator import sim
from tests.support.bits import assert_same_bits

from .gpt import GPT, train

P = pytest.mark.parametrize("p", [0.0, 0.3])


def _wrap(model: GPT, offload: bool = False) -> None:
    for block in model.blocks:
        memopt.checkpoint_wrapper(block, offload_to_cpu=offload)


@P
def test_regions_give_the_bits_of_the_plain_run(p: float) -> None:
    recorded = sim.memory().recorded
    assert_same_bits(train("sim", _wrap, p=p), train("sim", p=p))
    assert sim.memory().recorded == recorded


@P
def test_offloaded_inputs(p: float) -> None:
    recorded = sim.memory().recorded
    assert_same_bits(train("sim", lambda m: _wrap(m, offload=True), p=p), train("sim", p=p))
    assert sim.memory().recorded == recorded


@pytest.mark.parametrize("seed", range(2))
def test_offloaded_inputs_under_delays(seed: int) -> None:
    sim.random_delays(1e-3, seed)
    offloaded = train("sim", lambda m: _wrap(m, offload=True), p=0.3, steps=1)
    assert_same_bits(offloaded, train("sim", p=0.3, steps=1))


def test_convert_and_recipes_leave_what_they_do_not_know_as_it_is() -> None:
    """memopt has no kernels for this device."""
    converted = train("sim", memopt.convert, around=memopt.recipes)
    assert_same_bits(converted, train("cpu"))


def test_region_leaves_the_other_devices_numbers_alone() -> None:
    """A region of device 1, while device 0 is current."""
    x = torch.ones(64, device="sim:1", requires_grad=True)
    y = memopt.checkpoint(lambda x: nn.functional.dropout(x, 0.5) * x, x)
    torch.rand(3, device="sim:0")
    before = [torch.sim.get_rng_state(k) for k in range(2)]
    y.sum().backward()
    assert torch.equal(x.grad.cpu(), 2 * y.detach().cpu())
    assert all(torch.equal(torch.sim.get_rng_state(k), before[k]) for k in range(2))


@pytest.mark.parametrize("options", [{}, {"contiguous_checkpointing": True}], ids=str)
def test_deepspeeds_face_draws_from_the_devices_generator(options: dict[str, Any]) -> None:
    """By its own state and the ranks'; both are afterwards where the plain run leaves them."""
    checkpointing.configure(None, **options)
    tracker = checkpointing.get_cuda_rng_tracker()
    x = torch.randn(64, device="sim", requires_grad=True)

    def dropouts(x: Tensor) -> Tensor:
        x = nn.functional.dropout(x.sin(), 0.5)
        with tracker.fork():
            return nn.functional.dropout(x.exp(), 0.3)

    def results(call: Callable[..., Any]) -> list[Tensor]:
        checkpointing.model_parallel_cuda_manual_seed(3)
        y = x * 1
        for _ in range(3):
            y = call(dropouts, y)
        (gradient,) = torch.autograd.grad(y.sum(), x)
        states = [torch.sim.get_rng_state(), *tracker.get_states().values()]
        return [y.detach().cpu(), gradient.cpu(), *states]

    expected = results(lambda f, *args: f(*args))
    for _ in range(3):
        for found, wanted in zip(results(checkpointing.checkpoint), expected, strict=True):
            assert torch.equal(found, wanted)
    tracker.reset()


@pytest.mark.parametrize("option", ["synchronize", "profile"])
def test_deepspeeds_face_waits_for_the_device(option: str) -> None:
    done: list[bool] = []
    stream = torch.accelerator.current_stream()
    x = torch.ones(64, device="sim", requires_grad=True)
    sim.delay(sim.Kind.KERNEL, 2e-3)

    def function(x: Tensor) -> Tensor:
        done.append(stream.query())
        return x.exp().sin()

    checkpointing.configure(None, **{option: True})
    y = checkpointing.checkpoint(function, x * 1)
    assert stream.query()
    (y * 1).sum().backward()
    checkpointing.configure(None)
    if option == "synchronize":  # of what the caller queued before
        assert done == [True, True]
    else:
        timings = checkpointing.timings(reset=True)
        assert (timings.forward_calls, timings.recompute_calls) == (1, 1)
        assert timings.forward_seconds >= 4e-3


def test_region_on_a_side_stream(side_stream: torch.Stream) -> None:
    """Backward recomputes on forward's stream; nothing runs elsewhere."""
    block = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)).to("sim")
    side_stream.wait_stream(torch.accelerator.current_stream())
    with side_stream:
        x = torch.randn(4, 8, device="sim", requires_grad=True)
        with sim.trace() as ran:
            memopt.checkpoint(block, x).sum().backward()
            side_stream.synchronize()
    grad = x.grad.cpu()
    kernels = [task for task in ran if task.kind == sim.Kind.KERNEL]
    assert {task.stream for task in kernels} == {side_stream.stream_id}
    assert sum(task.name == "aten::gelu" for task in kernels) == 2
    torch.accelerator.synchronize()
    x = x.detach().requires_grad_()
    block(x).sum().backward()
    assert torch.equal(grad, x.grad.cpu())
