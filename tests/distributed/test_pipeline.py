"""Proves: a pipeline over two processes has with regions the losses, gradients and parameters of
the pipeline without, to the last bit: GPipe and 1F1B with a stage per process, and the zero-bubble
schedule with two, whose backward goes through a stage twice, first for its input and then for its
weights.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from tests.distributed.processes import WORLD_SIZE, Pair
from tests.distributed.support import (
    REGIONS,
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

MICROBATCHES = 4


class Stage(nn.Module):
    """Two blocks; one microbatch draws random numbers between forward and backward of another."""

    def __init__(self, index: int, region: Region) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.blocks = nn.ModuleList(block(dropout=0.5) for _ in range(2))
        self.call: Call = call_of(region)
        wrap_for(region, self.blocks)

    def forward(self, x: Tensor) -> Tensor:
        for module in self.blocks:
            x = self.call(module, x)
        return x


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


Schedule = type[PipelineScheduleSingle] | type[PipelineScheduleMulti]


def run(schedule_class: Schedule, region: Region) -> Results:
    multi = issubclass(schedule_class, PipelineScheduleMulti)
    stages_per_rank = 2 if multi else 1
    indices = range(dist.get_rank(), stages_per_rank * WORLD_SIZE, WORLD_SIZE)
    modules = nn.ModuleList(Stage(index, region) for index in indices)
    stages = [
        PipelineStage(module, index, stages_per_rank * WORLD_SIZE, torch.device("cpu"))
        for index, module in zip(indices, modules, strict=True)
    ]
    schedule = schedule_class(
        stages if multi else stages[0], n_microbatches=MICROBATCHES, loss_fn=mean_square
    )

    def backward(step: int) -> Tensor:
        rows = 2 * MICROBATCHES
        if dist.get_rank() == 0:
            schedule.step(batch(step, rows))
            return torch.zeros(())
        losses: list[Tensor] = []
        schedule.step(target=batch(step, rows), losses=losses)
        return torch.stack(losses)

    return train(modules, backward, steps=2)


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B, ScheduleInterleavedZeroBubble])
def test_two_steps_equal_those_without_regions(
    pair: Pair, schedule: Schedule, region: Region
) -> None:
    assert_recomputes_and_equals(pair.run(run, schedule, region), pair.run(run, schedule, "none"))
