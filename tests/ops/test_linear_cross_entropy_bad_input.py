"""Proves: linear_cross_entropy names what is wrong with its arguments, and reads nothing wild."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memopt.functional import linear_cross_entropy

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a float class": ({"target": torch.zeros(4)}, "target must have dtype int64"),
    "an int32 class": (
        {"target": torch.zeros(4, dtype=torch.int32)},
        "target must have dtype int64",
    ),
    "a class too large": ({"target": torch.tensor([0, 1, 6, 0])}, r"\[0, 6\) .* got 6 in row 2"),
    "a negative class": ({"target": torch.tensor([0, -1, 5, 0])}, r"got -1 in row 1"),
    "too few classes": ({"target": torch.zeros(3, dtype=torch.int64)}, "target must have shape"),
    "others' words": ({"target": torch.ones(4, 7)}, "target must have shape"),
    "other features": ({"linear_weight": torch.ones(6, 4)}, "linear_weight must have shape"),
    "a vector": ({"linear_weight": torch.ones(3)}, "linear_weight must have two dimensions"),
    "another dtype": ({"linear_weight": torch.ones(6, 3).double()}, "linear_weight must have"),
    "another bias": ({"linear_bias": torch.ones(5)}, "linear_bias must have shape"),
    "other weights": ({"weight": torch.ones(5)}, r"class weights must have shape \[6\]"),
    "integer weights": ({"weight": torch.ones(6, dtype=torch.int64)}, "class weights must have"),
    "smoothing": ({"label_smoothing": 1.5}, "label_smoothing must be between 0 and 1, got 1.5"),
    "less than none": ({"label_smoothing": -0.1}, "label_smoothing must be between 0 and 1"),
    "NaN": ({"label_smoothing": float("nan")}, "label_smoothing must be between 0 and 1"),
    "chunk": ({"chunk": 0}, "chunk must be at least 1, got 0"),
    "softcap": ({"softcap": 0.0}, "softcap must be positive"),
    "z_loss": ({"z_loss": -1.0}, "z_loss must be finite and not negative"),
    "logit_scale": ({"logit_scale": float("inf")}, "logit_scale must be finite"),
    "reduction": ({"reduction": "max"}, "reduction must be none, mean or sum, got 'max'"),
    "integers": ({"input": torch.ones(4, 3, dtype=torch.int64)}, "input must have dtype"),
    "num_items": ({"num_items": torch.ones(2)}, "num_items must be one number"),
    "ignored probabilities": (
        {"target": torch.ones(4, 6), "ignore_index": 3},
        "ignore_index is for class indices",
    ),
    "a target to train": (
        {"target": torch.ones(4, 6, requires_grad=True)},
        "target requires a gradient",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_named(what: str) -> None:
    good = {
        "input": torch.ones(4, 3),
        "linear_weight": torch.ones(6, 3),
        "target": torch.tensor([0, 1, 5, -100]),
    }
    change, message = BAD[what]
    with pytest.raises((RuntimeError, ValueError, IndexError), match="linear_cross_entropy: ") as e:
        linear_cross_entropy(**{**good, **change})
    e.match(message)
