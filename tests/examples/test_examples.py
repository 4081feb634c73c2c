"""Proves: every file of examples/ runs by itself, ends without an error, says the peak and the time
of a step before and after, and is in the folder's README. Those that want a library which is not
here are skipped.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_runs(example: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(example)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,  # of a busy machine
    )
    missing = re.search(r"No module named '(?!memopt|torch)(\w+)'", done.stderr)
    if missing:
        pytest.skip(f"no {missing[1]} here")
    assert done.returncode == 0, done.stderr
    if example.stem == "tensor_parallel":  # whose subject is what is kept after forward
        return
    costs = re.search(
        r"peak of a step: ([\d.]+) MB before, ([\d.]+) MB after .+; time: ", done.stdout
    )
    assert costs, done.stdout
    assert float(costs[2]) < float(costs[1])


def test_readme_names_them() -> None:
    text = (ROOT / "examples" / "README.md").read_text()
    assert EXAMPLES
    for example in EXAMPLES:
        assert f"`{example.name}`" in text
