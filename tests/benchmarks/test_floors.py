"""Proves: the table of least peaks has what it says: peaks of steps that ran, no plan above
torch.utils.checkpoint or above default regions, and every model planned; and small models come out
as they stand in it.
"""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from benchmarks import floors
from benchmarks.by_model import models
from benchmarks.cli import RESULTS

CASES: dict[str, dict[str, Any]] = json.loads((RESULTS / "cpu_floors.json").read_text())["cases"]
AS_LOW = 1.005
"""The most that a plan's peak may be above another's: what Python's numbers take as tensors."""


def share(case: dict[str, Any], way: str) -> float:
    return case.get(f"{way}_bytes", math.inf) / case["plain_bytes"]


@pytest.mark.parametrize("name", CASES)
def test_the_plan_is_the_lowest(name: str) -> None:
    case = CASES[name]
    others = (floors.BLOCKS, floors.SEGMENTS, floors.REGIONS, floors.PLAIN)
    assert share(case, floors.PLAN) <= AS_LOW * min(share(case, way) for way in others)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["TCN", "MLP", "GRU cell in a loop", "Inception"])
def test_small_models_are_as_in_the_table(name: str) -> None:
    """Within what convolutions take on another processor."""
    case = floors.measure(dict(models())[name])
    assert {key for key in case if key.endswith("_error")} == set()
    assert share(case, floors.PLAN) == pytest.approx(share(CASES[name], floors.PLAN), rel=0.2)
    others = (floors.BLOCKS, floors.SEGMENTS, floors.REGIONS)
    assert share(case, floors.PLAN) <= AS_LOW * min(share(case, way) for way in others)
