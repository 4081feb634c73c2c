"""Proves what the benchmark of recipes' host time promises, without timing anything: every
contender does the same step, figures are differences within a round for each saved tensor, and the
files name every case and contender.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import recipes_overhead as overhead
from benchmarks.harness import Effort
from benchmarks.recipes_overhead import CASES, CONTENDERS, FLOOR, LENGTH, OURS, PLAIN


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("contender", CONTENDERS)
def test_every_contender_does_the_same_step(case: str, contender: str) -> None:
    gradients = []
    for name in (PLAIN, contender):
        torch.manual_seed(0)
        x = torch.randn(4, 16, requires_grad=True)
        overhead.step(CASES[case], CONTENDERS[name], x, torch.ones_like(x))
        gradients.append(x.grad)
    assert torch.equal(*gradients)


def test_figures_are_differences_for_each_tensor() -> None:
    seconds = {PLAIN: [10e-6, 20e-6], FLOOR: [14e-6, 24e-6], OURS: [20e-6, 30e-6]}
    found = overhead.figures(seconds, saved_tensors=2)
    assert found[OURS]["added_us"]["median"] == pytest.approx(5)
    assert found[OURS]["over_identity_us"]["median"] == pytest.approx(3)
    assert "added_us" not in found[PLAIN]
    assert "over_identity_us" not in found[FLOOR]


@pytest.mark.slow
def test_the_file_names_every_case_and_contender(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    barely = Effort(rounds=3, min_rounds=3, sample_seconds=1e-6)
    monkeypatch.setattr(overhead, "QUICK", barely)
    out = tmp_path / "run.json"
    threads = torch.get_num_threads()
    try:
        assert overhead.main(["--quick", "--out", str(out)]) == 0
    finally:
        torch.set_num_threads(threads)
    cases = json.loads(out.read_text())["cases"]
    assert set(cases) == set(CASES)
    for case in cases.values():
        assert case["saved_tensors"] == LENGTH
        assert set(case["variants"]) == set(CONTENDERS)
    assert "over identity, goal 2.0 us" in capsys.readouterr().out
