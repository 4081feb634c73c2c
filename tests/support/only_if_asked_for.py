"""Folders of tests that run in a child process alone, and so are collected only where they were
asked for by path.
"""

from __future__ import annotations

from pathlib import Path

import pytest


def ignores(folder: Path, path: Path, config: pytest.Config) -> bool | None:
    """The answer of pytest_ignore_collect for `path`, of a test or a folder."""
    if not path.is_relative_to(folder):
        return None
    asked_for = (config.invocation_params.dir / a.split("::")[0] for a in config.args)
    asked = any(given.resolve().is_relative_to(folder.resolve()) for given in asked_for)
    return None if asked else True
