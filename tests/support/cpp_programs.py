"""Compiles and runs the C++ tests of csrc/offload, which needs no PyTorch.

    python -m tests.offload.build [plain] [thread] [address]

builds and runs all of cpp/ in these ways: as it is, with ThreadSanitizer, with AddressSanitizer and
UndefinedBehaviorSanitizer. `make sanitize` does the last two.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.cpp_build import Compilation, build, joined, sanitizer_library

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build" / "offload"

SOURCES = sorted((ROOT / "csrc" / "offload").glob("*.cpp"))
PROGRAMS = sorted((HERE / "cpp").glob("test_*.cpp"))

FLAGS = ("-std=c++20", "-O1", "-g1", "-pthread", "-Wall", "-Wextra", "-Werror", "-fmax-errors=5")
# AddressSanitizer takes as long to compile as to run, so without optimisation.
SANITIZE = {
    "plain": (),
    "thread": ("-fsanitize=thread",),
    "address": ("-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
}
LIBRARIES = {"plain": (), "thread": ("tsan",), "address": ("asan", "ubsan")}

SECONDS = 300  # a program takes some; more is a deadlock


def is_available(way: str) -> bool:
    return all(sanitizer_library(name) is not None for name in LIBRARIES[way])


def run(program: Path, way: str) -> subprocess.CompletedProcess[str]:
    """Builds a file of PROGRAMS in one of the ways of SANITIZE, and runs all its tests."""
    flags = [*FLAGS, *SANITIZE[way]]
    engine = joined(BUILD, "engine.cpp", SOURCES)
    compilations = [Compilation(source, flags) for source in (engine, program)]
    made = build(BUILD / way, program.stem, compilations, flags)
    return subprocess.run([str(made)], capture_output=True, text=True, timeout=SECONDS)


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
        for program in PROGRAMS:
            result = run(program, way)
            outcome = f"failed\n{result.stdout}{result.stderr}" if result.returncode else "passed"
            print(f"{way} {program.stem}: {outcome}", flush=True)
            failed += result.returncode != 0
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
