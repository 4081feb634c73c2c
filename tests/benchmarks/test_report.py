"""Proves: the tables of the README and docs/ are those that the results give, their pictures and
sentences with figures have results behind them, and what has none is named.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("transformers")  # the formulas of converted models

from benchmarks import report, report_figures, report_tables
from benchmarks.cli import RESULTS
from memopt.__main__ import main


def test_the_pages_show_what_the_results_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main(["--check"]) == 0, capsys.readouterr().err


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A README in a folder of its own."""
    page = tmp_path / "README.md"
    monkeypatch.setattr(report, "PAGES", (page,))
    monkeypatch.setattr(report, "CLAIMS", {})
    return page


def test_a_table_is_made_anew_and_a_check_only_says_so(
    page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page.write_text("<!-- begin: demo -->\nof last year\n<!-- end -->\n")
    assert report.main(["--check"]) == 1
    assert "not those of the results" in capsys.readouterr().err
    assert "of last year" in page.read_text()
    report.main([])
    assert "torch-checkpoint" in page.read_text()
    assert report.main(["--check"]) == 0


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("![a](missing.png)", "missing.png has no result behind it"),
        ("<!-- begin: weather -->\n<!-- end -->\n", "nothing makes the table 'weather'"),
    ],
)
def test_what_has_no_result_is_named(
    page: Path, capsys: pytest.CaptureFixture[str], text: str, told: str
) -> None:
    page.write_text(text)
    assert report.main(["--check"]) == 1
    assert told in capsys.readouterr().err


def test_a_sentence_with_other_figures_is_named(
    page: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page.write_text("Twice as **fast**.")
    monkeypatch.setattr(report, "CLAIMS", {page.name: (lambda: "Twice as fast",)})
    assert report.problems() == []
    monkeypatch.setattr(report, "CLAIMS", {page.name: (lambda: "1.9 times as fast",)})
    assert report.problems() == ["README.md: the results say '1.9 times as fast'"]


@pytest.mark.parametrize(
    ("file", "name", "page"),
    [
        ("cpu_convert", "convert_llama", "convert.md"),
        ("cpu_convert", "convert_gpt2", "benchmarks.md"),
        ("cpu_compile", "BERT", "compile.md"),
        ("cuda_plan", "chain", "README.md"),
        ("cpu_models", "Llama", "README.md"),
    ],
)
def test_ratios_in_sentences_cannot_go_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, name: str, page: str
) -> None:
    """With another result the page that says the old one is named."""
    assert report.problems() == []
    for kind in ("json", "png"):
        for path in RESULTS.glob(f"*.{kind}"):
            shutil.copy(path, tmp_path)
    run = json.loads((tmp_path / f"{file}.json").read_text())
    for key, case in run["cases"].items():
        for way in case["variants"].values() if name in key else ():
            for figures in way.values():
                if isinstance(figures, dict) and "median" in figures:
                    figures["median"] *= 1.5
            for key in ("most_bytes", "peak_bytes"):
                way[key] = int(way.get(key, 0) ** 0.9)
    (tmp_path / f"{file}.json").write_text(json.dumps(run))
    monkeypatch.setattr(report_tables, "RESULTS", tmp_path)
    assert any(problem.startswith(f"{page}: the results say") for problem in report.problems())


def test_a_figure_of_other_results_is_named_and_drawn_anew(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page.write_text("")
    for module in (report, report_figures, report_tables):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    monkeypatch.setattr(report, "FIGURES", {"cpu_compile": report_figures.FIGURES["cpu_compile"]})
    told = "cpu_compile.png: was drawn from other results"
    for kind in ("json", "png"):
        shutil.copy(RESULTS / f"cpu_compile.{kind}", tmp_path)
    report.main(["--check"])
    assert told not in capsys.readouterr().err

    file, figure = tmp_path / "cpu_compile.json", tmp_path / "cpu_compile.png"
    run, before = json.loads(file.read_text()), figure.read_bytes()
    file.write_text(json.dumps({**run, "date": "of another day"}))
    assert report.main(["--check"]) == 1
    assert told in capsys.readouterr().err
    assert figure.read_bytes() == before
    report.main([])
    assert figure.read_bytes() != before
    capsys.readouterr()
    report.main(["--check"])
    assert told not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["machine", "versions", "commands"])
def test_a_result_that_does_not_say_where_it_is_from_is_named(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    page.write_text("")
    run = {"machine": {"cores": 2}, "versions": {"torch": "2.13"}, "commands": ["python -m a"]}
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    (tmp_path / "cpu_a.json").write_text(json.dumps(run))
    assert report.problems() == []
    (tmp_path / "cpu_a.json").write_text(json.dumps({**run, name: None}))
    (problem,) = report.problems()
    assert problem.startswith("cpu_a.json: names no")


def test_the_command_hands_its_options_on(page: Path) -> None:
    page.write_text("<!-- begin: demo -->\nof last year\n<!-- end -->\n")
    assert main(["bench", "--report", "--check"]) == 1
    assert "of last year" in page.read_text()


def test_the_command_says_where_it_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["bench"]) == 2
    assert "runs in a checkout of the repository" in capsys.readouterr().err
