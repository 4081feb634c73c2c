"""The ops' figure, from the JSON files: every case's speed-up over ATen as a dot, with each group's
geometric mean and its goal. `python -m memopt bench --report` draws it anew. And what the other
benchmarks draw with.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display needed
import matplotlib.pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.ticker import StrMethodFormatter

from benchmarks.cli import DIRECTIONS
from benchmarks.summary import describe, geometric_mean, measured

COLOURS = {"float32": "#3465a4", "bfloat16": "#ce5c00", "float16": "#4e9a06", "float64": "#75507b"}
OPS = {
    "gelu": "GELU",
    "layer_norm": "LayerNorm",
    "layer_norm_gelu": "LayerNorm+GELU",
    "rms_norm": "RMSNorm",
    "add_layer_norm": "add+LayerNorm",
    "add_rms_norm": "add+RMSNorm",
    "silu": "SiLU",
    "relu": "ReLU",
    "quick_gelu": "QuickGELU",
    "relu_squared": "ReLU squared",
    "swiglu": "SwiGLU",
    "geglu": "GEGLU",
    "swiglu_halves": "SwiGLU, halves",
    "swiglu_interleaved": "SwiGLU, interleaved",
    "gelu_dropout": "GELU+dropout",
    "dropout_add_layer_norm": "dropout+add+LayerNorm",
    "layer_norm_linear": "LayerNorm+Linear",
    "gelu_linear": "GELU+Linear",
    "mlp_gpt2": "GPT-2's MLP",
    "mlp_llama": "Llama's MLP",
}
"""Others are shown by the name that they have."""

FORMS = {None: "", "none": " (erf)", "tanh": " (tanh)"}


def draw(runs: Sequence[dict[str, Any]], out: Path) -> None:
    """A panel for each direction, in it one line for each op, above each other the element types.
    Ratios are on a logarithmic axis: half the time is as far from 1 as twice the time.
    """
    lines: dict[str, dict[str, list[dict[str, Any]]]] = {}
    goals: dict[tuple[str, str], float] = {}
    for run in runs:
        for case in measured(run):
            op, direction = _name(case), case["direction"]
            lines.setdefault(op, defaultdict(list))[direction].append(case)
            if direction in run["goals"]:
                goals[op, direction] = run["goals"][direction]
    found = [case for of_op in lines.values() for cases in of_op.values() for case in cases]
    dtypes = list(dict.fromkeys(case["dtype"] for case in found))
    measured_ones = {case["direction"] for case in found}
    directions = [direction for direction in DIRECTIONS if direction in measured_ones]

    figure, panels = plt.subplots(
        1,
        len(directions),
        figsize=(2 + 3.4 * len(directions), 1.4 + 0.34 * len(lines)),
        layout="constrained",
        sharex=True,
        sharey=True,
        squeeze=False,
    )
    for axes, direction in zip(panels[0], directions, strict=True):
        axes.axvline(1, color="grey", lw=1, zorder=1)
        for y, (op, of_op) in enumerate(lines.items()):
            for number, dtype in enumerate(dtypes):
                height = y + 0.44 * ((number + 0.5) / len(dtypes) - 0.5)
                chosen = [case for case in of_op[direction] if case["dtype"] == dtype]
                if chosen:
                    _dots(axes, height, chosen, COLOURS[dtype])
            if (op, direction) in goals:
                goal = goals[op, direction]
                axes.vlines(goal, y - 0.4, y + 0.4, color="black", lw=1, ls=":", zorder=2)
        axes.set_title(direction, fontsize=9)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}x"))
        axes.grid(axis="x", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_yticks(range(len(lines)), list(lines))
    panels[0][0].tick_params(axis="y", labelsize=8)
    panels[0][0].set_ylim(len(lines) - 0.4, -0.6)
    middle = panels[0][len(directions) // 2]
    middle.set_xlabel(
        "time of ATen / time of memopt, in the same run (right is faster)", fontsize=9
    )
    figure.suptitle(describe(*runs), fontsize=8, x=0.01, ha="left")
    handles = _legend(dtypes, bool(goals))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=130)
    plt.close(figure)


def _dots(axes: Any, height: float, cases: Sequence[dict[str, Any]], colour: str) -> None:
    """Small sizes as hollow dots, those beyond the caches as full ones; a bar at their mean."""
    ratios = [case["variants"]["memopt"]["ratio"]["median"] for case in cases]
    faces = [colour if _beyond_cache(case) else "white" for case in cases]
    axes.scatter(ratios, [height] * len(ratios), s=16, c=faces, edgecolors=colour, zorder=3)
    mean = geometric_mean(ratios)
    axes.vlines(mean, height - 0.14, height + 0.14, color=colour, lw=2.5, zorder=4)


def _name(case: dict[str, Any]) -> str:
    op = str(case["op"])
    return OPS.get(op, op) + FORMS[case["approximate"]]


def _beyond_cache(case: dict[str, Any]) -> bool:
    """Whether one matrix of the case is larger than 32 MiB, a common last-level cache."""
    element = {"float64": 8, "float32": 4}.get(case["dtype"], 2)
    return bool(case["rows"] * case["cols"] * element > 32 << 20)


def _legend(dtypes: Sequence[str], goals: bool) -> list[Line2D]:
    def dot(label: str, colour: str, face: str) -> Line2D:
        return Line2D([], [], ls="", marker="o", mec=colour, mfc=face, label=label)

    handles = [dot(dtype, COLOURS[dtype], COLOURS[dtype]) for dtype in dtypes]
    handles.append(dot("matrix up to 32 MiB", "black", "white"))
    handles.append(
        Line2D([], [], ls="", marker="|", ms=10, mew=2.5, color="black", label="geometric mean")
    )
    if goals:
        handles.append(Line2D([], [], color="black", lw=1, ls=":", label="goal"))
    return handles


def with_quartiles(
    axes: Any, points: Iterable[tuple[float, Mapping[str, float]]], **style: Any
) -> None:
    """A mark at each x and median, with a bar from quartile to quartile; in the order of x."""
    ordered = sorted(
        (x, s["median"], s["median"] - s["q1"], s["q3"] - s["median"]) for x, s in points
    )
    if ordered:
        x, y, below, above = zip(*ordered, strict=True)
        axes.errorbar(x, y, yerr=(below, above), **style)
