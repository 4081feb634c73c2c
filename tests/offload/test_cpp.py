"""Proves that csrc/offload does what its headers say: runs its C++ tests (cpp/), as they are and
with the sanitizers of threads, addresses and undefined behaviour.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from . import build

WAYS = [
    "plain",
    *(pytest.param(way, marks=pytest.mark.slow) for way in build.SANITIZE if way != "plain"),
]


@pytest.mark.parametrize("program", build.PROGRAMS, ids=lambda program: program.stem)
@pytest.mark.parametrize("way", WAYS)
def test_program(program: Path, way: str) -> None:
    if not build.is_available(way):
        pytest.skip("the compiler has no such sanitizer")
    result = build.run(program, way)
    assert result.returncode == 0, result.stdout + result.stderr
