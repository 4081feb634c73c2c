"""Proves: every file of examples/ runs by itself, ends without an error, says the peak and the time
of a step before and after, and is in the folder's README. Those that want a library which is not
here are skipped.
"""

from __future__ import annotations

import os
import re
import runpy
import sys
from pathlib import Path

import pytest

from tests.support.forks import run_forked

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

pytestmark = pytest.mark.slow


def run(example: Path) -> None:
    """As `python example.py` does."""
    sys.argv = [str(example)]
    sys.path.insert(0, str(example.parent))
    runpy.run_path(str(example), run_name="__main__")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_runs(example: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    exitcode, stdout, stderr = run_forked(environment, run, example)
    missing = re.search(r"No module named '(?!memopt|torch)(\w+)'", stderr)
    if missing:
        pytest.skip(f"no {missing[1]} here")
    assert exitcode == 0, stderr
    if example.stem == "tensor_parallel":  # whose subject is what is kept after forward
        return
    costs = re.search(r"peak of a step: ([\d.]+) MB before, ([\d.]+) MB after .+; time: ", stdout)
    assert costs, stdout
    assert float(costs[2]) < float(costs[1])


def test_readme_names_them() -> None:
    text = (ROOT / "examples" / "README.md").read_text()
    assert EXAMPLES
    for example in EXAMPLES:
        assert f"`{example.name}`" in text
