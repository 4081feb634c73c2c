"""Proves what the benchmark of checkpoints' host time promises, without timing anything: that every
contender does the plain step, that added time is a difference within a round and how much of it is
recompute, and that the files name every case and contender, also one that is not installed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import checkpoint_overhead as overhead
from benchmarks import report_figures
from benchmarks.checkpoint_overhead import (
    CASES,
    FLOOR,
    OURS,
    PLAIN,
    SECOND_FORWARD,
    TORCH,
    Case,
)
from benchmarks.harness import Effort

HOOKS = {FLOOR, "identity hook, Python lambda"}
REENTRANT = {"torch, reentrant", overhead.FAIRSCALE}
NAME = "cpu_checkpoint_overhead.json"
UNSEEDED = "torch, non-reentrant, RNG not preserved"


@pytest.fixture
def barely_timed(monkeypatch: pytest.MonkeyPatch, restore_num_threads: None) -> None:
    """--quick with samples too short to mean anything."""
    monkeypatch.setattr(overhead, "QUICK", Effort(rounds=3, min_rounds=3, sample_seconds=1e-6))


@pytest.mark.slow
def test_the_files_have_every_case_and_contender(barely_timed: None, tmp_path: Path) -> None:
    argv = ["--quick", "--seed", "3", "--out", str(tmp_path / NAME)]
    assert overhead.main(argv) == 0
    run = json.loads((tmp_path / NAME).read_text())
    assert run["commands"] == [f"python -m benchmarks.checkpoint_overhead {' '.join(argv)}"]
    assert run["settings"]["seed"] == 3
    assert list(run["cases"]) == [case.name for case in CASES]
    contenders, missing = overhead.contenders()
    for name, case in run["cases"].items():
        assert set(case["variants"]) == {*contenders, SECOND_FORWARD}
        assert case["failed"] == missing
        assert (case["saved_tensors"] == 0) == (name == "empty")
        for contender, found in case["variants"].items():
            assert len(found["samples_us"]) == case["rounds"] == 3
            if contender not in (PLAIN, SECOND_FORWARD):
                # Where nothing is saved, only a reentrant backward runs the forward again.
                again = contender in REENTRANT or (name != "empty" and contender not in HOOKS)
                assert found["recomputes"] == int(again), (name, contender)
        added = case["variants"][FLOOR]["added_us"]["median"]
        assert (case["floor_us"], case["goal_us"]) == (added, pytest.approx(added + 25, abs=0.01))
    text = (tmp_path / NAME).with_suffix(".md").read_text()
    for name in [case.name for case in CASES]:
        assert f"## {name}\n" in text
    for contender in [*contenders, *missing, SECOND_FORWARD]:
        assert text.count(f"| {contender} ") == len(CASES)


def test_a_peer_that_is_not_installed_is_named_with_the_reason(
    barely_timed: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "fairscale.nn.checkpoint", None)  # makes its import fail
    monkeypatch.setattr(overhead, "CASES", CASES[:1])
    assert overhead.main(["--quick", "--out", str(tmp_path / NAME)]) == 0
    run = json.loads((tmp_path / NAME).read_text())
    assert "fairscale" not in run["versions"]
    assert "FairScale" not in run["cases"]["empty"]["variants"]
    assert "fairscale" in run["cases"]["empty"]["failed"]["FairScale"]
    assert "not measured: ModuleNotFoundError" in (tmp_path / NAME).with_suffix(".md").read_text()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_contender_computes_the_gradients_of_the_plain_step(case: Case) -> None:
    def gradients(name: str) -> list[Tensor | None]:
        torch.manual_seed(0)
        module = case.make()
        x = case.make_input()
        parameters = list(module.parameters())
        overhead.step(contenders[name](module), x, torch.ones_like(x))
        return [x.grad, *(p.grad for p in parameters)]

    contenders, _ = overhead.contenders()
    expected = gradients(PLAIN)
    for name in contenders:
        if name != UNSEEDED or "dropout" not in case.name:
            torch.testing.assert_close(gradients(name), expected, rtol=0, atol=0)


def test_the_floor_returns_the_very_tensor() -> None:
    tensor = torch.ones(2)
    assert overhead.return_argument(tensor) is tensor


def test_what_is_added_is_taken_within_rounds_and_a_recompute_is_taken_off_where_there_is_one() -> (
    None
):
    us = 1e-6
    seconds = {
        PLAIN: [10 * us, 20 * us, 40 * us],  # the machine gets slower from round to round
        FLOOR: [11 * us, 21 * us, 41 * us],
        OURS: [18 * us, 29 * us, 51 * us],
        TORCH: [22 * us, 34 * us, 58 * us],
        SECOND_FORWARD: [2 * us, 4 * us, 8 * us],
    }
    found = overhead.figures(seconds, {PLAIN: 0, FLOOR: 0, OURS: 1, TORCH: 1})
    assert found[FLOOR]["added_us"]["median"] == found[FLOOR]["beyond_us"]["median"] == 1.0
    assert found[OURS]["added_us"] == {"median": 9.0, "q1": 8.5, "q3": 10.0}
    assert found[OURS]["beyond_us"] == {"median": 5.0, "q1": 4.0, "q3": 5.5}
    assert found[OURS]["added_over_torch"]["median"] == pytest.approx(9 / 14, abs=1e-4)
    assert found[OURS]["beyond_over_torch"]["median"] == 0.5
    assert set(found[PLAIN]) == set(found[SECOND_FORWARD]) == {"us", "samples_us"}


def test_the_summary_of_the_ops_leaves_other_results_alone() -> None:
    assert "cpu_gelu" in report_figures.results_of("cpu")
    assert not {"cpu_demo", NAME.removesuffix(".json")} & {*report_figures.results_of("cpu")}
