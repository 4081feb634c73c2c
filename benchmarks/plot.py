"""Draws the figures of the README from the JSON files.

`python -m benchmarks.plot [--out FILE.png] [FILE ...]`: every case's speed-up over ATen as a dot,
with each group's geometric mean and its goal.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display needed
import matplotlib.pyplot as plt
from matplotlib.lines import Line2D

from benchmarks.cli import RESULTS, op_results
from benchmarks.summary import describe, geometric_mean, load, measured

COLOURS = {"float32": "#3465a4", "bfloat16": "#ce5c00", "float16": "#4e9a06", "float64": "#75507b"}
OPS = {"gelu": "GELU", "layer_norm": "LayerNorm", "layer_norm_gelu": "LayerNorm+GELU"}
OPS |= {"rms_norm": "RMSNorm"}
OPS |= {"add_layer_norm": "add+LayerNorm", "add_rms_norm": "add+RMSNorm"}
OPS |= {"silu": "SiLU", "relu": "ReLU", "quick_gelu": "QuickGELU", "relu_squared": "ReLU squared"}
OPS |= {"sigmoid": "sigmoid", "dropout": "dropout", "swiglu": "SwiGLU", "geglu": "GEGLU"}
OPS |= {"swiglu_halves": "SwiGLU, halves", "swiglu_interleaved": "SwiGLU, interleaved"}
OPS |= {"layer_norm_linear": "LayerNorm+Linear", "gelu_linear": "GELU+Linear"}
OPS |= {"mlp_gpt2": "GPT-2's MLP", "mlp_llama": "Llama's MLP"}
FORMS = {None: "", "none": " (erf)", "tanh": " (tanh)"}


def draw(runs: Sequence[dict[str, Any]], out: Path) -> None:
    """One line for each op and direction, above each other the element types."""
    lines: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    goals: dict[tuple[str, str], float] = {}
    for run in runs:
        for case in measured(run):
            line = (_name(case), case["direction"])
            lines[line].append(case)
            if case["direction"] in run["goals"]:
                goals[line] = run["goals"][case["direction"]]
    dtypes = list(dict.fromkeys(case["dtype"] for cases in lines.values() for case in cases))

    figure, axes = plt.subplots(figsize=(9, 1.4 + 0.5 * len(lines)), layout="constrained")
    axes.axvline(1, color="grey", lw=1, zorder=1)
    for y, (line, cases) in enumerate(lines.items()):
        for number, dtype in enumerate(dtypes):
            height = y + 0.44 * ((number + 0.5) / len(dtypes) - 0.5)
            chosen = [case for case in cases if case["dtype"] == dtype]
            if chosen:
                _dots(axes, height, chosen, COLOURS[dtype])
        if line in goals:
            axes.vlines(goals[line], y - 0.4, y + 0.4, color="black", lw=1, ls=":", zorder=2)
    axes.set_yticks(range(len(lines)), [f"{name}\n{direction}" for name, direction in lines])
    axes.tick_params(axis="y", labelsize=8)
    axes.set_ylim(len(lines) - 0.4, -0.6)
    axes.set_xlim(left=0)
    axes.set_xlabel("time of ATen / time of memopt, in the same run (right is faster)")
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    handles = _legend(dtypes, bool(goals))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8)
    axes.set_title(describe(runs[0]), fontsize=8, loc="left")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=160)
    plt.close(figure)


def _dots(axes: Any, height: float, cases: Sequence[dict[str, Any]], colour: str) -> None:
    """Small sizes as hollow dots, those beyond the caches as full ones; a bar at their mean."""
    ratios = [case["variants"]["memopt"]["ratio"]["median"] for case in cases]
    faces = [colour if _beyond_cache(case) else "white" for case in cases]
    axes.scatter(ratios, [height] * len(ratios), s=24, c=faces, edgecolors=colour, zorder=3)
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


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot", description=__doc__)
    parser.add_argument(
        "files", nargs="*", type=Path, help="default: benchmarks/results/cpu_OP.json"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "cpu.png")
    args = parser.parse_args()
    files = args.files or op_results()
    if not files:
        parser.error(f"no results in {RESULTS}: run `make bench` first")
    draw(load(files), args.out)
    print(args.out)


if __name__ == "__main__":
    main()
