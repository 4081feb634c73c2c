"""Proves: a model in DistributedDataParallel has with regions, wrapped or called, the losses,
gradients, parameters and buffers of the model without, to the last bit: parameters that are used
once, more often, in several regions, inside and outside, never, or not in every step; nested
regions, dropout, batch norm, collectives in a region, accumulation over several passes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.nn.functional as dist_functional
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import memopt
from tests.distributed.processes import Pair
from tests.distributed.support import (
    REGIONS,
    SIZE,
    Call,
    Region,
    Results,
    assert_recomputes_and_equals,
    batch,
    block,
    call_of,
    train,
    wrap_for,
)

pytestmark = pytest.mark.slow  # for whichever test starts the processes

Blocks = nn.ModuleList


def once(blocks: Blocks, call: Call, x: Tensor, step: int) -> Tensor:
    for module in blocks:
        x = call(module, x)
    return x


def first_only(blocks: Blocks, call: Call, x: Tensor, step: int) -> Tensor:
    return call(blocks[0], x)


def last_only(blocks: Blocks, call: Call, x: Tensor, step: int) -> Tensor:
    return call(blocks[-1], x)


def another_each_step(blocks: Blocks, call: Call, x: Tensor, step: int) -> Tensor:
    return call(blocks[-1], call(blocks[step % 2], x))


def one_twice(blocks: Blocks, call: Call, x: Tensor, step: int) -> Tensor:
    return call(blocks[1], call(blocks[0], call(blocks[0], x)))


def all_twice(blocks: Blocks, call: Call, x: Tensor, step: int) -> Tensor:
    return once(blocks, call, once(blocks, call, x, step), step)


def inside_and_outside(blocks: Blocks, call: Call, x: Tensor, step: int) -> Tensor:
    x = F.linear(once(blocks, call, x, step), blocks[0][0].weight).tanh()
    return F.linear(x, blocks[0][3].weight)


def some_in_regions(blocks: Blocks, call: Call, x: Tensor, step: int) -> Tensor:
    for part in blocks[0]:
        x = part(x)
    return call(blocks[1], x)


class Chain(nn.Module):
    """A region of regions, if it is wrapped or called like its blocks."""

    def __init__(self, blocks: list[nn.Module], call: Call) -> None:
        super().__init__()
        self.blocks, self.call = Blocks(blocks), call

    def forward(self, x: Tensor) -> Tensor:
        return once(self.blocks, self.call, x, 0).tanh()


class AcrossRanks(nn.Module):
    """Centres by the mean over the batches of all processes."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - dist_functional.all_reduce(x.mean(0)) / 2).exp()


class Case(NamedTuple):
    route: Callable[[Blocks, Call, Tensor, int], Tensor]
    blocks: int = 2
    share: bool = False
    """Whether all blocks have the first one's weights."""
    nest: bool = False
    """Whether the last block is a chain of the others."""
    dropout: float = 0.0
    extra: Callable[[], nn.Module] | None = None
    """A layer at the end of each block."""
    leaves_unused: bool = False
    changes: bool = False
    """Whether the graph differs between steps."""


CASES = {
    "once": Case(once),
    "unused": Case(first_only, leaves_unused=True),
    "another block each step": Case(another_each_step, 3, leaves_unused=True, changes=True),
    "another block with the same weights each step": Case(
        another_each_step, 3, share=True, leaves_unused=True, changes=True
    ),
    "shared weights": Case(once, 3, share=True),
    "one block twice": Case(one_twice),
    "all blocks twice": Case(all_twice),
    "shared weights, all blocks twice": Case(all_twice, share=True),
    "inside and outside": Case(inside_and_outside),
    "some in regions": Case(some_in_regions),
    "nested": Case(last_only, nest=True),
    "nested, inner blocks also outside": Case(once, nest=True),
    "nested, shared weights": Case(last_only, share=True, nest=True),
    "dropout": Case(all_twice, dropout=0.5),
    "nested dropout": Case(last_only, nest=True, dropout=0.5),
    "batch norm": Case(once, extra=lambda: nn.BatchNorm1d(SIZE)),
    "nested batch norm": Case(last_only, nest=True, extra=lambda: nn.BatchNorm1d(SIZE)),
    "collective in a region": Case(once, extra=AcrossRanks),
    "batch norm over all processes": Case(once, extra=lambda: memopt.nn.SyncBatchNorm(SIZE)),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "find_unused_parameters": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
    "gradient_as_bucket_view": {"gradient_as_bucket_view": True},
}


def fitting(case: Case) -> list[str]:
    """The options with which DistributedDataParallel takes the model without regions."""
    if case.changes:
        return ["find_unused_parameters"]
    if case.leaves_unused:
        return ["find_unused_parameters", "static_graph"]
    return ["default", "find_unused_parameters", "static_graph"]


class Model(nn.Module):
    def __init__(self, case: Case, region: Region) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.route, self.call = case.route, call_of(region)
        blocks: list[Any] = [block(case.dropout) for _ in range(case.blocks)]
        for module in blocks:
            if case.share:
                module[0].weight, module[3].weight = blocks[0][0].weight, blocks[0][3].weight
            if case.extra:
                module.append(case.extra())
        if case.nest:
            blocks.append(Chain(blocks, self.call))
        wrap_for(region, blocks)
        self.blocks = Blocks(blocks)

    def forward(self, x: Tensor, step: int) -> Tensor:
        return self.route(self.blocks, self.call, x, step)


def one_pass(ddp: DistributedDataParallel, step: int) -> Tensor:
    loss = ddp(batch(step), step).square().mean()
    loss.backward()
    return loss


def accumulated(ddp: DistributedDataParallel, step: int) -> Tensor:
    """Two passes, of which the second synchronises."""
    with ddp.no_sync():
        first = one_pass(ddp, 2 * step)
    return first + one_pass(ddp, 2 * step + 1)


def two_forwards(ddp: DistributedDataParallel, step: int) -> Tensor:
    """Before the one backward."""
    outputs = [ddp(batch(2 * step + i), step) for i in range(2)]
    loss = outputs[0].square().mean() + outputs[1].exp().mean()
    loss.backward()
    return loss


Backward = Callable[[DistributedDataParallel, int], Tensor]


def run(case: str, options: str, backward: Backward, region: Region) -> Results:
    ddp = DistributedDataParallel(Model(CASES[case], region), **OPTIONS[options])
    return train(ddp, lambda step: backward(ddp, step))


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize(
    ("case", "options"), [(name, o) for name, case in CASES.items() for o in fitting(case)]
)
def test_three_steps_equal_those_without_regions(
    pair: Pair, case: str, options: str, region: Region
) -> None:
    assert_recomputes_and_equals(
        pair.run(run, case, options, one_pass, region),
        pair.run(run, case, options, one_pass, "none"),
    )


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("backward", [accumulated, two_forwards])
@pytest.mark.parametrize("case", ["once", "all blocks twice", "dropout", "nested"])
def test_accumulated_gradients_equal_those_without_regions(
    pair: Pair, case: str, backward: Backward, region: Region
) -> None:
    assert_recomputes_and_equals(
        pair.run(run, case, "gradient_as_bucket_view", backward, region),
        pair.run(run, case, "gradient_as_bucket_view", backward, "none"),
    )


def offloaded() -> int:
    """How much was given to the engine: bytes that went, and what was wanted before it could."""
    stats = memopt.offload.stats(wait=True)
    return stats.bytes_out + sum(place.never_left for place in stats.places)


def run_and_count(case: str, options: str, region: Region) -> tuple[Results, int]:
    before = offloaded()
    results = run(case, options, one_pass, region)
    return results, offloaded() - before


@pytest.mark.parametrize("case", ["once", "all blocks twice", "dropout", "nested"])
def test_regions_whose_inputs_are_offloaded_equal_the_plain_run(pair: Pair, case: str) -> None:
    options = "gradient_as_bucket_view"
    found = pair.run(run_and_count, case, options, "disk")
    plain = pair.run(run, case, options, one_pass, "none")
    assert_recomputes_and_equals([results for results, _ in found], plain)
    # Inside a region nothing goes, and an outer one's input may be the batch, which is held.
    assert case == "nested" or all(count > 0 for _, count in found)
