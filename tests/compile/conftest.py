"""Fixtures of the tests of compiled models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch._functorch.config

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
