"""Axes of a drawing in SVG: round numbers along them, lines across."""

from __future__ import annotations

import html
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Literal

CHARACTER = 6.6
"""About as wide is a character of the drawings' text, which is 11 units high."""
LINE = 14
"""Lines of the text are so far apart."""


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers from `low` to `high`: at most `most` times 1, 2 or 5 times a power of ten."""
    span = high - low
    if span <= 0:
        return [low]
    power: float = 10 ** math.floor(math.log10(span / most))
    step = next(s for s in (power, 2 * power, 5 * power, 10 * power) if span / s <= most)
    first = math.ceil(low / step - 1e-9)
    return [step * number for number in range(first, math.floor(high / step + 1e-9) + 1)]


AxisPlace = float | str
"""A number of the drawing's units, or a share of it: "40%"."""


def axis(
    side: Literal["left", "below"],
    values: list[float],
    at: Callable[[float], AxisPlace],
    begin: AxisPlace,
    end: AxisPlace,
) -> str:
    """A line across the drawing at each value, from `begin` to `end`, and the value beside it.

    Args:
        at: where on the axis a value is.
    """
    drawn = []
    for value in values:
        place = at(value)
        if side == "left":
            x1, y1, x2, y2 = begin, place, end, place
            text = f'x="{begin}" dx="-6" y="{place}" dy="4" text-anchor="end"'
        else:
            x1, y1, x2, y2 = place, begin, place, end
            text = f'x="{place}" y="{end}" dy="{LINE}" text-anchor="middle"'
        drawn.append(
            f'<line x1="{x1}" x2="{x2}" y1="{y1}" y2="{y2}" stroke="#0002"/>'
            f'<text class="tick" {text} fill="#444">{_tick_text(value, values)}</text>'
        )
    return "".join(drawn)


def axis_title(
    text: str, x: AxisPlace, y: AxisPlace, anchor: Literal["start", "end"], down: float = 0
) -> str:
    """Write what an axis has, and in which unit."""
    return (
        f'<text class="axis" x="{x}" y="{y}" dy="{down}" text-anchor="{anchor}" fill="#444">'
        f"{html.escape(text)}</text>"
    )


def _tick_text(value: float, all_of_axis: list[float]) -> str:
    """Write a value with as many digits as tell the ticks of an axis apart."""
    step = min((b - a for a, b in pairwise(all_of_axis)), default=value)
    digits = max(0, -math.floor(math.log10(step) + 1e-9)) if step > 0 else 0
    return f"{value:,.{digits}f}"
