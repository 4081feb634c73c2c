"""inside/ is collected only where it was asked for by path: its tests run in a child process."""

from __future__ import annotations

from pathlib import Path

import pytest

INSIDE = Path(__file__).parent / "inside"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if not collection_path.is_relative_to(INSIDE):
        return None
    asked_for = (config.invocation_params.dir / a.split("::")[0] for a in config.args)
    return None if any(path.resolve().is_relative_to(INSIDE) for path in asked_for) else True
