"""Proves: tables as text can be read at every width from 40 on, in a terminal and in a pipe: no
line is wider, text wraps and numbers do not, and columns that do not fit side by side stand below,
so that none is squeezed to single letters.
"""

from __future__ import annotations

import io
import re
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import memopt
from memopt._anatomy import Anatomy
from memopt.show.page import page_of
from memopt.show.sections import Section, Tables, text_of
from memopt.show.shown import Shown
from tests.anatomy.models import Mlp

BOLD = re.compile(r"\033\[\d+m")


@pytest.fixture(scope="module")
def report() -> Anatomy:
    torch.manual_seed(0)
    return memopt.anatomy(Mlp(blocks=3), torch.randn(64, 32), measure=False, advice=True)


def lines_at(width: int, report: Anatomy, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(width))
    return str(report).splitlines()


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("width", [40, 60, 61, 72, 80, 100, 110, 132, 200])
def test_an_anatomy_fits(
    report: Anatomy, width: int, terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    lines = [BOLD.sub("", line) for line in lines_at(width, report, monkeypatch)]
    assert max(map(len, lines)) <= width
    advice = "\n".join(lines[lines.index("What would help") :])
    squeezed = re.findall(r"^ *\S{1,2}(?: +\S{1,2})* *$", advice, re.MULTILINE)
    assert squeezed == []


@pytest.mark.parametrize("width", [60, 80, 110])
def test_every_remedy_is_there_in_words_that_are_whole(
    report: Anatomy, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Side by side or below, each word of what and how in its order."""
    lines = lines_at(width, report, monkeypatch)
    words = " ".join(lines[lines.index("What would help") :]).split()
    assert len(report.advice) > 3
    for one in report.advice:
        for word in (*one.what.split(), *one.how.split()):
            assert word in words, (width, word)


def test_without_a_terminal_a_table_is_110_wide(
    report: Anatomy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("os.get_terminal_size", lambda *_: (_ for _ in ()).throw(OSError))
    assert 60 < max(map(len, str(report).splitlines())) <= 110


def test_columns_that_do_not_fit_stand_below_with_their_headings() -> None:
    section = Section(
        "Both", ("Name", "first", "second", "What"), [["a", "1.0 MB", "22.0 MB", "words " * 30]]
    )
    text = text_of(Tables("Title", [section], [])).splitlines()
    assert max(map(len, text)) <= 110
    assert "".join(text).count("words") == 30


cells = st.text("abc. _-(", min_size=0, max_size=60)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(60, 120))
def test_no_line_is_wider_and_nothing_is_lost(data: st.DataObject, width: int) -> None:
    """Of random tables: every character but spaces is there, in the order of the columns."""
    count = data.draw(st.integers(1, 6))
    headings = tuple(data.draw(st.sampled_from(["Name", "ms", "What"])) for _ in range(count))
    rows = data.draw(st.lists(st.lists(cells, min_size=count, max_size=count), max_size=4))
    rows = [[c if h != "ms" else "1.5" for c, h in zip(r, headings, strict=True)] for r in rows]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(width))
        text = text_of(Tables("Title", [Section("A table", headings, rows)], []))
    assert max(map(len, text.splitlines())) <= width
    shown = sorted(re.sub(r"[\s-]", "", text))
    whole = "Title" + "A table" + "".join(headings) + "".join(c for row in rows for c in row)
    assert shown == sorted(re.sub(r"[\s-]", "", whole))


def test_a_report_is_rich_s_tables_for_rich(report: Anatomy) -> None:
    """Those of the text, cell by cell; numbers stand right."""
    rich = pytest.importorskip("rich.console")
    console = rich.Console(width=300, record=True, file=io.StringIO())
    console.print(report)
    words = console.export_text().split()
    assert all(word in words for word in report.tables().title.split())
    for section in report.tables().sections:
        for row in section.rows:
            assert all(word in words for cell in row for word in cell.split()), section.title


def test_columns_of_numbers_stand_right_on_pages() -> None:
    table = Section("Both", ("Name", "ms", "Size"), [["a<b", "1.5", "2.0 MB"]])
    text = page_of("Title\nbelow", [table, "<p>more</p>"])
    assert "<td>a&lt;b</td>" in text
    assert '<td class="number">1.5</td><td class="number">2.0 MB</td>' in text
    assert text.index("</table>") < text.index("<p>more</p>")
    assert '<p id="peak">below</p>' in text


@pytest.mark.parametrize(
    "kind", ["Anatomy", "Check", "CompiledPlan", "Fits", "Fitted", "Plan", "Report", "Snapshot"]
)
def test_every_report_prints_and_shows_in_notebooks(kind: str) -> None:
    assert issubclass(getattr(memopt.types, kind), Shown)
    assert callable(getattr(memopt.types, kind)._repr_html_)
