"""The tests in inside/ pass, in a process of their own: an accelerator is for the whole of a
process, and a process that touches device memory ends.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from . import build

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

pytestmark = pytest.mark.slow  # compiles the backend


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    build.library()  # here, so that a compiler's message is this fixture's error


@pytest.fixture(scope="module")
def ran(
    request: pytest.FixtureRequest, child_environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """The selected files of inside/, in one process, which starts once."""
    here = [item for item in request.session.items if item.path == request.path]
    names = [item.callspec.params["name"] for item in here if isinstance(item, pytest.Function)]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rfE"]
    return subprocess.run(
        [*command, *(str(HERE / "inside" / name) for name in names)],
        cwd=ROOT,
        env=child_environment,
        capture_output=True,
        text=True,
        timeout=1200,
    )


def _files() -> Iterator[Any]:
    """The benchmarks' ways to their end are `thorough`: a thread for each stream takes a minute."""
    for path in sorted(HERE.glob("inside/test_*.py")):
        is_benchmark = path.name in ("test_benchmark.py", "test_gpu_models.py")
        yield pytest.param(path.name, marks=[pytest.mark.thorough] * is_benchmark, id=path.name)


@pytest.mark.parametrize("name", _files())
def test_inside(name: str, ran: subprocess.CompletedProcess[str]) -> None:
    # 1: some failed, and are named. Without its last line the process ended before the tests did.
    ended = ran.returncode in (0, 1) and re.search(r"\d+ passed.* in [\d.]+s", ran.stdout)
    failed = re.search(rf"^(FAILED|ERROR) \S*/{re.escape(name)}", ran.stdout, re.MULTILINE)
    if failed or not ended:
        pytest.fail(f"exit status {ran.returncode}\n{ran.stdout}\n{ran.stderr}", pytrace=False)
