"""Proves that the page stands alone and works in a browser, and what text, JSON and PNG hold."""

from __future__ import annotations

import builtins
import html.parser
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import memopt
from memopt.anatomy import Anatomy
from memopt.anatomy.pieces import CATEGORIES
from tests.anatomy.models import Mlp

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def report() -> Anatomy:
    torch.manual_seed(0)
    return memopt.anatomy(Mlp(blocks=3), torch.randn(64, 32), measure=True, advice=True)


def browser() -> str:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"no browser here: none of {', '.join(BROWSERS)}")
    return found


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
    assert [a["id"] for _, a in page.tags if "id" in a and a["id"] == "peak-mark"]


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
    program = browser()
    path, picture = tmp_path / "page.html", tmp_path / "page.png"
    report.to_html(path)
    command = [program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1100,900"]
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 120}
    shown = subprocess.run([*command, "--dump-dom", path.as_uri()], check=True, **options).stdout
    assert 'data-ready="yes"' in shown
    found = re.search(r'<p id="at">operator (\d+): ([\d.]+) MB', shown)
    assert found is not None
    assert float(found[2]) == round(report.peak.total / 1e6, 1)
    subprocess.run([*command, f"--screenshot={picture}", path.as_uri()], check=True, **options)
    import matplotlib.image

    pixels = (matplotlib.image.imread(picture)[..., :3] * 255).round().astype(int).reshape(-1, 3)
    for color in ("#5f6b76", "#3b7dd8", "#7353ba"):  # weights, activations, optimizer states
        wanted = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
        assert (pixels == wanted).all(1).sum() > 500, color


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


@pytest.mark.parametrize("with_rich", [True, False])
def test_text(report: Anatomy, with_rich: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not with_rich:
        plain = builtins.__import__

        def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
            if name.startswith("rich"):
                raise ImportError(name)
            return plain(name, *args, **kwargs)

        monkeypatch.setattr(builtins, "__import__", refuse)
    text = str(report)
    for words in (*CATEGORIES, "end of forward", "What would help", "memopt.convert(model)"):
        assert words in text
    assert re.search(r"total\s+[\d.,]+ MB\s+[\d.,]+ MB\s+\+0.00%", text)
    assert max(map(len, text.splitlines())) <= (110 if with_rich else 400)
