"""The benchmark of models on one GPU runs to its end on a device: every model, in every way that
needs no compiler, each case kept as soon as it is there.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from benchmarks import gpu_models
from benchmarks.gpu_models import GROUPS, MODELS


def test_every_model_and_way_on_a_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "sim.json"
    assert gpu_models.main(["--device", "sim", "--quick", "--filter", "1B", "--out", str(out)]) == 0
    cases = json.loads(out.read_text())["cases"]
    assert list(cases) == ["Llama, 1B widths, 2 rows", "Llama, 1B widths, 2 rows, offloaded"]
    for (_, case), group in zip(cases.items(), ("", ", offloaded"), strict=True):
        assert case["failed"] == {}
        assert set(case["variants"]) - {"Liger-Kernel"} == set(GROUPS[group])
        assert all(found["tokens_per_second"] > 0 for found in case["variants"].values())
    assert "tokens a second" in capsys.readouterr().out
    assert len(MODELS) == 5
