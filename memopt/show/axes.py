"""Axes of a drawing in SVG: round numbers along them, lines across."""

from __future__ import annotations

import html
import math
from collections.abc import Callable
from itertools import pairwise

CHARACTER = 6.6
"""About as wide is a character of the drawings' text, which is 11 units high."""
LINE = 14
"""So far apart are lines of it."""


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers from `low` to `high`: at most `most` times 1, 2 or 5 times a power of ten."""
    span = high - low
    if span <= 0:
        return [low]
    power: float = 10 ** math.floor(math.log10(span / most))
    step = next(s for s in (power, 2 * power, 5 * power, 10 * power) if span / s <= most)
    first = math.ceil(low / step - 1e-9)
    return [step * number for number in range(first, math.floor(high / step + 1e-9) + 1)]


def tick_text(value: float, all_of_axis: list[float]) -> str:
    """With as many digits as tell the ticks of an axis apart."""
    step = min((b - a for a, b in pairwise(all_of_axis)), default=value)
    digits = max(0, -math.floor(math.log10(step) + 1e-9)) if step > 0 else 0
    return f"{value:,.{digits}f}"


def left_axis(values: list[float], y: Callable[[float], float], left: float, right: float) -> str:
    """A line across at each value, and the value left of it."""
    return "".join(
        f'<line x1="{left}" x2="{right}" y1="{y(v)}" y2="{y(v)}" stroke="#ddd"/>'
        f'<text class="tick" x="{left - 6}" y="{y(v) + 4}" text-anchor="end" fill="#444">'
        f"{tick_text(v, values)}</text>"
        for v in values
    )


def lower_axis(values: list[float], x: Callable[[float], float], top: float, bottom: float) -> str:
    """The same below."""
    return "".join(
        f'<line x1="{x(v)}" x2="{x(v)}" y1="{top}" y2="{bottom}" stroke="#eee"/>'
        f'<text class="tick" x="{x(v)}" y="{bottom + LINE}" text-anchor="middle" fill="#444">'
        f"{tick_text(v, values)}</text>"
        for v in values
    )


def title_left(text: str, top: float) -> str:
    """What the left axis has, and in which unit."""
    return f'<text class="axis" x="4" y="{top}" fill="#444">{html.escape(text)}</text>'


def title_below(text: str, right: float, bottom: float) -> str:
    """What the lower axis has, and in which unit."""
    return (
        f'<text class="axis" x="{right}" y="{bottom}" text-anchor="end" fill="#444">'
        f"{html.escape(text)}</text>"
    )
