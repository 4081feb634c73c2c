"""How long memopt takes to compile, as `pip install --no-build-isolation .` does in a new checkout.

`python -m benchmarks.build [--cuda ARCHITECTURES] [--out FILE.json]` builds a wheel of the files
that git tracks, in a copy, without ccache, and writes the JSON. `--cuda 9.0` builds CUDA kernels
for these architectures too (as TORCH_CUDA_ARCH_LIST names them), which needs nvcc. The processor
time is of all compilers together; by the clock it depends on what else runs.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import record
from benchmarks.cli import RESULTS

OP = "build"
ROOT = Path(__file__).parent.parent


def tracked_copy(folder: Path) -> None:
    """Copies what git tracks, as it is now."""
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    for name in names.split("\0"):
        if name and (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)


def build(cuda: str) -> dict[str, float]:
    """Seconds by the clock and of processors."""
    environment = {**os.environ, "CCACHE_DISABLE": "1", "MEMOPT_CUDA": "1" if cuda else "0"}
    if cuda:
        environment["TORCH_CUDA_ARCH_LIST"] = cuda
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "-q"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tracked_copy(folder)
        before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        subprocess.run([*command, "-w", "wheels", "."], cwd=folder, check=True, env=environment)
        seconds, after = time.monotonic() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": round(seconds, 1), "processor_seconds": round(processor, 1)}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{OP}")
    parser.add_argument("--cuda", default="", metavar="ARCHITECTURES", help="default: CPU alone")
    parser.add_argument(
        "--out", type=Path, help="JSON file; default: benchmarks/results/cpu_build.json"
    )
    args = parser.parse_args(argv)
    results = record.begin(
        args.out or RESULTS / "cpu_build.json", OP, {}, {"cuda": args.cuda}, argv
    )
    found = build(args.cuda)
    results.add("wheel", {"variants": {"memopt": found}})
    minutes, seconds = found["processor_seconds"] / 60, found["seconds"]
    print(f"{minutes:.1f} minutes of processor time, {seconds:.0f} s by the clock")
    return 0


if __name__ == "__main__":
    sys.exit(main())
