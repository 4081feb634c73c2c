"""All op benchmarks on this CPU, then the tables and the figure: what `make bench` runs.

`python -m benchmarks.cpu [OPTIONS]`: the options are those of each benchmark (`--quick`,
`--resume`, `--threads 1`, ...) but for the device and the files: benchmarks/results/cpu_OP.json,
cpu_summary.md and cpu.png.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks import plot, summary
from benchmarks.cli import RESULTS, parse

ROOT = Path(__file__).parent.parent
OPS = ("layer_norm", "layer_norm_gelu", "gelu")


def main(options: list[str]) -> int:
    """Returns 1 if a benchmark failed; the others are run and summed up all the same."""
    parse("cpu", options)  # a wrong option is told once, before anything runs
    files = [RESULTS / f"cpu_{op}.json" for op in OPS]
    failed = False
    for op, file in zip(OPS, files, strict=True):
        # A process for each, so that one op's heap does not become the next one's.
        fixed = ["--device", "cpu", "--out", os.path.relpath(file, ROOT)]
        command = [sys.executable, "-m", f"benchmarks.{op}", *options, *fixed]
        failed |= subprocess.run(command, cwd=ROOT).returncode != 0
    runs = summary.load(files)
    text = summary.report(runs)
    (RESULTS / "cpu_summary.md").write_text(text)
    plot.draw(runs, RESULTS / "cpu.png")
    print(f"\n{text}\n{RESULTS / 'cpu_summary.md'}\n{RESULTS / 'cpu.png'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
