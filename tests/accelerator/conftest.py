"""The tests in inside/ run in a child process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.only_if_asked_for import ignores


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return ignores(Path(__file__).parent / "inside", collection_path, config)
