"""The tests in inside/ pass, each file in a process of its own: an accelerator is for the whole of
a process, and a process that touches device memory ends.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from . import build

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

pytestmark = pytest.mark.slow  # compiles the backend


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    build.library()  # here, so that a compiler's message is this fixture's error


@pytest.mark.parametrize("name", sorted(path.name for path in HERE.glob("inside/test_*.py")))
def test_inside(name: str, child_environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    ran = subprocess.run(
        [*command, str(HERE / "inside" / name)],
        cwd=ROOT,
        env=child_environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    if ran.returncode != 0:
        pytest.fail(f"exit status {ran.returncode}\n{ran.stdout}\n{ran.stderr}", pytrace=False)
