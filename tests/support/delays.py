"""Runs a command whose threads, but for the main one, are late at random.

    python -m tests.support.delays COMMAND...

`make test-delays` runs with it the tests of what has threads. A test that counts what another
thread still holds, and does not wait for it, fails there once in a few runs, and otherwise once in
many on a machine that has other work. glibc on x86-64 only.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.support.cpp_build import Compilation, build

SHARE = "0.3"
LONGEST_US = "3000"

FLAGS = ["-std=c++20", "-O2", "-fPIC", "-Wall", "-Wextra", "-Werror"]


def library() -> Path:
    source = Path(__file__).with_name("delays.cpp")
    place = source.parents[2] / "build" / "delays"
    return build(place, "delays.so", [Compilation(source, FLAGS)], ["-shared"])


def environment() -> dict[str, str]:
    settings = {"LD_PRELOAD": str(library()), "DELAYS_SHARE": SHARE, "DELAYS_US": LONGEST_US}
    return {**os.environ, **settings}


if __name__ == "__main__":
    os.execvpe(sys.argv[1], sys.argv[1:], environment())
