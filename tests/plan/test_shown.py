"""Proves: what a plan shows is what it is: table, figure, page and command line."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import memopt
from memopt.__main__ import main
from tests.plan.models import chain, shared

EVERYTHING = 1 << 30


@pytest.fixture(scope="module")
def plan() -> memopt.Plan:
    model, batch = chain()
    rich = memopt.plan(model, batch, EVERYTHING, measure=False)
    return rich.within(int(0.5 * rich.plain_peak))


def test_table(plan: memopt.Plan) -> None:
    """Each block is in one line, with its fate, bytes and milliseconds; sums are right."""
    text = str(plan)
    assert text.startswith("Chain within ")
    assert f"{plan.peak / 1e6:,.1f} MB predicted" in text
    for block in plan.blocks:
        assert str(block.choice) in text
    assert "Besides:" in text
    assert sum(block.saved for block in plan.blocks) > 0


def test_a_table_without_rich(plan: memopt.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert "blocks.0" in str(plan)


def test_a_figure_with_the_usual_settings(plan: memopt.Plan, tmp_path: Path) -> None:
    path = tmp_path / "pareto.png"
    curve = plan.pareto(path)
    assert path.read_bytes().startswith(b"\x89PNG")
    names = [point.name for point in curve.settings]
    assert names == [
        "keep all",
        "recipes only",
        "each block checkpointed",
        "2 segments (sqrt)",
    ]
    keep, _, checkpointed, segmented = curve.settings
    assert keep.peak == plan.plain_peak
    assert keep.seconds == pytest.approx(plan.plain_seconds)
    assert checkpointed.peak < segmented.peak < keep.peak
    assert checkpointed.seconds > keep.seconds


def test_a_segment_is_what_checkpoint_sequential_takes() -> None:
    """The bytes of the drawn setting are those of the real one."""
    from torch import Tensor

    from memopt.plan.curve import curve_of
    from tests.plan.models import Chain
    from tests.plan.support import allocated_above

    class InSegments(Chain):
        def forward(self, ids: Tensor) -> Tensor:
            x = memopt.checkpoint_sequential(self.blocks, 2, self.embed(ids))
            return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())

    model, batch = chain()
    plan = memopt.plan(model, batch, EVERYTHING, measure=False)
    point = curve_of(plan.profile, plan.terms, 2).settings[-1]
    real = InSegments([4] * 6)
    measured = plan.profile.base + allocated_above(real, batch)
    assert point.peak == pytest.approx(measured, rel=0.03)


def test_a_page(plan: memopt.Plan, tmp_path: Path) -> None:
    """Whole, and with nothing from a network; the curve has a point for each setting."""
    text = plan.to_html(tmp_path / "plan.html")
    assert (tmp_path / "plan.html").read_text() == text
    assert "http" not in text
    assert text.count("<circle") == 5
    assert "this plan" in text
    assert "blocks.0" in text


def test_a_block_that_is_called_often_is_one_line() -> None:
    model, batch = shared()
    plan = memopt.plan(model, batch, EVERYTHING, measure=False)
    assert [block.path for block in plan.blocks] == ["blocks.0", "blocks.1"]
    kept = plan.profile.option(0, plan.blocks[0].choice, with_recipes=True).resident
    assert plan.blocks[0].kept >= 3 * kept - 10_000


def test_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all of its files; the JSON is one that can be loaded."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    files = {name: tmp_path / f"plan.{name}" for name in ("json", "html", "png")}
    arguments = ["plan", "tests.plan.models:chain", "--budget", "2.4MB", "--largest-batch"]
    for name, path in files.items():
        arguments += [f"--{name}", str(path)]
    assert main([*arguments, "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert "Chain within 2.289 MiB (2.4 MB)" in text
    assert "estimated for a GPU" in text
    assert re.search(r"Within the budget fit \d+ rows", text)
    assert all(path.exists() for path in files.values())
    page = files["html"].read_text()
    assert "A plan: Chain within" in page
    assert 'id="timeline"' in page
    assert 'id="curve"' in page
    assert memopt.Plan.load(files["json"]).budget == 2_400_000
    assert json.loads(files["json"].read_text())["model"] == "Chain"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget", "1KB"], "the floor, got 1000 bytes"),
        (["--budget", "lots"], "budget must be bytes"),
        (["--budget", "1GB", "--batch", "0"], "must be at least 1"),
    ],
)
def test_command_says_what_cannot_be(
    arguments: list[Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "tests.plan.models:chain", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_largest_batch(plan: memopt.Plan) -> None:
    """One row more than it says is above the budget; with more memory more fit."""
    from memopt.accumulate.fit import resized
    from memopt.plan.batch import _peak

    assert plan.live is not None
    rows = plan.largest_batch()
    make = resized(plan.live.step.batch, 0)
    assert _peak(plan.live, make(rows), 1) <= plan.budget < _peak(plan.live, make(rows + 1), 1)
    assert plan.largest_batch("50MB") > rows
    assert plan.largest_batch("0.5MB") == 0
