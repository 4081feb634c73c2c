"""Proves what the benchmark of compiled models promises, without timing anything: ratios are of one
round, the verdict is on families, and table and figure show every way.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import compile as benchmark
from benchmarks import harness
from benchmarks.compile import MEMOPT, TORCH, Way
from benchmarks.harness import Effort


def ways(*names: str) -> dict[str, Way]:
    return {name: Way(10**6, 2 * 10**6, lambda: None) for name in names}


def test_ratios_are_of_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {TORCH: [1.0, 2.0], MEMOPT: [1.5, 3.0]}
    monkeypatch.setattr(harness, "alternate", lambda runs, clock, effort: (seconds, {}))
    found = benchmark.measure(ways(TORCH, MEMOPT), Effort())
    assert found["variants"][MEMOPT]["over_torch"] == {"median": 1.5, "q1": 1.5, "q3": 1.5}
    assert found["rounds"] == 2


def case(ratio: float) -> dict[str, Any]:
    over = {"median": ratio, "q1": ratio, "q3": ratio}
    return {"variants": {MEMOPT: {"over_torch": over, "most_bytes": 1, "held_bytes": 1}}}


def test_the_verdict_is_on_families() -> None:
    said = benchmark.verdict({"BERT": case(1.0), "GPT-2": case(1.04), "curve": case(9.0)})
    assert "1.020 of torch.compile's time" in said
    assert "at most 1.040 (GPT-2); goals 1.02 and 1.05 reached" in said
    assert "missed" in benchmark.verdict({"BERT": case(0.9), "GPT-2": case(1.06)})
    assert "No family" in benchmark.verdict({"curve": case(1.0)})


def test_the_figure_shows_both_curves(tmp_path: Path) -> None:
    variants = {
        name: case(ratio)["variants"][MEMOPT] | {"most_bytes": nbytes}
        for name, ratio, nbytes in (
            (TORCH, 1.0, 4 * 10**6),
            (f"{TORCH} 0.5", 1.2, 3 * 10**6),
            (MEMOPT, 1.0, 3 * 10**6),
            (f"{MEMOPT} 0.7", 1.1, 2 * 10**6),
        )
    }
    benchmark.draw(variants, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 5000
