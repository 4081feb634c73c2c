"""Plans on a device know who sets the pace: where the device waits for the host, times of choices
are the host's, and the plan says so.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

import memopt
from memopt._plan.api import live_of
from memopt._plan.levels import Case
from memopt._plan.plan import made
from memopt._plan.terms import Terms
from memopt.assignment import KEEP, Choice
from tests.accelerator import sim

NOTE = "the host is the bound: the device waits for it, and the times are the host's"
HOST_SECONDS = 0.02  # of a block's forward, which sleeps: far more than its kernels take


class Block(nn.Module):
    def __init__(self, sleeps: float) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.sleeps = sleeps

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.sleeps)
        return torch.tanh(self.linear(x))


def plan_of(sleeps: float, device: str = "sim") -> memopt.Plan:
    """A plan of a model on the device, with times of real steps."""
    model = nn.Sequential(Block(sleeps), Block(sleeps), nn.Flatten(0)).to(device)
    batch = torch.ones(4, 8, device=device)
    live = live_of(model, batch, None, lambda y: y.sum(), Block, None)
    live.runs, live.steps = True, 1  # memopt.plan times steps on the CPU and CUDA alone
    return made(live, live.profile(), 1 << 30, Terms())


def test_where_the_device_waits_the_times_are_the_host_s() -> None:
    plan = plan_of(HOST_SECONDS)
    assert plan.profile.waits_for_host
    assert NOTE in " ".join(str(plan).split())
    assert "CUDA graphs and memopt.compile" in " ".join(str(plan).split())
    seconds = plan.profile.seconds
    kept, region = (seconds[Case(0, c, False)] for c in (KEEP, Choice(checkpoint=True)))
    assert kept.forward > HOST_SECONDS / 2  # what the host slept; the kernels take no such time
    assert region.backward > kept.backward  # where it sleeps again


def test_where_the_host_waits_nothing_is_said() -> None:
    sim.delay(sim.Kind.KERNEL, 2e-3)
    plan = plan_of(0.0)
    assert not plan.profile.waits_for_host
    assert NOTE not in " ".join(str(plan).split())


def test_a_host_that_is_the_device_waits_for_none() -> None:
    plan = plan_of(0.0, "cpu")
    assert plan.profile.behind is None
    assert not plan.profile.waits_for_host
