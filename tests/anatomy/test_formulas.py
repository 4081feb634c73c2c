"""Proves the closed formulas against their source, and against the prediction."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import memopt
from memopt._anatomy.formulas import TransformerShape
from memopt.whatif.fates import Fates
from tests.anatomy.models import tiny

S, B, H, A = 128, 2, 64, 4
SHAPE = TransformerShape(
    layers=8,
    hidden=H,
    heads=A,
    kv_heads=A,
    ffn=4 * H,
    gated=False,
    tokens=S * B,
    sequence=S,
    vocabulary=0,
    itemsize=2,
    masks=1,
    attention=True,
)


def test_korthikanti() -> None:
    assert SHAPE.block_bytes() == S * B * H * 34 + 5 * A * S * S * B


def test_recipes_take_the_norms_and_the_activation() -> None:
    assert SHAPE.block_bytes() - SHAPE.block_bytes(recipes=True) == S * B * H * (4 + 8)


def test_the_best_number_of_segments() -> None:
    """Of segments that hold their input and one segment's blocks; and Chen et al.'s root."""
    block = SHAPE.block_bytes()
    best = min(range(1, 9), key=lambda k: k * SHAPE.input_bytes() + 8 / k * block)
    assert abs(SHAPE.best_segments("optimal", block) - best) <= 1
    assert SHAPE.best_segments("sqrt", block) == 3


def test_fates() -> None:
    plain = SHAPE.activation_bytes(Fates(who="a test"))
    assert plain == 8 * SHAPE.block_bytes() + SHAPE.head_bytes()
    regions = SHAPE.activation_bytes(Fates(checkpoint="all", who="a test"))
    assert regions == 8 * SHAPE.input_bytes() + SHAPE.head_bytes()
    half = SHAPE.activation_bytes(Fates(checkpoint=2, who="a test"))
    assert half == 4 * (SHAPE.input_bytes() + SHAPE.block_bytes()) + SHAPE.head_bytes()


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_in_the_optimizers_step(optimizer: Any) -> None:
    """With few tokens the peak is there. Only the counts of steps are missing."""
    model, batch = tiny("llama", rows=1, length=4)
    report = memopt.anatomy(model, batch, optimizer=optimizer)
    assert report.formula is not None
    for category in ("weights", "gradients"):
        assert report.formula[category] == report.moment_bytes("most in optimizer")[category]
    states = report.moment_bytes("peak")["optimizer states"]
    counts = 4 * len(list(model.parameters())) if optimizer is torch.optim.AdamW else 0
    assert report.formula["optimizer states"] == states - counts
    if optimizer is torch.optim.AdamW:
        assert report.peak.phase == "optimizer"
        assert report.formula["temporary buffers"] == report.peak.by_category["temporary buffers"]
