"""Proves of the benchmarks' rotor: its schedules run in the memory that they were found for and
take the time that was said, are no slower than segments in the same memory, and give the plain
run's gradients.
"""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from torch import nn

from benchmarks.rotor import (
    Chain,
    Operation,
    in_segments,
    measure,
    rotor,
    run_chain,
    simulate,
)
from memopt.checkpoint.segments import sqrt_segments


def uniform(stages: int) -> Chain:
    """A forward of 1, a backward of 2; a stage saves as much as its output."""
    ones, none = [1.0] * stages, [0.0] * stages
    return Chain([*ones, 1.0], ones, ones, [2.0] * stages, none, ones)


def random_chain(rng: random.Random, stages: int) -> Chain:
    def numbers(count: int, most: int) -> list[float]:
        return [float(rng.randint(1, most)) for _ in range(count)]

    sizes = numbers(stages + 1, 5)
    saved = [size + rng.randint(0, 9) for size in sizes[1:]]
    times = numbers(stages, 9), numbers(stages, 9)
    return Chain(sizes, saved, *times, numbers(stages, 4), numbers(stages, 4))


def all_kept(chain: Chain) -> list[Operation]:
    return in_segments([len(chain)])


@pytest.mark.parametrize("seed", range(20))
def test_schedules_keep_the_bound_and_take_the_time(seed: int) -> None:
    rng = random.Random(seed)
    chain = random_chain(rng, rng.randint(1, 9))
    most = round(simulate(chain, all_kept(chain))[1])
    last = math.inf
    solved_once = False
    for memory in range(1, most + 1):
        solved = rotor(chain, memory, slots=memory)
        if solved is None:
            assert not solved_once
            continue
        solved_once = True
        seconds, peak = simulate(chain, solved.schedule)
        assert peak <= memory
        assert seconds == solved.seconds <= last
        last = seconds
    assert last == sum(chain.forward_times) + sum(chain.backward_times)


@pytest.mark.parametrize("seed", range(5))
def test_no_segments_are_faster_in_the_same_memory(seed: int) -> None:
    chain = random_chain(random.Random(seed), 7)
    for count in range(1, 8):
        for cuts in itertools.combinations(range(1, 7), count - 1):
            bounds = [0, *cuts, 7]
            seconds, peak = simulate(
                chain, in_segments([b - a for a, b in itertools.pairwise(bounds)])
            )
            solved = rotor(chain, peak, slots=round(peak))
            assert solved is not None
            assert solved.seconds <= seconds


@pytest.mark.parametrize("stages", [4, 9, 16, 25])
def test_is_not_worse_than_sqrt_on_uniform_chains(stages: int) -> None:
    chain = uniform(stages)
    seconds, peak = simulate(chain, in_segments(sqrt_segments(stages)))
    solved = rotor(chain, peak, slots=round(peak))
    assert solved is not None
    assert solved.seconds <= seconds
    # And it goes on below, where segments cannot: by running stages more than twice.
    solved = rotor(chain, 5, slots=5)
    assert solved is not None
    assert solved.seconds >= 4 * stages - 1
    assert simulate(chain, solved.schedule)[1] <= 5


def test_sizes_are_rounded_up_to_slots() -> None:
    chain = random_chain(random.Random(3), 8)
    scaled = Chain(
        *([size * 1.37 for size in sizes] for sizes in (chain.sizes, chain.saved)),
        chain.forward_times,
        chain.backward_times,
        *([size * 1.37 for size in sizes] for sizes in (chain.forward_extra, chain.backward_extra)),
    )
    _, most = simulate(scaled, all_kept(scaled))
    for share in (0.5, 0.7, 0.9):
        solved = rotor(scaled, share * most, slots=60)
        if solved is not None:
            assert simulate(scaled, solved.schedule)[1] <= share * most
    solved = rotor(scaled, 1.2 * most, slots=60)
    assert solved is not None
    assert solved.schedule == all_kept(scaled)


def test_a_schedule_that_cannot_run_is_refused() -> None:
    chain = uniform(2)
    with pytest.raises(ValueError, match="no input of stage 1"):
        simulate(chain, [Operation("save", 1)])
    with pytest.raises(ValueError, match="backward of stage 0 is not possible"):
        simulate(chain, [Operation("save", 0), Operation("backward", 0)])
    with pytest.raises(ValueError, match="backward of stage 1 is missing"):
        simulate(chain, [Operation("save", 0)])


class Block(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


@pytest.fixture(scope="module")
def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(16, 16 * (1 + i % 3)) for i in range(6)), nn.Linear(16, 3))


X = torch.randn(32, 16, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def measured(blocks: nn.Sequential) -> Chain:
    for parameter in blocks.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return measure(blocks, X, repeats=1)


def test_gradients_equal_the_plain_runs_in_every_bit(
    blocks: nn.Sequential, measured: Chain
) -> None:
    x = X.clone().requires_grad_()
    gradient = torch.randn(32, 3)
    expected_output = blocks(x)
    wanted = [x, *blocks.parameters()]
    expected = torch.autograd.grad(expected_output, wanted, gradient)
    _, most = simulate(measured, all_kept(measured))
    schedules = set()
    for share in (0.35, 0.5, 0.6, 0.7, 0.8, 1.0):
        solved = rotor(measured, share * most, slots=200)
        if solved is None:
            continue
        schedules.add(tuple(solved.schedule))
        for tensor in wanted:
            tensor.grad = None
        for block in blocks[:-1]:
            block.calls = 0
        output = run_chain(blocks, solved.schedule, x, gradient)
        assert torch.equal(output, expected_output)
        for tensor, grad in zip(wanted, expected, strict=True):
            assert tensor.grad is not None
            assert torch.equal(tensor.grad, grad)
        forwards = [stage for name, stage in solved.schedule if name != "backward"]
        assert [block.calls for block in blocks[:-1]] == [forwards.count(i) for i in range(6)]
    assert len(schedules) >= 3


def test_measures_what_a_stage_saves(measured: Chain) -> None:
    block, statistics = X.nbytes, 2 * 32 * 4
    assert measured.sizes == [block] * 7 + [32 * 3 * 4]
    # The norm's output, mean and rstd, what up and gelu make, and the block's own output.
    assert [measured.saved[i] for i in (0, 1, 2)] == [
        statistics + block + 2 * inner * block + block for inner in (1, 2, 3)
    ]
    assert measured.saved[6] == 32 * 3 * 4
    assert min(measured.forward_times) > 0
    assert min(measured.backward_times) > 0
