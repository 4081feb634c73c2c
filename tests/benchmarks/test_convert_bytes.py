"""Proves what the benchmark of converted models' bytes promises: it counts every model, a count
that its formula does not explain ends the run, and the documentation has the figures of the file.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from benchmarks import convert_bytes
from benchmarks.cli import RESULTS
from benchmarks.convert_models.model_terms import MODEL_TERMS

SMALL = dataclasses.replace(convert_bytes.SIZES, n=2, h=32, heads=4, m=48, words=101, tokens=10)


def test_counts_every_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(convert_bytes, "SIZES", SMALL)
    out = tmp_path / "bytes.json"
    assert convert_bytes.main(["--out", str(out)]) == 0
    run = json.loads(out.read_text())
    assert run["settings"]["h"] == 32
    assert list(run["cases"]) == list(MODEL_TERMS)
    for case in run["cases"].values():
        assert 0 < case["after_bytes"] < case["before_bytes"]
        assert case["ratio"] == round(case["after_bytes"] / case["before_bytes"], 4)
    assert "| Llama " in capsys.readouterr().out


def test_a_count_that_is_not_the_formula_s_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = convert_bytes.predicted("GPT-2", SMALL)
    monkeypatch.setattr(convert_bytes, "predicted", lambda *_: (before, after + 2))
    with pytest.raises(RuntimeError, match=f"{after} after, its formula says {before} and"):
        convert_bytes.measure("GPT-2", SMALL)


def test_the_documentation_has_the_figures_of_the_file() -> None:
    cases = json.loads((RESULTS / convert_bytes.OUT).read_text())["cases"]
    for name, case in cases.items():
        assert (case["before_bytes"], case["after_bytes"]) == convert_bytes.predicted(
            name, convert_bytes.SIZES
        )
        assert case["formulas"] == MODEL_TERMS[name].formulas()
    page = Path(__file__).parents[2] / "docs" / "benchmarks.md"
    assert convert_bytes.readme_table(cases) in page.read_text()
