"""Proves: on the CPU the most bytes of a call are those that it has alive at one time, beyond what
was there before, as PyTorch's profiler counts them too; what is free is what the system says.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt import _without_native
from memopt.memory import allocator
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


def training_step() -> None:
    """With scratch inside operators, views, an error on the way and a thread of its own."""
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(8))
    x = torch.randn(2, 4, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x).float().logsumexp(1).mean()
    loss.backward()
    with pytest.raises(RuntimeError):
        torch.ones(3) @ torch.ones(4)
    torch.linalg.qr(torch.randn(16, 16))
    memopt.functional.layer_norm(x, (8,)).sum()
    other = threading.Thread(target=lambda: torch.empty(1024))
    other.start()
    other.join()


def test_the_profiler_counts_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """In particular what operators allocate and free inside themselves."""
    training_step()  # what a first step makes, and keeps
    torch.manual_seed(0)
    with LiveBytes() as ours:
        training_step()
    monkeypatch.setattr(allocator, "_C", _without_native)
    torch.manual_seed(0)
    with LiveBytes() as theirs:
        training_step()
    assert [i.nbytes for i in ours.timeline] == [i.nbytes for i in theirs.timeline]
    assert ours.most_with_scratch == theirs.most_with_scratch > ours.most


def test_a_profiler_that_is_on_stays_on() -> None:
    with torch.profiler.profile(profile_memory=True) as profile:
        torch.empty(1024)
        with (
            pytest.raises(RuntimeError, match="where no profiler is on, got one"),
            LiveBytes(),
        ):
            pass
        torch.empty(2048)
    assert [e.name for e in profile.events() if e.name == "aten::empty"] == ["aten::empty"] * 2
    with LiveBytes() as live:
        torch.empty(1024)
    assert live.most == 4096


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="reads /proc/meminfo")
def test_what_is_free() -> None:
    lines = Path("/proc/meminfo").read_text().splitlines()
    total = 1024 * int(next(line for line in lines if line.startswith("MemTotal")).split()[1])
    free = free_bytes(CPU)
    assert free is not None
    assert 0 < free <= total
    assert allocated_bytes(CPU) == 0  # whose allocator does not say
