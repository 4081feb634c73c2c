"""Proves what the benchmark of convolutional networks promises, without timing anything: each way
holds the bytes that it is there for, blocks are found by their class, and the table names each way.
"""

from __future__ import annotations

import pytest
import torch

from benchmarks import conv
from benchmarks.convert_models.conv import UNet
from benchmarks.harness import Effort
from benchmarks.model_ways import EAGER

CPU = torch.device("cpu")
BARELY = Effort(rounds=3, min_rounds=3, sample_seconds=1e-6)
SMALL = conv.NETS["U-Net"]._replace(make=lambda: UNet(8), channels=8)


def test_each_way_holds_less_than_eager_and_is_in_the_table() -> None:
    case = conv.case_of(SMALL, 2, 16, torch.contiguous_format, CPU, BARELY)
    ways = case["variants"]
    assert list(ways) == list(conv.WAYS)
    held = {name: way["held_bytes"] for name, way in ways.items()}
    assert held["convert and regions"] < held["memopt.convert"] < held[EAGER]
    assert held["torch.utils.checkpoint"] < held[EAGER]
    text = conv.tables({"U-Net": case})
    assert all(f"| {way}: held, peak, time" in text for way in conv.WAYS if way != EAGER)


@pytest.mark.slow
@pytest.mark.parametrize("name", conv.NETS)
def test_each_net_has_blocks_of_its_class(name: str) -> None:
    pytest.importorskip("transformers")
    net = conv.NETS[name]
    blocks = [m for m in net.make().modules() if type(m).__name__ == net.block]
    assert len(blocks) > 2
