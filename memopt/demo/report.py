"""The demo's table and its JSON."""

from __future__ import annotations

import json
import math
import os
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import memopt
from memopt.demo.results import Agreement, Result, agreement
from memopt.demo.settings import DemoSettings
from memopt.memory.sizes import MB
from memopt.show.sections import Section, Tables


def comparison(results: list[Result]) -> Tables:
    """A row for each mode: final loss, four figures with their ratios to eager's below, equality.

    Two lines to a row, so that it fits into 80 columns.
    """
    figures = {result.mode.name: _figures(result) for result in results if result.losses}
    eager = figures.get("eager", {})
    rows = []
    for result in results:
        name = result.mode.name
        if name not in figures:
            rows.append([name, *[""] * 5, result.failure or "not begun"])
            continue
        cells = [
            f"{value:,.{0 if key == 'tokens_per_s' else 1}f}\n{_ratio(value, eager.get(key))}"
            for key, value in figures[name].items()
        ]
        remark = result.failure or _remark(result, agreement(result, results))
        rows.append([name, f"{result.losses[-1]:.3f}", *cells, remark])
    headings = (
        *("Mode", "final loss", "tokens per s", "step ms", "kept MB", "peak MB"),
        "Losses of all steps",
    )
    below = (
        "Below each figure: relative to eager. Step: the median. Kept: for backward, when "
        "forward ends. Peak: of forward and backward. Both without weights and optimizer state; "
        "1 MB is 10^6 bytes."
    )
    return Tables("", [Section("", headings, rows)], [below])


def write_json(
    path: Path, settings: DemoSettings, results: list[Result], interrupted: bool
) -> None:
    record = _record(settings, results, interrupted)
    path.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")


def _figures(result: Result) -> dict[str, float]:
    assert result.memory is not None  # measured before the first step
    return {
        "tokens_per_s": result.tokens_per_s,
        "step_ms": result.median_ms,
        "saved_mb": result.memory.saved / MB,
        "peak_mb": result.memory.peak / MB,
    }


def _ratio(value: float, eager: float | None) -> str:
    return "" if not eager else f"{value / eager:.2f}x"


def _remark(result: Result, agreed: Agreement | None) -> str:
    if agreed is None:
        reference = result.mode.reference
        return f"({reference} not run)" if reference else ""
    if agreed.equal:
        return f"= {agreed.reference}'s,\nevery bit"
    text = f"{agreed.reference}'s\n± {agreed.largest_difference:.1e}"
    return f"{text}: should be equal!" if agreed.promised else text


def _record(settings: DemoSettings, results: list[Result], interrupted: bool) -> dict[str, Any]:
    return {
        "command": _command(settings),
        "settings": {
            "text": None if settings.text is None else str(settings.text),
            "device": str(settings.device),
            "dtype": settings.dtype_name,
            "steps": settings.steps,
            "seed": settings.seed,
            "batch": settings.preset.batch,
            "learning_rate": settings.preset.learning_rate,
            "model": asdict(settings.preset.size),
        },
        "interrupted": interrupted,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "memopt": memopt.__version__,
        },
        "build": memopt.build_info(),
        "machine": _machine(settings.device),
        "modes": [_mode_record(result, results) for result in results],
    }


def _command(settings: DemoSettings) -> str:
    """The command that runs the same again."""
    modes = ",".join(mode.name for mode in settings.modes)
    text = "" if settings.text is None else f" --text {settings.text.name}"
    return (
        f"python -m memopt demo --device {settings.device} --dtype {settings.dtype_name} "
        f"--steps {settings.steps} --seed {settings.seed} --modes {modes}{text}"
    )


def _mode_record(result: Result, results: list[Result]) -> dict[str, Any]:
    agreed = agreement(result, results)
    return {
        "mode": result.mode.name,
        "failure": result.failure,
        "figures": _figures(result) if result.losses else None,
        "agreement": None
        if agreed is None
        else {
            "reference": agreed.reference,
            "promised": agreed.promised,
            "bit_equal": agreed.equal,
            "steps": agreed.steps,
            "largest_difference": _finite(agreed.largest_difference),
        },
        "losses": [_finite(loss) for loss in result.losses],
        "step_ms": result.step_ms,
        "memory": None if result.memory is None else asdict(result.memory),
    }


def _finite(value: float) -> float | None:
    """JSON has neither NaN nor infinity."""
    return value if math.isfinite(value) else None


def _machine(device: torch.device) -> dict[str, Any]:
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
