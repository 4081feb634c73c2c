"""Proves: every file of examples/ runs by itself, ends without an error, says the peak and the time
of a step before and after, and is in the folder's README. Those that want a library which is not
here are skipped.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
IMPORTED = ("torch", "torch._dynamo", "transformers", "transformers.trainer", "memopt")
"""What is imported once for all examples: it takes longer than most of them do. Each runs in a
process of its own, which is forked from one that did nothing else.
"""
PATIENCE_S = 300  # of a busy machine

pytestmark = pytest.mark.slow


def run(example: Path, folder: Path) -> None:
    """As `python example.py` does, with its output in files."""
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), descriptor)
    sys.argv = [str(example)]
    sys.path.insert(0, str(example.parent))
    runpy.run_path(str(example), run_name="__main__")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_runs(example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    process = context.Process(target=run, args=(example, tmp_path))
    process.start()
    process.join(PATIENCE_S)
    if process.is_alive():
        process.kill()
        process.join()
    stdout, stderr = ((tmp_path / name).read_text() for name in ("stdout", "stderr"))
    missing = re.search(r"No module named '(?!memopt|torch)(\w+)'", stderr)
    if missing:
        pytest.skip(f"no {missing[1]} here")
    assert process.exitcode == 0, stderr
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
