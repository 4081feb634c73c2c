"""Fixtures of the tests of compiled models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch._functorch.config

from memopt._compile import _inductor
from memopt._compile.candidates import EXACT, Candidate, candidate
from memopt._compile.policy import choose

CACHE = Path(__file__).parents[2] / "build" / "inductor"


@pytest.fixture(autouse=True)
def _fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test divides its graphs anew; kernels of the same halves are compiled once for all runs
    of the tests.
    """
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(CACHE))
    torch.compiler.reset()
    with torch._functorch.config.patch(enable_autograd_cache=False):
        yield
    torch.compiler.reset()


@pytest.fixture
def minimum_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a budget the minimum cut is taken, and not compared with others: what it keeps is
    what is tested. Peaks are predicted: no code is generated for what runs op by op.
    """
    choice = _inductor._chosen

    def chosen(ways: _inductor._Ways, budget: int | float | None) -> Candidate:
        if budget is not None:
            return choice(ways, budget)
        return candidate("memopt's", ways.joint, choose(ways.joint), EXACT)

    monkeypatch.setattr(_inductor, "_chosen", chosen)
    monkeypatch.setattr(_inductor._Ways, "count", lambda _, way: way)
