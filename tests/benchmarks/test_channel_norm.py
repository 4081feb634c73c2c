"""Proves what the benchmark of the norms over channels promises, without timing anything: memopt's
way has PyTorch's results, both orders in memory are what they say, and the table has each op.
"""

from __future__ import annotations

import pytest
import torch

from benchmarks import channel_norm
from benchmarks.channel_norm import LAYOUTS, OPS, NormCase
from benchmarks.harness import Effort
from benchmarks.model_ways import EAGER

CPU = torch.device("cpu")
BARELY = Effort(rounds=3, min_rounds=3, sample_seconds=1e-6)
SIZE = (2, 64, 6, 7)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_ways_of_an_op_compute_the_same(op: str, layout: str) -> None:
    runs = channel_norm.steps(NormCase(op, SIZE, layout, torch.float32), CPU)
    ours, theirs = runs["memopt"](), runs[EAGER]()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert ours[0].is_contiguous(memory_format=LAYOUTS[layout])


def test_a_case_is_in_the_table_with_its_goal() -> None:
    case = NormCase("group_norm, silu", SIZE, "planes", torch.bfloat16)
    found = channel_norm.case_of(case, CPU, BARELY)
    assert list(found["variants"]) == [EAGER, "memopt"]
    text = channel_norm.tables([found])
    assert "| group_norm, silu | planes" in text
    assert "| 1.5x |" in text


def test_every_op_size_order_and_dtype_is_a_case() -> None:
    names = channel_norm.all_cases()
    assert len(names) == len(OPS) * len(channel_norm.SIZES) * len(LAYOUTS) * 2
    assert "batch_norm, relu, 32x512x7x7, channels last, bfloat16" in names
