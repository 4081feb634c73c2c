"""Compiles and runs C++ tests of those folders of csrc that need no PyTorch.

    python -m tests.support.cpp_programs [plain] [thread] [address]

builds and runs tests/NAME/cpp/test_*.cpp against csrc/NAME/*.cpp in these ways: as it is, with
ThreadSanitizer, with AddressSanitizer and UndefinedBehaviorSanitizer. `make sanitize` does the last
two. check.h has the macros that the programs are written with.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cpp_build import Compilation, build, joined, sanitizer_library

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("offload", "plan")

FLAGS = ("-std=c++20", "-O1", "-g1", "-pthread", "-Wall", "-Wextra", "-Werror", "-fmax-errors=5")
# AddressSanitizer takes as long to compile as to run, so without optimisation.
SANITIZE = {
    "plain": (),
    "thread": ("-fsanitize=thread",),
    "address": ("-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
}
LIBRARIES = {"plain": (), "thread": ("tsan",), "address": ("asan", "ubsan")}

SECONDS = 300  # a program takes some; more is a deadlock


def programs(folder: str) -> list[Path]:
    """The test programs of one of FOLDERS."""
    return sorted((ROOT / "tests" / folder / "cpp").glob("test_*.cpp"))


def is_available(way: str) -> bool:
    return all(sanitizer_library(name) is not None for name in LIBRARIES[way])


def run(program: Path, way: str) -> subprocess.CompletedProcess[str]:
    """Builds a test program in one of the ways of SANITIZE, and runs all its tests."""
    folder = program.parents[1].name
    flags = [*FLAGS, *SANITIZE[way]]
    place = ROOT / "build" / folder
    tested = joined(place, f"{folder}.cpp", sorted((ROOT / "csrc" / folder).glob("*.cpp")))
    compilations = [Compilation(source, flags) for source in (tested, program)]
    made = build(place / way, program.stem, compilations, flags)
    environment = {**os.environ, "LD_PRELOAD": ""}  # sanitizers must be what is loaded first
    return subprocess.run(
        [str(made)], capture_output=True, text=True, timeout=SECONDS, env=environment
    )


def check_program(program: Path, way: str) -> None:
    """Skips the test where the compiler has no such sanitizer; fails it with what was printed."""
    if not is_available(way):
        pytest.skip("the compiler has no such sanitizer")
    result = run(program, way)
    assert result.returncode == 0, result.stdout + result.stderr


def main(ways: list[str]) -> int:
    unknown = set(ways) - set(SANITIZE)
    if unknown:
        print(f"no way to build: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    failed = 0
    for way in ways or SANITIZE:
        if not is_available(way):
            print(f"{way}: the compiler has no such sanitizer", file=sys.stderr)
            failed += 1
            continue
        for program in (program for folder in FOLDERS for program in programs(folder)):
            result = run(program, way)
            outcome = f"failed\n{result.stdout}{result.stderr}" if result.returncode else "passed"
            print(f"{way} {program.stem}: {outcome}", flush=True)
            failed += result.returncode != 0
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
