"""Markdown tables of the ops' JSON files.

Cases are grouped by op, direction, element type and threads; a group's figure is the geometric mean
over its sizes, with its worst and best case. `python -m memopt bench --report` makes them anew.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Group = tuple[str, str, str, str]


def load(paths: Iterable[Path]) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in paths]


def measured(run: dict[str, Any]) -> list[dict[str, Any]]:
    """The cases of a run that have figures: neither skipped nor failed."""
    return [case for case in run["cases"].values() if "variants" in case]


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def operation(case: dict[str, Any]) -> str:
    """The op, with GELU's form where there is one: `gelu, tanh`."""
    return ", ".join(filter(None, (case["op"], case["approximate"])))


def speed_rows(run: dict[str, Any], variant: str = "memopt") -> list[list[str]]:
    """One row for each group of the run, of the ratio baseline time / variant time."""
    groups: dict[Group, list[dict[str, Any]]] = defaultdict(list)
    for case in measured(run):
        if variant in case["variants"]:
            group = (operation(case), case["direction"], case["dtype"], str(case["threads"]))
            groups[group].append(case)
    rows = []
    for group, cases in groups.items():
        figures = [case["variants"][variant] for case in cases]
        sizes = [f"{case['rows']}x{case['cols']}" for case in cases]
        ratios = sorted(zip([f["ratio"]["median"] for f in figures], sizes, strict=True))
        mean = geometric_mean([ratio for ratio, _ in ratios])
        goal = run["goals"].get(cases[0]["direction"])
        verdict = "" if goal is None else f"{goal:.1f}x {'reached' if mean >= goal else 'missed'}"
        ends = [f"{ratio:.2f}x ({where})" for ratio, where in (ratios[0], ratios[-1])]
        share = f"{100 * geometric_mean([f['fraction_of_copy'] for f in figures]):.0f} %"
        rows.append([*group, f"**{mean:.2f}x**", verdict, *ends, share])
    return rows


def other_variants(run: dict[str, Any]) -> list[str]:
    """The names of what was measured beside the baseline and memopt, in order of appearance."""
    names = {name: None for case in measured(run) for name in case["variants"]}
    baselines = {case["baseline"] for case in measured(run)}
    return [name for name in names if name not in baselines | {"memopt"}]


def memory_rows(run: dict[str, Any]) -> list[list[str]]:
    """Saved and peak bytes per element of forward+backward at the largest size, for each element
    type.
    """
    largest: dict[tuple[str, str], dict[str, Any]] = {}
    for case in measured(run):
        if case["direction"] == "forward+backward":
            group = (case["op"], case["dtype"])
            if group not in largest or case["ideal_bytes"] > largest[group]["ideal_bytes"]:
                largest[group] = case
    rows = []
    for (op, dtype), case in largest.items():
        elements = case["rows"] * case["cols"]
        row = [op, dtype, f"{case['rows']}x{case['cols']}"]
        for quantity in ("saved_bytes", "peak_bytes"):
            for name in (case["baseline"], "memopt"):
                row.append(f"{case['variants'][name][quantity] / elements:.2f}")
        rows.append(row)
    return rows


def quartiles(found: Mapping[str, float], digits: int = 2) -> str:
    """A median, and the quartiles."""
    return f"{found['median']:.{digits}f} ({found['q1']:.{digits}f} to {found['q3']:.{digits}f})"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = [head, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |"
        for row in lines
    )


def describe(run: dict[str, Any], *others: dict[str, Any]) -> str:
    """The line above the tables: machine, versions, dates. `others` are of the same machine."""
    machine, versions = run["machine"], run["versions"]
    gpu = machine.get("gpu")
    where = (
        f"{gpu['name']} (driver {gpu['driver']})"
        if gpu
        else f"{machine['processor']}, {machine['cores']} cores"
    )
    dates = sorted({each["date"][:10] for each in (run, *others)})
    days = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    facts = [where, f"torch {versions['torch']}", days]
    copies = ", ".join(
        f"{speed:g} GB/s on {n} thread(s)" for n, speed in run["copy_gb_per_s"].items()
    )
    if gpu and copies:
        copies = f"{run['copy_gb_per_s']['1']:g} GB/s"
    if copies:
        facts.append(f"a plain copy moves {copies}")
    return "; ".join(facts) + "."


def report(runs: Sequence[dict[str, Any]]) -> str:
    """The whole text; `runs` are of one machine, and at least one."""
    speed = [row for run in runs for row in speed_rows(run)]
    others = [
        [name, *row[:5], *row[6:]]
        for run in runs
        for name in other_variants(run)
        for row in speed_rows(run, name)
    ]
    memory = [row for run in runs for row in memory_rows(run)]
    ends = ["worst case", "best case", "of copy bandwidth"]
    parts = [
        describe(*runs),
        "Speed-up over ATen in the same run (geometric mean):",
        table(["op", "direction", "dtype", "threads", "speed-up", "goal", *ends], speed),
        "The same for other variants (memopt+y: a backward that writes the op's output again):",
        table(["variant", "op", "direction", "dtype", "threads", "speed-up", *ends], others),
        "Bytes per element of forward+backward, saved for backward and at the peak:",
        table(["op", "dtype", "size", "saved, ATen", "saved", "peak, ATen", "peak"], memory),
    ]
    unmeasured = [
        f"- {key}: {case.get('error') or case.get('skipped')}"
        for run in runs for key, case in run["cases"].items() if "variants" not in case
    ]  # fmt: skip
    if unmeasured:
        parts += ["Not measured:", "\n".join(unmeasured)]
    return "\n\n".join(parts) + "\n"
