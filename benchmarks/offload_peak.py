"""The peak of one way's steps: on an accelerator by PyTorch's count, on a CPU the resident memory
of a process that does nothing else (`python -m benchmarks.offload_peak`, what main() says).
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import memopt
from benchmarks.offload_ways import Size, Stack, Way, ways

ROOT = Path(__file__).parent.parent
STEPS = 3
# Each tensor of a page or more is mapped by itself, and its pages go when it goes. By default glibc
# keeps much of what is freed for the next allocation, and that would be measured.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "4096", "MALLOC_MMAP_MAX_": "1000000"}


def peak_on_accelerator(step: Callable[[], object], device: torch.device) -> int:
    """The most bytes of tensors during two steps, above what was there before."""
    torch.accelerator.synchronize(device)
    memopt.offload.stats(wait=True)  # lets go of what the last step's copies held
    before: int = torch.accelerator.memory_allocated(device)
    torch.accelerator.reset_peak_memory_stats(device)
    for _ in range(2):
        step()
    torch.accelerator.synchronize(device)
    peak: int = torch.accelerator.max_memory_allocated(device)
    return peak - before


def peak_in_a_process(
    size: Size, stack: str, way: str, fraction: float, directory: Path, threads: int
) -> int | None:
    """The most resident memory of a process during three steps, above what it had before them; None
    where the system does not tell.
    """
    if not Path("/proc/self/status").exists():
        return None
    asked = {
        "size": dataclasses.asdict(size),
        "stack": stack,
        "way": way,
        "fraction": fraction,
        "directory": str(directory),
        "threads": threads,
    }
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.offload_peak", json.dumps(asked)],
        cwd=ROOT,
        env={**os.environ, **MALLOC},
        capture_output=True,
        text=True,
    )
    if ran.returncode != 0:
        raise RuntimeError(f"{way}: exit status {ran.returncode}: {ran.stderr.strip()[-300:]}")
    return int(ran.stdout)


def main(argv: list[str]) -> int:
    """Prints the bytes. Its one argument is JSON: what peak_in_a_process() was asked for."""
    asked: dict[str, Any] = json.loads(argv[0])
    torch.set_num_threads(asked["threads"])
    cpu = torch.device("cpu")
    stack = Stack(Size(**asked["size"]), cpu)
    found = ways(
        asked["stack"],
        cpu,
        Path(asked["directory"]),
        asked["fraction"],
        list(stack.blocks.parameters()),
    )
    (way,) = [way for way in found if way.name == asked["way"]]
    step = stack.step_of(way)
    # Modules that PyTorch imports at a first step count for no way.
    tiny = Stack(Size(64, 128, 1, 1, "float32"), cpu)
    tiny.step_of(Way("imports", checkpoint_wrapper))()
    before = _resident("VmRSS")
    for _ in range(STEPS):
        step()
    print(_resident("VmHWM") - before)
    return 0


def _resident(field: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at most since it began."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
