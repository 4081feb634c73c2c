"""Proves that the page stands alone and works in a browser, and what text, JSON and PNG hold."""

from __future__ import annotations

import html.parser
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import memopt
from memopt._anatomy import Anatomy
from memopt.memory.pieces import CATEGORIES, in_words
from tests.anatomy.models import Mlp
from tests.support.browser import dom_of, picture_of, said_by


@pytest.fixture(scope="module")
def report() -> Anatomy:
    torch.manual_seed(0)
    return memopt.anatomy(Mlp(blocks=3), torch.randn(64, 32), measure=True, advice=True)


class Page(html.parser.HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "rect", "line", "circle"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("rect", "line", "circle"):
            assert self.open.pop() == tag


def test_the_page_needs_no_network(report: Anatomy, tmp_path: Path) -> None:
    text = report.to_html(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text() == text
    page = Page(text)
    assert not page.open
    assert not re.search(r"(?:https?:)?//\w", text)
    assert not any({"src", "href"} & set(attributes) for _, attributes in page.tags)
    areas = [a for tag, a in page.tags if tag == "path" and a.get("class") == "layer"]
    assert len(areas) == len(CATEGORIES)
    assert [a for _, a in page.tags if a.get("class") == "peak-mark"]


def test_names_cannot_break_the_page() -> None:
    class Evil(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module("</script><b>", torch.nn.Linear(4, 4))

        def forward(self, x: torch.Tensor) -> Any:
            return self._modules["</script><b>"](x).sum()  # type: ignore[misc]

    text = memopt.anatomy(Evil(), torch.randn(2, 4)).to_html()
    assert "<b>" not in text
    assert not Page(text).open


def test_a_browser_shows_it(report: Anatomy, tmp_path: Path) -> None:
    """The script runs to its end and writes the peak; the picture has the categories' colours."""
    path, profile = tmp_path / "page.html", tmp_path / "profile"
    report.to_html(path)
    shown = dom_of(path, profile)
    assert 'data-ready="yes"' in shown
    found = re.search(r'<p id="at">operator (\d+): ([\d.]+) MB', shown)
    assert found is not None
    assert float(found[2]) == round(report.peak.total / 1e6, 1)
    import matplotlib.image

    pixels = (
        (matplotlib.image.imread(picture_of(path, profile))[..., :3] * 255)
        .round()
        .astype(int)
        .reshape(-1, 3)
    )
    for color in ("#5f6b76", "#3b7dd8", "#7353ba"):  # weights, activations, optimizer states
        wanted = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
        assert (pixels == wanted).all(1).sum() > 500, color


@pytest.mark.parametrize("width", [1280, 500])
def test_nothing_runs_out_of_the_window(report: Anatomy, tmp_path: Path, width: int) -> None:
    """Wide tables scroll by themselves."""
    path = tmp_path / "page.html"
    report.to_html(path)
    whole, window = said_by(
        path,
        tmp_path / "profile",
        "[document.documentElement.scrollWidth, document.documentElement.clientWidth]",
        width,
    )
    assert whole <= window


def test_what_would_help_comes_first(report: Anatomy) -> None:
    for text in (report.to_html(), report._repr_html_()):
        titles = re.findall(r"<h2>(.*?)</h2>", text)
        assert titles[0] == "What would help"
        assert "At the peak, by category" in titles
    assert "<svg" not in report._repr_html_()


def test_the_axis_has_round_numbers_and_a_unit(report: Anatomy) -> None:
    drawing = report.to_html().partition('id="timeline"')[2].partition("<script")[0]
    values = [float(v) for v in re.findall(r'class="tick"[^>]*>([\d.,]+)<', drawing)]
    assert values[0] == 0
    assert len(values) > 2
    assert {round(b - a, 6) for a, b in itertools.pairwise(values)} == {values[1]}
    assert values[-1] <= 1.15 * report.peak.total / 1e6
    assert re.search(r'class="axis"[^>]*>MB<', drawing)


def test_formulas_are_shown_where_they_are_asked_for() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=16)
    ids = torch.randint(64, (2, 16))
    found = memopt.anatomy(
        transformers.GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}, measure=False
    )
    assert "formula" not in str(found)
    assert "formula" not in found.to_html()
    assert re.search(r"formula +its\b", found.table(formula=True))
    assert "its error" in found.to_html(formula=True)
    assert json.loads(found.to_json())["formula"] == found.formula


def test_what_no_submodule_holds_has_a_name() -> None:
    """The loss and the logits; or what the model's own forward computes; or its inputs."""

    class Own(torch.nn.Module):
        def __init__(self, classes: int) -> None:
            super().__init__()
            self.down = torch.nn.Linear(8, classes)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.down(x)
            if y.shape[1] == 1:
                return y.tanh().exp().sum()
            return torch.nn.functional.cross_entropy(y, torch.zeros(len(y), dtype=torch.long))

    for classes, name in ((512, "loss / logits"), (1, "inputs, buffers")):
        found = memopt.anatomy(Own(classes), torch.randn(64, 8), optimizer=None, measure=False)
        assert re.search(rf"^{name} ", str(found), re.MULTILINE), str(found)
        assert name in found.to_html()
        assert "(the model)" not in str(found)


def test_json(report: Anatomy, tmp_path: Path) -> None:
    read = json.loads(report.to_json(tmp_path / "report.json"))
    assert json.loads((tmp_path / "report.json").read_text()) == read
    assert read["peak"]["total"] == report.peak.total
    assert [row["category"] for row in read["categories"]] == list(CATEGORIES)
    assert all(row["error"] in (0, None) for row in read["categories"])
    assert sum(row["measured"] for row in read["categories"]) == report.peak.total
    assert len(read["measured"]["timeline"]) == len(report.trace.timeline)


def test_png(report: Anatomy, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report.to_png(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_text(report: Anatomy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    text = str(report)
    for words in ("end of forward", "What would help", "memopt.convert(model)"):
        assert words in text
    for category in CATEGORIES:
        assert re.search(rf"^{in_words(category)} ", text, re.MULTILINE)
    assert "functionality-specific" not in text
    assert "inputs, buffers" in text
    assert re.search(r"total\s+[\d.,]+ MB\s+[\d.,]+ MB\s+\+0.00%", text)
    assert max(map(len, text.splitlines())) <= 110
