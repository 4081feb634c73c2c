"""Proves that csrc/plan does what its headers say, in C++ alone: runs its tests (cpp/), as they are
and with AddressSanitizer and UndefinedBehaviorSanitizer, which would see a sum that overflows.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cpp_programs import check_program, programs

PROGRAMS = programs("plan")


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)
def test_program(program: Path) -> None:
    check_program(program, "plain")


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)
def test_program_with_sanitizers(program: Path) -> None:
    check_program(program, "address")
