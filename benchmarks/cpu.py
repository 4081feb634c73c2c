"""All benchmarks on this CPU, then the tables and the figure: what `make bench` runs.

`python -m benchmarks.cpu [OPTIONS]`: the options are those of each op benchmark (`--quick`,
`--resume`, `--threads 1`, ...) but for the device and the files: benchmarks/results/cpu_OP.json,
cpu_summary.md and cpu.png. Those of OTHERS follow, with `--quick` and `--seed` alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks import plot, summary
from benchmarks.cli import OPS, RESULTS, parse

ROOT = Path(__file__).parent.parent
OTHERS = ("checkpoint_overhead", "host_time", "offload", "compile", "plan", "models", "head")


def main(options: list[str]) -> int:
    """Returns 1 if a benchmark failed; the others are run and summed up all the same."""
    args = parse("cpu", options)  # a wrong option is told once, before anything runs
    files = [RESULTS / f"cpu_{op}.json" for op in OPS]
    failed = False
    for op, file in zip(OPS, files, strict=True):
        failed |= run("ops", [op, *options, "--device", "cpu"], file)
    effort = ["--seed", str(args.seed), *(["--quick"] if args.quick else [])]
    for name in OTHERS:
        failed |= run(name, effort, RESULTS / f"cpu_{name}.json")
    runs = summary.load(files)
    text = summary.report(runs)
    (RESULTS / "cpu_summary.md").write_text(text)
    plot.draw(runs, RESULTS / "cpu.png")
    print(f"\n{text}\n{RESULTS / 'cpu_summary.md'}\n{RESULTS / 'cpu.png'}")
    return 1 if failed else 0


def run(name: str, options: list[str], out: Path) -> bool:
    """Runs one benchmark; returns whether it failed."""
    # A process for each, so that one's heap does not become the next one's.
    command = [sys.executable, "-m", f"benchmarks.{name}", *options]
    command += ["--out", os.path.relpath(out, ROOT)]
    return subprocess.run(command, cwd=ROOT).returncode != 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
