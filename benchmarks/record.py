"""The JSON file of a run: what was measured, on which machine, with which versions. NOTES.md lists
its fields.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import cli

SCHEMA = 1
CPU = torch.device("cpu")


class Record:
    """The results of one run, rewritten whole after every case, so that an interrupted run loses
    one case at most.

    With `resume` the measured cases of an existing file are kept, provided that it is of the same
    machine, versions and settings; otherwise it is started afresh, and `stale` says what differed.
    """

    def __init__(self, path: Path, header: dict[str, Any], resume: bool) -> None:
        self.path = path
        self.header = header
        self.cases: dict[str, dict[str, Any]] = {}
        self.stale: list[str] = []
        if resume and path.exists():
            found = json.loads(path.read_text())
            must_agree = ("schema", "machine", "versions", "settings")
            self.stale = [name for name in must_agree if found.get(name) != header[name]]
            if not self.stale:
                self.cases = {
                    key: case for key, case in found["cases"].items() if "variants" in case
                }
                self.header = {**header, "commands": found["commands"] + header["commands"]}

    @property
    def run(self) -> dict[str, Any]:
        """All that the file holds."""
        return {**self.header, "cases": self.cases}

    def add(self, key: str, case: dict[str, Any]) -> None:
        self.cases[key] = case
        self.save()

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        partial.write_text(self.text())
        os.replace(partial, self.path)

    def text(self) -> str:
        """One line for each case: a file that diffs, greps and reads well."""
        head = json.dumps(self.header, indent=1).removesuffix("\n}")
        cases = ",\n".join(
            f"  {json.dumps(k)}: {json.dumps(case)}" for k, case in self.cases.items()
        )
        return f'{head},\n "cases": {{\n{cases}\n }}\n}}\n'


def begin(
    out: Path,
    op: str,
    goals: Mapping[str, float],
    settings: dict[str, Any],
    argv: Sequence[str] | None,
    device: torch.device = CPU,
) -> Record:
    """A file that holds no case yet; the rest as header() takes it."""
    return Record(out, header(op, goals, settings, argv, device), resume=False)


def header(
    op: str,
    goals: Mapping[str, float],
    settings: dict[str, Any],
    argv: Sequence[str] | None,
    device: torch.device,
    copy_bandwidths: Mapping[int, float] | None = None,
) -> dict[str, Any]:
    """Everything in the file but the cases.

    Args:
        goals: direction to the least wanted ratio to the baseline.
        argv: the benchmark's arguments; None: those of this process.
        copy_bandwidths: threads to bytes per second.
    """
    arguments = sys.argv[1:] if argv is None else argv
    now = datetime.datetime.now(datetime.timezone.utc)
    return {
        "schema": SCHEMA,
        "op": op,
        "date": now.isoformat(timespec="seconds"),
        "commands": [" ".join([cli.command(op), *arguments])],
        "goals": dict(goals),
        "settings": settings,
        "machine": machine(device),
        "load_average": round(os.getloadavg()[0], 2),
        "versions": versions(),
        "copy_gb_per_s": {
            str(threads): round(b / 1e9, 2) for threads, b in (copy_bandwidths or {}).items()
        },
    }


def machine(device: torch.device) -> dict[str, Any]:
    """Processor, cores, caches, memory, and the GPU where `device` is one."""
    facts: dict[str, Any] = {
        "system": platform.system(),
        "architecture": platform.machine(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "caches": _caches(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "libc": " ".join(platform.libc_ver()),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts["gpu"] = {
            "name": properties.name,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "multiprocessors": properties.multi_processor_count,
            "l2_mib": round(properties.L2_cache_size / 2**20, 1),
            "capability": f"{properties.major}.{properties.minor}",
            "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        }
    return facts


def versions() -> dict[str, Any]:
    import memopt

    changed = _output(
        "git", "status", "--porcelain", "--untracked-files=no", "--", "csrc", "memopt", "setup.py"
    )
    commit = _output("git", "rev-parse", "HEAD")
    return {
        "memopt": memopt.build_info(),
        "commit": commit and commit + ("+changes" if changed else ""),
        "torch": torch.__version__,
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()


def _caches() -> dict[str, str]:
    """Size of each cache of the first core, by name: `{"L1d": "32K", ...}`."""
    caches = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        kind = {"Data": "d", "Instruction": "i"}.get((index / "type").read_text().strip(), "")
        caches["L" + (index / "level").read_text().strip() + kind] = (
            (index / "size").read_text().strip()
        )
    return caches


def _output(*command: str) -> str | None:
    """The output of a command, or None if it is not there or fails."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
