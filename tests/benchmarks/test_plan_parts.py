"""Proves that the plans which the benchmark of parts compares are within one budget, and that those
with parts are never said to be slower.
"""

from __future__ import annotations

import pytest
import torch

import memopt
from benchmarks import plan_parts
from benchmarks.model_ways import maker


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(plan_parts.SIZES))
def test_parts_are_no_slower_than_whole_blocks(family: str) -> None:
    pytest.importorskip("transformers")
    model, batch = maker(family, plan_parts.SMALLEST, 0.0, torch.device("cpu"), times=8)()
    rich = memopt.plan(model, batch, 1 << 50, optimizer=None, measure=False)
    found = dict(plan_parts.chosen(rich))
    assert "parts at 75%" in found
    for share in plan_parts.SHARES:
        ways = [found.get(f"{name} at {share:.0%}") for name in ("whole blocks", "parts", "plan")]
        assert all(way is None or way.peak <= share * rich.plain_peak for way in ways)
        whole, parts, plan = ways
        assert plan is not None or whole is None
        assert whole is None or (parts is not None and parts.predicted <= whole.predicted)


def test_what_is_gone_is_a_share_of_what_whole_blocks_add() -> None:
    def way(predicted: float, median: float) -> dict[str, object]:
        return {"predicted": predicted, "over_plain": {"median": median}}

    found = plan_parts.gone(
        {"whole blocks at 50%": way(1.4, 0.9), "parts at 50%": way(1.1, 1.0), "plain": way(1, 1)}
    )
    assert found == {"50%": {"predicted": 0.75, "measured": None}}
