"""The demo's figure: memory within one step, a panel per mode, and the loss curves below."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import MaxNLocator

from memopt.demo.memory import MemoryProfile
from memopt.demo.results import Result, agreement
from memopt.demo.settings import DemoSettings
from memopt.memory.sizes import MB, as_text
from memopt.show.figure import GREY, write_figure

MODE_COLORS = {
    "eager": "#5f6b76",
    "torch-checkpoint": "#d98a29",
    "fused": "#2a9d8f",
    "convert": "#8ab17d",
    "checkpoint": "#3b7dd8",
    "fused+checkpoint": "#7353ba",
    "fused+checkpoint+offload": "#c8467c",
}


def write_panels(path: Path, settings: DemoSettings, results: list[Result]) -> None:
    """Draw results that have trained at least one step."""
    columns = min(3 if len(results) <= 6 else 4, len(results))
    rows = math.ceil(len(results) / columns)
    heights = [2.4 * rows, 3.4]

    def draw(figure: Figure) -> None:
        figure.suptitle(_title(settings), x=0.01, ha="left", fontsize=13, fontweight="bold")
        above, below = figure.subfigures(2, 1, squeeze=False, height_ratios=heights)[:, 0]
        _draw_memory(above, results, rows, columns)
        _draw_losses(below.subplots(), results)

    write_figure(path, (11, sum(heights) + 0.8), draw)


def _title(settings: DemoSettings) -> str:
    size = settings.preset.size
    return (
        f"Training a GPT of {size.layers} layers, width {size.width}: memory in one step, and loss "
        f"({settings.device}, {settings.dtype_name})"
    )


def _draw_memory(figure: SubFigure, results: list[Result], rows: int, columns: int) -> None:
    """A panel per mode, with eager's outline behind."""
    profiles = {r.mode.name: r.memory for r in results if r.memory is not None}
    grid = list(figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat)
    for axes, (name, memory) in zip(grid, profiles.items(), strict=False):
        _draw_profile(axes, name, memory, None if name == "eager" else profiles.get("eager"))
    for axes in grid[len(profiles) :]:
        axes.set_visible(False)
    grid[0].set_xlim(0, max(memory.ms[-1] for memory in profiles.values()))
    grid[0].set_ylim(0, 1.2 * max(memory.peak for memory in profiles.values()) / MB)
    figure.supxlabel("ms into forward and backward (dotted: forward ends)", fontsize=9)
    figure.supylabel("MB beyond weights and optimizer state", fontsize=9)


def _draw_profile(
    axes: Axes, name: str, memory: MemoryProfile, eager: MemoryProfile | None
) -> None:
    saved, peak = f"kept {as_text(memory.saved)}", f"peak {as_text(memory.peak)}"
    if eager is not None:
        axes.step(eager.ms, _mb(eager.live), where="post", color=GREY, linewidth=0.8)
        saved += f", {memory.saved / eager.saved:.2f}x"
        peak += f", {memory.peak / eager.peak:.2f}x"
    color = MODE_COLORS[name]
    live = _mb(memory.live)
    axes.fill_between(memory.ms, live, step="post", color=color, alpha=0.3, linewidth=0)
    axes.step(memory.ms, live, where="post", color=color, linewidth=1.2)
    axes.axvline(memory.forward_ms, color=color, linestyle=":", linewidth=1)
    axes.set_title(name, color=color)
    corner: dict[str, Any] = {
        "transform": axes.transAxes,
        "ha": "right",
        "va": "top",
        "linespacing": 1.4,
    }
    axes.text(1, 1, f"{saved}\n{peak}", fontsize=8.5, **corner)


def _draw_losses(axes: Axes, results: list[Result]) -> None:
    """Curves take turns in drawing dashes: where they coincide, the line has all their colours."""
    dash = 3.0
    gap = dash * (len(results) - 1)
    for position, result in enumerate(results):
        axes.plot(
            range(1, len(result.losses) + 1),
            result.losses,
            color=MODE_COLORS[result.mode.name],
            linewidth=1.6,
            linestyle=(dash * position, (dash, gap)) if gap else "-",
            label=_legend(result, results),
        )
    axes.set_title("Training loss")
    axes.set_xlabel("step")
    axes.set_ylabel("nats per byte")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    legend = axes.legend(
        frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1), labelspacing=0.9
    )
    for line in legend.get_lines():
        line.set(linestyle="-", linewidth=3)


def _legend(result: Result, results: list[Result]) -> str:
    agreed = agreement(result, results)
    if agreed is None:
        return result.mode.name
    if agreed.equal:
        return f"{result.mode.name}\n= {agreed.reference}'s, every bit"
    return f"{result.mode.name}\n{agreed.reference}'s ± {agreed.largest_difference:.0e}"


def _mb(live: list[int]) -> list[float]:
    return [value / MB for value in live]
