"""Proves: what a plan shows is what it is: table, figure, page and command line."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt.__main__ import main
from memopt._plan.curve import curve_of
from memopt._plan.figure import draw_curve
from memopt._plan.profile import StepSeconds
from memopt._plan.seconds import StageSeconds
from memopt.assignment import KEEP, Assignment
from memopt.memory.sizes import as_text
from tests.plan.models import Skipping, chain, shared
from tests.support.browser import dom_of, said_by

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


@pytest.mark.parametrize("width", [60, 80, 110])
def test_a_table_is_as_wide_as_the_terminal(
    plan: memopt.Plan, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    lines = str(plan).splitlines()
    assert max(map(len, lines)) <= width
    assert any("blocks.0" in line for line in lines)


def test_a_budget_is_said_as_it_was_given(plan: memopt.Plan, tmp_path: Path) -> None:
    """With the same in MB beside it, the unit of all else; also in a plan that was saved."""
    model, batch = chain()
    named = memopt.plan(model, batch, "24GiB", measure=False)
    named.save(tmp_path / "plan.json")
    for one in (named, memopt.Plan.load(tmp_path / "plan.json")):
        assert str(one).startswith("Chain within 24GiB (25,769.8 MB)\n")
        assert not re.search(r"\d [KMGT]i?B", str(one).replace(" MB", "").partition("\n")[2])
    assert str(plan).startswith(f"Chain within {plan.budget / 1e6:,.1f} MB\n")


def test_without_a_budget_the_text_says_whose_it_is() -> None:
    model, batch = chain()
    text = str(memopt.plan(model, batch, measure=False))
    assert re.match(r"Chain within the memory that is free \([\d,.]+ MB\)\n", text)


def test_a_model_in_evaluation_mode_is_said_to_be_in_it() -> None:
    """A step of training takes more, and models of transformers are loaded so."""
    model, batch = chain()
    for training in (True, False):
        model.train(training)
        reports = (
            memopt.plan(model, batch, "1GB", measure=False),
            memopt.anatomy(model, batch),
            memopt.convert(chain()[0].train(training), batch),
        )
        said = ["the model is in evaluation mode" in str(report) for report in reports]
        assert said == [not training] * 3


def test_peaks_are_those_of_an_anatomy(plan: memopt.Plan) -> None:
    """One number for one thing: with the plan and without it, in text, page and anatomy."""
    model, batch = chain()
    plain = memopt.anatomy(model, batch, measure=False)
    assert plan.plain_peak == plain.peak.total
    assert plan.trace is not None
    assert plan.trace.peak.total == plan.peak
    peaks = {f"{peak / 1e6:,.1f} MB" for peak in (plan.peak, plan.plain_peak)}
    text = plan.to_html(anatomy=plain)
    drawn = re.findall(r'font-weight="bold">peak ([\d.,]+ MB)<', text)
    assert len(peaks) == 2
    assert set(drawn) == peaks
    assert set(re.findall(r"([\d.,]+ MB)", text.partition('id="peak">')[2][:70])) == peaks


def took(plan: memopt.Plan, *totals: float) -> None:
    """As if alike steps had been timed so long each."""
    steps = [
        StepSeconds(
            Assignment(dict.fromkeys(plan.profile.blocks, KEEP)),
            [StageSeconds(total / 16, total / 16) for _ in range(len(plan.profile.paths) + 2)],
            number,
        )
        for number, total in enumerate(totals)
    ]
    plan.profile.set_seconds(steps, is_timed=True)
    plan.is_timed = True


@pytest.fixture
def timed() -> memopt.Plan:
    model, batch = chain()
    return memopt.plan(model, batch, EVERYTHING, measure=False)


def test_measured_times_stand_with_their_range(timed: memopt.Plan) -> None:
    took(timed, 0.9, 1.0, 1.1)
    timed.seconds, timed.plain_seconds = 0.5, 1.0
    assert (
        "500 ms (450 to 550) in place of 1,000 ms (900 to 1,100): -50.0% (measured: medians and, "
        "in brackets, ranges)"
    ) in " ".join(str(timed).split())


def test_a_difference_that_samples_have_as_well_is_said_to_be_one(timed: memopt.Plan) -> None:
    took(timed, 0.9, 1.0, 1.1)
    timed.seconds, timed.plain_seconds = 0.95, 1.0
    assert "-5.0%, which is less than samples of equal steps differ by" in " ".join(
        str(timed).split()
    )


def test_samples_that_disagree_give_no_share(timed: memopt.Plan) -> None:
    """As on a machine that does something else at the time."""
    took(timed, 0.3, 0.31, 3.5)
    timed.seconds, timed.plain_seconds = 0.309, 3.54
    text = " ".join(str(timed).split())
    assert "samples of equal steps differ by 11.7x, too much to tell" in text
    assert "%" not in text.partition("forward and backward")[2].partition("Blocks")[0]


def test_one_sample_has_no_range(timed: memopt.Plan, tmp_path: Path) -> None:
    took(timed, 1.0)
    assert "measured once" in str(timed)
    took(timed, 0.9, 1.1)
    timed.save(tmp_path / "plan.json")
    assert memopt.Plan.load(tmp_path / "plan.json").profile.spread == timed.profile.spread


def test_a_real_plan_has_the_range_of_its_steps() -> None:
    model, batch = chain()
    plan = memopt.plan(model, batch, EVERYTHING, steps=3)
    assert plan.profile.spread is not None
    least, most = plan.profile.spread
    assert 0 < least <= 1 <= most
    assert re.search(r"ms \([\d.,]+ to [\d.,]+\) in place of", " ".join(str(plan).split()))


def test_a_notebook_gets_tables(plan: memopt.Plan) -> None:
    text = plan._repr_html_()
    assert text.startswith("<h3>Chain within ")
    assert "<th>Block</th>" in text
    assert "<script" not in text


def test_a_compiled_plan_is_the_parts_of_its_budget() -> None:
    """Printed, and in a notebook."""
    model, batch = chain()
    plan = memopt.plan(model, batch, "1GB", compiled=True)
    printed, shown = str(plan), plan._repr_html_()
    assert printed.startswith("Chain, compiled, within 1GB (1,000.0 MB)\napply() compiles")
    for text in (as_text(plan.base), as_text(plan.graph_budget), as_text(plan.optimizer)):
        assert text in printed
        assert f'<td class="number">{text}</td>' in shown
    plan.measured_peak = plan.base
    assert f"peak {as_text(plan.base)} measured" in str(plan)


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


def test_names_in_the_figure_keep_apart(plan: memopt.Plan) -> None:
    """Also where points are close together; the budget and the axes have their lines."""
    figures = pytest.importorskip("matplotlib.figure")
    figure = figures.Figure(figsize=(8, 5), layout="constrained")
    curve = curve_of(plan.profile, plan.terms, 8, plan.plain_peak)
    crowd = tuple(p._replace(peak=plan.peak, seconds=plan.seconds) for p in curve.settings)
    draw_curve(figure, plan, replace(curve, settings=crowd))
    (axes,) = figure.axes
    boxes = [text.get_window_extent() for text in axes.texts]
    assert len(boxes) == 1 + len(crowd)
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))
    window = axes.get_window_extent()
    assert all(window.x0 <= box.x0 and box.x1 <= window.x1 for box in boxes)
    budget = axes.transData.transform((plan.budget / 1e6, 0))[0]
    assert all(budget <= box.x0 or box.x1 <= budget for box in boxes)
    assert axes.get_xlabel() == "peak of the step, MB"


def test_a_segment_is_what_checkpoint_sequential_takes() -> None:
    """The bytes of the drawn setting are those of the real one."""

    from memopt._plan.curve import curve_of
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
    assert text.count("<circle") == 2 * 6  # settings, plan and budget, for screen and telephone
    assert "this plan" in text
    assert "blocks.0" in text
    places = [text.index(f'id="{name}"') for name in ("timeline", "plain-timeline", "curve")]
    assert places == sorted(places)
    assert "peak of the step, MB" in text
    assert "forward and backward, ms (estimated for a GPU)" in text


def test_a_plan_that_was_loaded_has_a_page(plan: memopt.Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    text = memopt.Plan.load(tmp_path / "plan.json").to_html()
    assert 'id="curve"' in text
    assert 'id="timeline"' not in text


def test_a_browser_shows_both_timelines(plan: memopt.Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    plan.to_html(path)
    shown = dom_of(path, tmp_path / "profile")
    for name, peak in (("", plan.peak), ("plain-", plan.plain_peak)):
        assert f"{peak / 1e6:.1f} MB = " in shown.partition(f'<p id="{name}at">')[2][:60]


BOXES = """[...document.querySelectorAll("#curve text")].map(e => {
  const box = e.getBoundingClientRect();
  return [e.textContent, box.left, box.top, box.right, box.bottom];
}).filter(box => box[3] > box[1])"""


@pytest.mark.parametrize("share", [0.5, 0.7, 1.0])
def test_names_on_the_curve_keep_apart(plan: memopt.Plan, share: float, tmp_path: Path) -> None:
    """In a browser no two texts overlap: names, numbers on the axes, and their titles."""
    path = tmp_path / "plan.html"
    plan.within(int(share * plan.plain_peak)).to_html(path)
    boxes = said_by(path, tmp_path / "profile", BOXES)
    assert len(boxes) > 12
    for (text, *one), (other_text, *other) in combinations(boxes, 2):
        is_beside = one[2] <= other[0] or other[2] <= one[0]
        assert is_beside or one[3] <= other[1] + 2 or other[3] <= one[1] + 2, (text, other_text)


def test_a_row_of_blocks_has_none_that_is_not_called() -> None:
    _, ids = chain()
    text = str(memopt.plan(Skipping([4] * 5), ids, EVERYTHING, measure=False))
    table = text[text.index("Fate") : text.index("Besides:")].splitlines()
    rows = [line.split("  ")[0] for line in table if line.startswith("blocks.")]
    assert rows == ["blocks.0", "blocks.3 to 4"]
    assert "left as they are: blocks.1, blocks.2" in " ".join(text.split())


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
    text = " ".join(capsys.readouterr().out.split())  # lines end where the width asks for it
    assert "Chain within 2.4MB (2.4 MB)" in text
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
        (["--budget", "1KB"], "memopt plan: budget must be at least "),
        (["--budget", "1KB"], "the floor, got 1KB (1,000 B)\n"),
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
    """There is a plan for so many rows, and none for one more; with more memory more fit."""
    from memopt.memory.batches import resized

    live = plan.live
    assert live is not None
    rows = plan.largest_batch()
    make = resized(live.step.batch, 0, "a test")
    options: Any = {"optimizer": live.step.optimizer, "loss": live.step.loss, "measure": False}
    fitting = memopt.plan(live.step.model, make(rows), plan.budget, **options)
    assert fitting.peak <= plan.budget
    with pytest.raises(memopt.BudgetTooSmall):
        memopt.plan(live.step.model, make(rows + 1), plan.budget, **options)
    assert plan.largest_batch("50MB") > rows
    assert plan.largest_batch("0.5MB") == 0


def with_cache() -> tuple[nn.Module, dict[str, Tensor]]:
    """A model whose configuration says use_cache=True, as transformers' do by default."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=3,
        n_embd=32,
        n_head=2,
        vocab_size=64,
        n_positions=16,
        bos_token_id=0,
        eos_token_id=1,
    )
    ids = torch.randint(64, (4, 16))
    return transformers.GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}


@pytest.mark.slow
@pytest.mark.thorough
def test_steps_that_a_plan_runs_by_itself_do_not_warn_of_caches(
    recwarn: pytest.WarningsRecorder,
) -> None:
    """A note says what becomes of them, once; from predictions, timed steps, remedies and apply."""
    model, batch = with_cache()
    plan = memopt.plan(model, batch, EVERYTHING, steps=1, chunks=False)
    with pytest.raises(memopt.BudgetTooSmall):
        memopt.plan(model, batch, "100KB", measure=False, chunks=False)
    with pytest.raises(memopt.BudgetTooSmall) as error:
        plan.within(1)
    least = plan.within(error.value.floor)
    assert str(least).count("use_cache=True") == 1
    least.apply().undo()
    least.largest_batch(limit=8)
    found = memopt.anatomy(model, batch, checkpoint="all", measure=True, advice=True)
    assert str(found).count("use_cache=True") == 1
    assert [str(w.message) for w in recwarn if "cache" in str(w.message)] == []
