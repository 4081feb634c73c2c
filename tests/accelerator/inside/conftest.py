"""Everything in this folder runs in a process whose accelerator is the simulated one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.accelerator import sim

sim.load()


@pytest.fixture(autouse=True)
def _fresh_device() -> Iterator[None]:
    """No test leaves delays, a paused stream, or a task that failed."""
    sim.reset()
    yield
    sim.reset()
    torch.accelerator.set_device_index(0)
    for device in range(torch.accelerator.device_count()):
        torch.accelerator.synchronize(device)


@pytest.fixture
def side_stream() -> torch.Stream:
    """A stream beside the current one."""
    return torch.Stream(device="sim:0")
