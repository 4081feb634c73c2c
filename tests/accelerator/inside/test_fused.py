"""memopt's fused ops and recipes on a device that brings kernels of its own for the private ops.

Their public ops, graph nodes and recipes are the same on every device. Here the kernels are those
of the CPU, run in a stream's order.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import memopt
from memopt._convert import supported
from tests.accelerator import sim
from tests.support.bits import assert_same_bits
from tests.support.blocks import fuse_gpt2

from .gpt import GPT, train

P = pytest.mark.parametrize("p", [0.0, 0.3])


def _fuse(model: GPT) -> None:
    for block in model.blocks:
        fuse_gpt2(block)


def _fuse_and_wrap(model: GPT) -> None:
    _fuse(model)
    for block in model.blocks:
        memopt.checkpoint_wrapper(block)


def test_fused_blocks_give_the_bits_of_the_cpu() -> None:
    assert_same_bits(train("sim", _fuse), train("cpu", _fuse))


@P
def test_fused_blocks_in_regions(p: float) -> None:
    assert_same_bits(train("sim", _fuse_and_wrap, p=p), train("sim", _fuse, p=p))


@pytest.mark.parametrize("change", [_fuse, _fuse_and_wrap], ids=["fused", "fused in regions"])
@P
def test_recipes(change: Callable[[GPT], None], p: float) -> None:
    with_recipes = train("sim", change, around=memopt.recipes, p=p)
    assert_same_bits(with_recipes, train("sim", change, p=p))


def test_recipe_runs_once_for_all_readers_of_a_stream(side_stream: torch.Stream) -> None:
    """What is made again on one stream is not given to a reader on another one."""
    x = torch.randn(6, 8, device="sim", requires_grad=True)
    linears = [nn.Linear(8, 8).to("sim") for _ in range(3)]
    main = torch.accelerator.current_stream()

    def run(gelu: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        x.grad = None
        with memopt.recipes():
            y = gelu(x)
            side_stream.wait_stream(main)
            with side_stream:
                a = linears[0](y)
            b, c = linears[1](y), linears[2](y)
        main.wait_stream(side_stream)
        (a.sum() + b.sum() + c.sum()).backward()
        return x.grad.cpu()

    wanted = run(nn.functional.gelu)
    sim.random_delays(1e-3)
    with sim.trace() as ran:
        got = run(memopt.functional.gelu)
    assert torch.allclose(got, wanted, rtol=1e-5, atol=1e-6)
    assert all(linear.weight.grad.isfinite().all() for linear in linears)
    runs = [task.stream for task in ran if task.name == "memopt::_activation_forward"]
    # Forward, then each stream's readers.
    assert sorted(runs) == [main.stream_id, main.stream_id, side_stream.stream_id]


def test_work_on_another_stream_is_not_waited_for() -> None:
    """A check of the checks above: the same ops, out of order."""
    x = torch.randn(6, 8, device="sim")
    stream = torch.Stream(device="sim:0")
    with sim.paused(stream):
        with stream:
            y = memopt.functional.gelu(x)
        assert memopt.functional.gelu(y).cpu().isnan().all()


def test_memopts_dropout_is_ruled_by_the_devices_generator() -> None:
    x = torch.ones(64, device="sim")
    drawn = []
    cpu = torch.get_rng_state()
    for _ in range(2):
        torch.sim.manual_seed(1)
        drawn += [memopt.functional.dropout(x, 0.5) for _ in range(2)]
    assert torch.equal(drawn[0], drawn[2])
    assert torch.equal(drawn[1], drawn[3])
    assert not torch.equal(drawn[0], drawn[1])
    assert torch.equal(torch.get_rng_state(), cpu)


@P
def test_convert(p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device of which memopt.convert knows that there are kernels. (PyTorch's functions, which
    are taken over below Python, know only of the CPU and CUDA.)
    """

    def convert(model: GPT) -> None:
        memopt.convert(model, functional=False)

    monkeypatch.setattr(supported, "_DEVICES", supported._DEVICES | {"sim"})
    waits = sim.synchronised_calls()
    with sim.trace() as ran:
        converted = train("sim", convert, p=p)
    assert any(task.name.startswith("memopt::_norm_backward") for task in ran)
    assert sim.synchronised_calls() == waits
    if p == 0:
        assert_same_bits(converted, train("cpu", convert))
    else:
        assert_same_bits(converted, train("sim", convert, p=p))


def test_host_does_not_wait_in_a_step_of_fused_blocks() -> None:
    model = GPT(0.3).to("sim")
    _fuse_and_wrap(model)
    tokens = torch.zeros(2, 5, dtype=torch.long, device="sim")
    model(tokens).sum().backward()  # what is looked at once
    with sim.paused():
        model(tokens).sum().backward()
    torch.accelerator.synchronize()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("op", [nn.Dropout(0.4), memopt.nn.Dropout(0.4)], ids=["torch", "memopt"])
def test_region_draws_the_numbers_of_dropout_again(op: nn.Module) -> None:
    x = torch.ones(64, device="sim", requires_grad=True)
    y = memopt.checkpoint(lambda x: op(op(x * 1.5)).exp(), x)
    after = torch.sim.get_rng_state()
    y.sum().backward()
    # An element is exp(0 x) or exp(c x), at x = 1: its derivative is itself times its logarithm.
    assert torch.allclose(x.grad, y.detach() * y.detach().log())
    assert (y != 1).any()
    assert (y == 1).any()
    assert torch.equal(torch.sim.get_rng_state(), after)
