"""Proves what the benchmark of whole models promises, without timing anything: each way holds the
bytes that it is there for, what fits is reckoned from another row's bytes, and the record and the
tables name every way.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks import models
from benchmarks.harness import Effort
from benchmarks.model_ways import EAGER, Way, maker, ways_of

CPU = torch.device("cpu")
SIZES = dataclasses.replace(models.SMALLEST, tokens=128)  # activations outweigh gradients


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ways() -> dict[str, Way]:
    make = maker("GPT-2", SIZES, 0.1, CPU)
    return ways_of(make, compiles=False, hides=False)


def test_each_way_holds_less_than_eager(ways: dict[str, Way]) -> None:
    held = {name: way.held for name, way in ways.items()}
    assert held["memopt.convert"] < held[EAGER]
    assert held["memopt.checkpoint_wrapper"] < held["memopt.convert"]
    assert held["convert and regions"] < held["memopt.checkpoint_wrapper"]
    torch_s = ways["torch.utils.checkpoint"]
    assert ways["memopt.checkpoint_wrapper"].peak <= torch_s.peak


def test_the_record_and_the_tables_name_every_way(ways: dict[str, Way]) -> None:
    barely = Effort(rounds=3, min_rounds=3, sample_seconds=1e-6)
    case = models.case_of(ways, SIZES, CPU, barely)
    found = case["variants"]
    assert set(found) == set(ways)
    assert found[EAGER]["rows_fit"] == case["rows"]
    assert found[EAGER]["tokens_fit"] == SIZES.tokens
    assert found["convert and regions"]["rows_fit"] > case["rows"]
    text = models.tables({"cases": {"GPT-2, dropout": case}})
    assert all(f"| {name} " in text for name in ways)


def test_what_fits_is_the_room_over_what_another_takes() -> None:
    assert models.fits(4, 100, 30.0) == 7
    assert models.fits(4, 0, 30.0) == 4
    assert models.fits(4, 100, 0.0) is None
    assert models.fits(4, 100, None) is None
