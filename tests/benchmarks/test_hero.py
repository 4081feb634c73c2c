"""Proves: the first figure of the README has one measure of time: what is drawn ends where the
labels say that a step ends.
"""

from __future__ import annotations

import json

import pytest

pytest.importorskip("matplotlib")

from benchmarks.cli import RESULTS
from benchmarks.hero import course


def test_each_way_is_drawn_as_long_as_its_label_says() -> None:
    ways = json.loads((RESULTS / "cpu_hero.json").read_text())["cases"]["gpt"]["variants"]
    for name, way in ways.items():
        times, live = course(way)
        assert times[-1] == pytest.approx(way["over_eager"])
        assert times == sorted(times)
        assert max(live) == pytest.approx(way["peak_bytes"] / 1e6)
        assert (times[-1] == pytest.approx(1.0)) == (name == "eager")
