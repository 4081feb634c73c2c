"""Proves that csrc/offload does what its headers say: runs its C++ tests (cpp/), those in which
threads meet with ThreadSanitizer, those of failures with AddressSanitizer and
UndefinedBehaviorSanitizer, the others as they are. (`make sanitize` runs all with all, which takes
longer.)
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cpp_programs import check_program, programs

PROGRAMS = programs("offload")
SANITIZED = {
    "thread": ("test_engine_threads", "test_file_backend", "test_io_threads"),
    "address": ("test_engine_faults", "test_file_backend_failures"),
}


PLAIN = [p for p in PROGRAMS if not any(p.stem in names for names in SANITIZED.values())]


@pytest.mark.slow
@pytest.mark.parametrize("program", PLAIN, ids=lambda program: program.stem)
def test_program(program: Path) -> None:
    check_program(program, "plain")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "name"), [(way, name) for way, names in SANITIZED.items() for name in names]
)
def test_program_with_sanitizers(way: str, name: str) -> None:
    (program,) = (program for program in PROGRAMS if program.stem == name)
    check_program(program, way)
