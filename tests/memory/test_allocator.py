"""Proves: on the CPU the most bytes of a call are those that it has alive at one time, beyond what
was there before, and what is free is what the system says.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from memopt.memory.allocator import LiveBytes, allocated_bytes, free_bytes, most_above

CPU = torch.device("cpu")


def two_then_one(kept: list[Tensor]) -> None:
    """4 KB and 8 KB at one time, of which 4 KB stay."""
    kept.append(torch.empty(1024))
    torch.empty(2048)


def test_the_most_of_a_call() -> None:
    before = torch.empty(1 << 20)
    kept: list[Tensor] = []
    assert most_above(CPU, lambda: two_then_one(kept)) == 12 * 1024
    with LiveBytes() as live:
        two_then_one(kept)
        live.mark()
        torch.empty(1024)
        del before
    assert live.most == 12 * 1024
    assert live.left == 4 * 1024
    assert [mark.nbytes for mark in live.marks] == [4 * 1024]


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="reads /proc/meminfo")
def test_what_is_free() -> None:
    lines = Path("/proc/meminfo").read_text().splitlines()
    total = 1024 * int(next(line for line in lines if line.startswith("MemTotal")).split()[1])
    free = free_bytes(CPU)
    assert free is not None
    assert 0 < free <= total
    assert allocated_bytes(CPU) == 0  # whose allocator does not say
