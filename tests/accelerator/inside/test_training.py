"""PyTorch's own training on the simulated accelerator: the CPU's bits, under delays as well."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from tests.accelerator import sim
from tests.support.bits import assert_same_bits

from .gpt import GPT, train


def test_training_gives_the_bits_of_the_cpu() -> None:
    waits = sim.synchronised_calls()
    recorded = sim.memory().recorded
    assert_same_bits(train("sim"), train("cpu"))
    assert sim.synchronised_calls() == waits
    assert sim.memory().recorded == recorded


def test_second_device() -> None:
    assert_same_bits(train("sim:1"), train("cpu"))


@pytest.mark.parametrize("seed", range(2))
def test_random_delays_change_nothing(seed: int) -> None:
    sim.random_delays(1e-3, seed)
    assert_same_bits(train("sim", steps=1), train("cpu", steps=1))


def test_seed_rules_dropout() -> None:
    once = train("sim", p=0.3)
    assert_same_bits(once, train("sim", p=0.3))
    assert not torch.equal(once[0][0], train("sim")[0][0])


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("pinned", [False, True])
def test_save_on_cpu(pinned: bool, p: float) -> None:
    around = functools.partial(save_on_cpu, pin_memory=pinned, device_type="sim")
    assert_same_bits(train("sim", around=around, p=p), train("sim", p=p))


def test_save_on_cpu_under_delays() -> None:
    sim.delay(sim.Kind.HOST_TO_DEVICE, 1e-3)
    around = functools.partial(save_on_cpu, pin_memory=True, device_type="sim")
    assert_same_bits(train("sim", around=around, steps=1), train("sim", steps=1))


def _checkpointed(model: GPT) -> None:
    for block in model.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_torch_checkpoint(p: float) -> None:
    assert_same_bits(train("sim", _checkpointed, p=p), train("sim", p=p))


def test_autocast() -> None:
    def low() -> torch.autocast:
        return torch.autocast("sim", dtype=torch.bfloat16)

    losses, _ = train("sim", around=low)
    exact, _ = train("sim")
    for loss, wanted in zip(losses, exact, strict=True):
        assert loss.dtype == torch.float32
        assert not torch.equal(loss, wanted)
        torch.testing.assert_close(loss, wanted, rtol=2e-2, atol=0)


def test_autocast_casts_by_the_lists() -> None:
    x, w = torch.randn(4, 4, device="sim"), torch.randn(4, 4, device="sim")
    with torch.autocast("sim", dtype=torch.float16):
        assert (x @ w).dtype == torch.float16
        assert (x @ w).softmax(-1).dtype == torch.float32
        assert torch.nn.functional.layer_norm(x @ w, (4,)).dtype == torch.float32
        assert (x @ w + x).dtype == torch.float32
        assert torch.ones(3, dtype=torch.int64, device="sim").sum().dtype == torch.int64


def test_backward_runs_on_the_streams_of_forward(side_stream: torch.Stream) -> None:
    side_stream.wait_stream(torch.accelerator.current_stream())
    with side_stream:
        x = torch.randn(4, 4, device="sim", requires_grad=True)
        y = (x * 2).exp().sum()
        with sim.trace() as ran:
            y.backward()
            side_stream.synchronize()
    kernels = {(task.stream, task.name) for task in ran if task.kind == sim.Kind.KERNEL}
    assert (side_stream.stream_id, "aten::mul") in {(s, n.partition(".")[0]) for s, n in kernels}
    assert {stream for stream, _ in kernels} == {side_stream.stream_id}
