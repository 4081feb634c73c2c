"""Proves that csrc/offload does what its headers say: runs its C++ tests (cpp/), as they are; those
in which threads meet also with ThreadSanitizer, those of failures with AddressSanitizer and
UndefinedBehaviorSanitizer. (`make sanitize` runs all with all: compiling takes the time.)
"""

from __future__ import annotations

from pathlib import Path

import pytest

from . import build

SANITIZED = {
    "thread": ("test_engine_threads", "test_file_backend", "test_io_threads"),
    "address": ("test_engine_threads", "test_file_backend_failures"),
}


@pytest.mark.parametrize("program", build.PROGRAMS, ids=lambda program: program.stem)
def test_program(program: Path) -> None:
    run(program, "plain")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "name"), [(way, name) for way, names in SANITIZED.items() for name in names]
)
def test_program_with_sanitizers(way: str, name: str) -> None:
    (program,) = (program for program in build.PROGRAMS if program.stem == name)
    run(program, way)


def run(program: Path, way: str) -> None:
    if not build.is_available(way):
        pytest.skip("the compiler has no such sanitizer")
    result = build.run(program, way)
    assert result.returncode == 0, result.stdout + result.stderr
