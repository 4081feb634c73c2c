"""Proves: mlp saves exactly what its `recompute` says, and nothing for gradients that are not asked
for; it runs no product that no gradient needs; and its buffers are written over.
"""

from __future__ import annotations

import pytest
import torch

from memopt.memory.allocator import LiveBytes
from memopt.memory.saved import SavedTensors
from tests.support.mlp import (
    FEATURES,
    HIDDEN,
    LEVELS,
    Variant,
    every_variant,
    fused,
    make_tensors,
)
from tests.support.record_ops import RecordOps

STATISTICS_BYTES = {"none": 0, "layer_norm": 8, "rms_norm": 4}
STATE_BYTES = 16


def saved_bytes(variant: Variant, recompute: str, rows: int, frozen: tuple[str, ...] = ()) -> int:
    tensors = make_tensors(variant, torch.device("cpu"), torch.bfloat16, (rows,))
    for name in frozen:
        if name in tensors:
            tensors[name].requires_grad_(False)
    parameters = [t for name, t in tensors.items() if name != "input"]
    with SavedTensors(exclude=parameters) as saved:
        fused(variant, tensors, recompute)
    return saved.bytes


@every_variant
def test_saves_what_its_level_says(variant: Variant) -> None:
    rows, h, m = 12, FEATURES, HIDDEN
    statistics = STATISTICS_BYTES[variant.norm]
    norm_output = 0 if variant.norm == "none" else 2 * h
    states = STATE_BYTES * ((variant.activation_dropout > 0) + (variant.dropout > 0))
    row = {
        "none": 2 * h + norm_output + 2 * variant.first * m + 2 * m + statistics,
        "activations": 2 * h + 2 * variant.first * m + statistics,
        "all": 2 * h + statistics,
    }
    for recompute in LEVELS:
        counted = saved_bytes(variant, recompute, rows)
        print(
            f"{variant}, {recompute}: {row[recompute]} B a row "
            f"(h = {h}, m = {m}, {variant.first} first linears) + {states} B"
        )
        assert counted == rows * row[recompute] + states


def test_saves_nothing_for_gradients_that_nobody_asks_for() -> None:
    rows, h, m = 12, FEATURES, HIDDEN
    weights = ("gate_weight", "up_weight", "down_weight")
    llama = Variant("Llama", norm="rms_norm", gated=True, activation="silu", bias=False)
    plain = Variant("plain")
    # Frozen weights: a gradient still goes through the norm and the activation.
    assert saved_bytes(llama, "activations", rows, weights) == rows * (2 * h + 4 + 4 * m)
    assert saved_bytes(llama, "none", rows, weights) == rows * (2 * h + 4 + 4 * m)
    assert saved_bytes(plain, "activations", rows, weights) == rows * 2 * m
    # Only the last bias is trained: nothing at all.
    rest = ("input", "up_weight", "up_bias", "down_weight")
    for recompute in LEVELS:
        assert saved_bytes(plain, recompute, rows, rest) == 0
    # Only the last linear is trained: what stands before it, by the level.
    before = ("input", "up_weight", "up_bias")
    by_level = {"none": 2 * m, "activations": 2 * m, "all": 2 * h}
    for recompute, row in by_level.items():
        assert saved_bytes(plain, recompute, rows, before) == rows * row


def products(variant: Variant, recompute: str, frozen: tuple[str, ...] = ()) -> int:
    """Matrix products in backward."""
    tensors = make_tensors(variant, torch.device("cpu"), torch.float32)
    for name in frozen:
        tensors[name].requires_grad_(False)
    y = fused(variant, tensors, recompute)
    with RecordOps() as record:
        y.backward(torch.ones_like(y))
    return sum(str(op).startswith(("aten.mm", "aten.addmm", "aten.linear")) for op in record.ops)


def test_runs_no_product_that_no_gradient_asks_for() -> None:
    gpt = Variant("GPT-2", norm="layer_norm", residual=True)
    for recompute, again in (("none", 0), ("activations", 0), ("all", 1)):
        assert products(gpt, recompute) == 4 + again
        assert products(gpt, recompute, ("up_weight",)) == 3 + again
        assert products(gpt, recompute, ("up_weight", "down_weight")) == 2 + again
        assert products(gpt, recompute, ("input", "norm_weight", "norm_bias")) == 3 + again
    llama = Variant("Llama", norm="rms_norm", gated=True, activation="silu", bias=False)
    assert products(llama, "activations") == 6
    assert products(llama, "all") == 8


@pytest.mark.parametrize("gated", [False, True])
def test_buffers_are_written_over_and_go_early(gated: bool) -> None:
    """Of results that are alive at one time, in float32: p and a hold m a row, n and y h.

    Forward holds p and a, or p alone where it is not kept. Backward holds first the gradient of p
    (written over that of a), a, and V's gradient; where p was made again n is alive as well and a
    takes p's place. Then n's gradient is a sum over the first linears, and at last it holds the
    gradient of p, n, x's gradient (written over that of n), and the gradients of V, the norm's
    weight and the first W.
    """
    rows, h, m = 512, FEATURES, HIDDEN
    g = 2 if gated else 1
    variant = Variant("bytes", "rms_norm", gated, "silu", bias=False)
    forward, backward = {}, {}
    for recompute in ("activations", "all"):
        tensors = make_tensors(variant, torch.device("cpu"), torch.float32, (rows,))
        with LiveBytes() as live:
            y = fused(variant, tensors, recompute)
        forward[recompute] = live.most
        grad = torch.ones_like(y)
        with LiveBytes() as live:
            y.backward(grad)
        backward[recompute] = live.most
    rstd = rows * 4
    assert forward["activations"] == 4 * rows * ((g + 1) * m + h) + rstd
    assert forward["all"] == 4 * rows * (g * m + h) + rstd
    for recompute, again in (("activations", 0), ("all", h)):
        first = 4 * rows * ((g + 1) * m + again) + 4 * h * m
        sum_of_n = 4 * rows * (g * m + again + g * h) + 4 * h * m
        second = 4 * rows * (g * m + 2 * h) + 4 * (2 * h * m + h)
        assert backward[recompute] == max(first, sum_of_n, second)
