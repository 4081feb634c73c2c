"""Proves: the pages of an anatomy and of a plan are whole in a browser, as wide as a screen and as
a telephone: nothing runs out of the window, no script fails, texts of drawings keep apart, the
tensor under the pointer is named, and buttons zoom and pan. The browser starts once, for all of it.
"""

from __future__ import annotations

import html
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

import memopt
from tests.plan.models import chain
from tests.support.browser import said_by

WIDTHS = (1280, 420)

FAILURES = """<script>window.failures = [];
window.onerror = text => { window.failures.push(String(text)); };
console.error = text => { window.failures.push(String(text)); };</script>"""

LOOK = """[...document.querySelectorAll("iframe")].map(iframe => {
  const page = iframe.contentDocument, window = iframe.contentWindow;
  const sides = b => [b.left, b.top, b.right, b.bottom];
  const box = e => sides(e.getBoundingClientRect());
  const texts = root => [...page.querySelectorAll(root + " text")]
    .filter(e => window.getComputedStyle(e).visibility == "visible")
    .map(e => [e.textContent, ...box(e)]).filter(b => b[3] > b[1]);
  const frame = page.querySelector(".frame"), tip = page.querySelector(".tip");
  const [left, top, right, bottom] = box(frame);
  const before = [tip.hidden, page.querySelector(".areas").getAttribute("viewBox")];
  const point = (x, y) => frame.dispatchEvent(new window.PointerEvent("pointermove",
    { clientX: left + x * (right - left), clientY: top + y * (bottom - top) }));
  point(.05, .97);
  const said = tip.innerText, place = box(tip);
  page.querySelector("[data-do=in]").click();
  const near = page.querySelector(".areas").getAttribute("viewBox");
  page.querySelector("[data-do=right]").click();
  const panned = page.querySelector(".areas").getAttribute("viewBox");
  page.querySelector("[data-do=all]").click();
  frame.dispatchEvent(new window.PointerEvent("pointerleave"));
  return { name: iframe.id, failures: window.failures, said, place, near, panned,
    hidden: [before[0], tip.hidden], all: [before[1],
      page.querySelector(".areas").getAttribute("viewBox")],
    over: page.documentElement.scrollWidth - page.documentElement.clientWidth,
    timeline: texts("#timeline"), curve: texts("#curve"),
    first: page.querySelector("h2").textContent,
    cut: [...page.querySelectorAll(".wide")].filter(e => e.scrollWidth > e.clientWidth + 1)
      .map(e => e.innerText.slice(0, 40)) };
})"""


@pytest.fixture(scope="module")
def reports() -> tuple[memopt.types.Anatomy, memopt.Plan]:
    model, batch = chain()
    anatomy = memopt.anatomy(model, batch, measure=False, advice=True)
    plan = memopt.plan(model, batch, 1 << 30, measure=False)
    return anatomy, plan.within(int(0.5 * plan.plain_peak))


@pytest.fixture(scope="module")
def seen(
    reports: tuple[memopt.types.Anatomy, memopt.Plan], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("pages")
    anatomy, plan = reports
    pages = {"anatomy": anatomy.to_html(), "plan": plan.to_html()}
    frames = "".join(
        f'<iframe id="{name}-{width}" width="{width}" height="900" '
        f'srcdoc="{html.escape(text.replace("<head>", f"<head>{FAILURES}"))}"></iframe>'
        for name, text in pages.items()
        for width in WIDTHS
    )
    harness = Path(folder / "harness.html")
    harness.write_text(f"<!doctype html><body>{frames}</body>")
    found = said_by(harness, folder / "profile", LOOK, 1400)
    return {one["name"]: one for one in found}


NAMES = [f"{page}-{width}" for page in ("anatomy", "plan") for width in WIDTHS]


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_cut_and_no_script_fails(seen: dict[str, Any], name: str) -> None:
    assert seen[name]["failures"] == []
    assert seen[name]["over"] <= 0
    assert seen[name]["cut"] == []


@pytest.mark.parametrize("name", NAMES)
def test_texts_keep_apart(seen: dict[str, Any], name: str) -> None:
    for drawing in ("timeline", "curve"):
        texts = seen[name][drawing]
        assert len(texts) > 8 or (drawing, name[:4]) == ("curve", "anat")
        for (text, *one), (other_text, *other) in combinations(texts, 2):
            is_beside = one[2] <= other[0] or other[2] <= one[0]
            is_apart = is_beside or one[3] <= other[1] + 2 or other[3] <= one[1] + 2
            assert is_apart, (text, other_text)


@pytest.mark.parametrize("name", NAMES)
def test_the_tensor_under_the_pointer_is_named(
    seen: dict[str, Any], name: str, reports: tuple[memopt.types.Anatomy, memopt.Plan]
) -> None:
    """Name, bytes, shape and dtype of a weight, at the foot of the drawing; in the window."""
    one = seen[name]
    assert one["hidden"] == [True, True]
    first, second, *_ = one["said"].split("\n")
    trace = reports[0].trace
    known = {life.name: life for life in trace.lives if life.category == "weights"}
    life = known[first]
    shape = "x".join(map(str, life.shape))
    assert second.endswith(f"{shape} {life.dtype}, weights")
    assert "operator " in one["said"]
    assert "forward" in one["said"]
    left, _, right, _ = one["place"]
    assert left >= 0
    assert right <= int(name.rpartition("-")[2])


@pytest.mark.parametrize("name", NAMES)
def test_buttons_zoom_and_pan(seen: dict[str, Any], name: str) -> None:
    one = seen[name]
    whole, near, panned = (
        [float(value) for value in box.split()]
        for box in (one["all"][0], one["near"], one["panned"])
    )
    assert one["all"][0] == one["all"][1]
    assert near[2] == pytest.approx(whole[2] / 2)
    assert panned[2] == pytest.approx(near[2])
    assert panned[0] == pytest.approx(near[0] + near[2] / 4)


def test_what_would_help_is_the_first_table(seen: dict[str, Any]) -> None:
    assert seen["anatomy-420"]["first"] == "What would help"


def test_lives_add_up_to_the_timeline(reports: tuple[memopt.types.Anatomy, memopt.Plan]) -> None:
    """At each operator the tensors that are said to be alive have its bytes, of each category."""
    anatomy, plan = reports
    from memopt.memory.pieces import CATEGORIES

    assert plan.trace is not None
    for trace in (anatomy.trace, plan.trace):
        assert len(trace.operators) == len(trace.timeline)
        for instant, *nbytes in trace.timeline:
            sums = dict.fromkeys(CATEGORIES, 0)
            for life in trace.lives:
                if life.first <= instant <= life.last:
                    sums[life.category] += life.nbytes
            assert list(sums.values()) == nbytes


def test_lines_are_drawn_or_said(reports: tuple[memopt.types.Anatomy, memopt.Plan]) -> None:
    """The budget across the plan's step, the step without the plan over it; a device far above."""
    _, plan = reports
    text = plan.to_html().partition('id="timeline"')[2].partition("<script")[0]
    assert text.count('class="level"') == 1
    assert text.count('class="other"') == 1
    assert "budget" in text
    assert "above the drawing" in text
