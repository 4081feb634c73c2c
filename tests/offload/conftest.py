"""A directory for files, and counters that begin at zero."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import memopt


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """For memopt.offload("disk"): empty before and after, since its files have no name."""
    memopt.offload.empty_cache()
    memopt.offload.stats(reset=True, wait=True)
    yield tmp_path
    assert list(tmp_path.iterdir()) == []
    memopt.offload.configure()
