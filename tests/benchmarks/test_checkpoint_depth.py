"""Proves what the benchmark of depth counts: bytes held after a forward, blocks run again by each
policy, and that it writes its figures and the drawing of them.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import checkpoint_depth
from benchmarks.memory import held_bytes

CPU = torch.device("cpu")


def test_held_bytes_are_what_lives_on_without_the_result() -> None:
    x = torch.randn(1000, requires_grad=True)
    assert held_bytes(lambda: x.exp().sin().sum(), CPU) == x.nbytes
    assert held_bytes(lambda: x.exp().exp().sum(), CPU) == 2 * x.nbytes
    with torch.no_grad():
        assert held_bytes(lambda: x.exp().sum(), CPU) == 0


@pytest.mark.slow
def test_counts_bytes_and_forwards_of_each_policy(tmp_path: Path) -> None:
    out = tmp_path / "depth.json"
    assert checkpoint_depth.main(["--depths", "4", "--out", str(out)]) == 0
    (case,) = json.loads(out.read_text())["cases"].values()
    found = case["variants"]
    again = {policy: figures["forwards_again"] for policy, figures in found.items()}
    assert again == {"none": 0, "every": 4, "torch_sqrt": 2, "sqrt": 2, "optimal": 3}
    size = checkpoint_depth.SIZE
    input_bytes = 4 * checkpoint_depth.BATCH * size.context * size.width
    # The first block's input was there before.
    assert found["every"]["held_bytes"] == 3 * input_bytes
    assert found["optimal"]["peak_bytes"] <= found["every"]["peak_bytes"]
    assert found["every"]["peak_bytes"] < found["sqrt"]["peak_bytes"] < found["none"]["peak_bytes"]
    assert out.with_suffix(".png").stat().st_size > 10_000


def test_refuses_a_depth_of_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        checkpoint_depth.main(["--depths", "0"])
    assert "--depths must be at least 1, got 0" in capsys.readouterr().err
