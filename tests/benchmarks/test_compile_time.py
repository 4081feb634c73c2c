"""Proves: the benchmark of compilation compares ways of one round, which take turns, and counts the
processor time of its processes.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import compile_time
from benchmarks.compile_time import MEMOPT, TORCH


def test_ratios_are_of_one_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The ways take turns at being first."""
    order: list[str] = []

    def seconds(name: str, way: str) -> float:
        order.append(way)
        return {TORCH: 10.0, MEMOPT: 12.0}[way] * len(order)

    monkeypatch.setattr(compile_time, "compile_seconds", seconds)
    out = tmp_path / "times.json"
    assert compile_time.main(["--rounds", "2", "--filter", "BERT", "--out", str(out)]) == 0
    assert order == [TORCH, MEMOPT, MEMOPT, TORCH]
    (case,) = json.loads(out.read_text())["cases"].values()
    found = case["variants"][MEMOPT]
    assert found["processor_seconds"] == [24.0, 36.0]
    assert found["over_torch"] == {"median": 1.65, "least": 0.9, "most": 2.4}
    assert "1.65 (0.90 to 2.40)" in capsys.readouterr().out


def test_seconds_are_of_this_process_and_its_children() -> None:
    before = compile_time.processor_seconds()
    assert before > 0
    assert sum(range(200_000)) > 0
    assert compile_time.processor_seconds() >= before
