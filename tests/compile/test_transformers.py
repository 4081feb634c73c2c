"""Proves: of unmodified models of transformers, compiled with memopt, backward holds no more than
compiled by torch.compile alone, and about what it holds of the converted model in eager mode; the
gradients are the eager model's.
"""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from torch import Tensor, nn

import memopt
from benchmarks.convert_models.models import MODELS
from tests.compile.support import gradients, step_bytes

pytest.importorskip("transformers")

# Every name that their configurations have for it.
DROPOUT = (
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "resid_pdrop",
    "embd_pdrop",
    "attn_pdrop",
    "attention_dropout",
    "hidden_dropout",
    "dropout_rate",
    "dropout",
    "activation_dropout",
)


def make(name: str, dropout: float) -> nn.Module:
    model = MODELS[name].make()
    if dropout:
        config = {k: dropout for k in DROPOUT if hasattr(model.config, k)}
        model = MODELS[name].make(**config)
    model.config.use_cache = False
    return model


def step_of(forward: Any, inputs: dict[str, Tensor]) -> Any:
    return lambda: forward(**inputs).loss


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("name", MODELS)
def test_bytes_and_gradients(name: str, dropout: float) -> None:
    model, inputs = make(name, dropout), MODELS[name].inputs()
    plain = step_bytes(step_of(torch.compile(model), inputs), model)
    torch.compiler.reset()
    compiled = memopt.compile(model)
    ours = step_bytes(step_of(compiled, inputs), model)
    if not dropout:
        expected = gradients(step_of(model, inputs), model)
        for key, actual in gradients(step_of(compiled, inputs), model).items():
            torch.testing.assert_close(actual, expected[key], rtol=1e-3, atol=1e-5, msg=key)
    memopt.convert(model)
    converted = step_bytes(step_of(model, inputs), model)
    print(f"BYTES {name} {dropout} plain {plain} ours {ours} converted {converted}")
    assert ours.held <= plain.held
    assert ours.held <= 1.03 * converted.held
