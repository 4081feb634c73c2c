"""Proves what the benchmark of converted models promises, without timing anything: its variants are
the same model's training step, the file has every case with bytes that are fewer, and the verdict
is that of the spread.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks import convert
from benchmarks.convert import CHANGES, CHECKPOINT, EAGER, MODELS
from benchmarks.harness import Effort


@pytest.mark.parametrize("name", MODELS)
def test_every_variant_is_a_step_of_the_same_model(name: str) -> None:
    variants = convert.build(name, "forward+backward", 256, 64, torch.float32, "cpu", ())
    assert [variant.name for variant in variants] == list(CHANGES)
    losses, gradients = [], []
    for variant in variants:
        assert variant.run() is None
        assert all(tensor.grad is None for tensor in variant.parameters)
        assert variant.forward is not None
        loss = variant.forward()
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        losses.append(loss)
        gradients.append([t.grad for t in variant.parameters if isinstance(t, torch.nn.Parameter)])
    eager, memopt, checkpoint = gradients
    for a, e in zip(checkpoint, eager, strict=True):
        assert a is not None
        assert e is not None
        assert torch.equal(a, e)
    assert torch.equal(losses[2], losses[0])
    torch.testing.assert_close(losses[1], losses[0])
    for a, e in zip(memopt, eager, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_the_file_and_the_report_have_every_case(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    restore_num_threads: None,
) -> None:
    barely = Effort(rounds=3, min_rounds=3, sample_seconds=1e-6)
    monkeypatch.setattr("benchmarks.harness.QUICK", barely)
    out = tmp_path / "convert.json"
    options = ["--quick", "--shapes", "128x64", "--threads", "1", "--out", str(out)]
    assert convert.main(options) == 0
    cases = json.loads(out.read_text())["cases"]
    dtypes = ("bfloat16", "float32")
    assert set(cases) == {f"{m}/forward+backward/128x64/{t}/cpu/1" for m in MODELS for t in dtypes}
    for case in cases.values():
        found = case["variants"]
        assert case["baseline"] == EAGER
        assert set(found) == set(CHANGES)
        assert found["memopt"]["saved_bytes"] < found[EAGER]["saved_bytes"]
        assert found["memopt"]["peak_bytes"] < found[EAGER]["peak_bytes"]
        assert found[CHECKPOINT]["peak_bytes"] < found[EAGER]["peak_bytes"]
    printed = capsys.readouterr().out
    assert "of 4 cases: goal " in printed
    assert printed.count("| llama ") == 2


def case(q3: float) -> dict[str, Any]:
    return {"variants": {"memopt": {"ratio": {"q1": 0.5, "median": 0.6, "q3": q3}}}}


@pytest.mark.parametrize(
    ("q3", "words"),
    [([1.01, 1.0], "in 0 of 2 cases: goal reached"), ([0.99, 1.2], "in 1 of 2 cases: goal missed")],
)
def test_slower_is_what_three_quarters_of_the_rounds_say(q3: list[float], words: str) -> None:
    assert words in convert.verdict([case(value) for value in q3])
