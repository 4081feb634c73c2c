"""Bytes as the accelerator's allocator counts them, by the names that every device has."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import memopt
from memopt.memory.allocator import DeviceBytes, allocated_bytes, free_bytes, most_above
from tests.accelerator import sim

SIM = torch.device("sim")


def test_a_peak_begins_anew() -> None:
    torch.empty(1 << 20, device=SIM)  # a higher peak than the next one
    there = torch.empty(256, device=SIM)
    before = sim.memory().allocated
    with DeviceBytes(SIM) as found:
        kept = torch.empty(1024, device=SIM)
        torch.empty(2048, device=SIM)
        now = found.now
    assert found.before == before >= there.nbytes
    assert found.most == before + 12 * 1024
    assert (found.above, now) == (12 * 1024, 4 * 1024)
    assert found.reserved >= found.most
    assert allocated_bytes(SIM) == before + kept.nbytes


def test_the_most_of_a_call() -> None:
    kept: list[Tensor] = []

    def run() -> None:
        kept.append(torch.empty(1024, device=SIM))
        torch.empty(2048, device=SIM)

    assert most_above(SIM, run) == 12 * 1024


def test_an_allocator_that_does_not_say_what_is_free() -> None:
    assert free_bytes(SIM) is None
    model = torch.nn.Linear(4, 4).to(SIM)
    with pytest.raises(ValueError, match=r"accumulate: .* on sim must have a budget"):
        memopt.accumulate(model, torch.ones(4, 4, device=SIM), loss=lambda y: y.square().mean())
