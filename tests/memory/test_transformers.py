"""Proves: models of transformers that install hooks at their first call, to record outputs, have
them once, and are in all else as they were, whatever was measured before that call.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import memopt
from tests.support.fingerprint import Fingerprint


def fresh(name: str) -> tuple[nn.Module, dict[str, Any]]:
    transformers = pytest.importorskip("transformers")
    ids = torch.randint(0, 50, (2, 8))
    text = {"input_ids": ids, "labels": ids, "output_hidden_states": True}
    common = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    if name == "segformer":
        config = transformers.SegformerConfig(
            num_encoder_blocks=2,
            depths=[1, 1],
            sr_ratios=[2, 1],
            hidden_sizes=[16, 32],
            patch_sizes=[7, 3],
            strides=[4, 2],
            num_attention_heads=[1, 2],
            mlp_ratios=[2, 2],
            decoder_hidden_size=16,
            num_labels=3,
        )
        labels = torch.randint(0, 3, (2, 32, 32))
        images = {"pixel_values": torch.randn(2, 3, 32, 32), "labels": labels}
        return transformers.SegformerForSemanticSegmentation(config), images
    common |= {"num_attention_heads": 2, "vocab_size": 50, "attn_implementation": "eager"}
    if name == "llama":
        config = transformers.LlamaConfig(num_key_value_heads=2, **common)
        return transformers.LlamaForCausalLM(config), text
    config = transformers.BertConfig(**common)
    return transformers.BertForMaskedLM(config), {**text, "output_attentions": True}


@pytest.mark.parametrize("name", ["segformer", "llama", "bert"])
def test_what_the_first_call_installs(name: str) -> None:
    model, batch = fresh(name)
    before = Fingerprint(model, batch)
    memopt.saved_bytes(model, **batch)
    memopt.convert(model, batch)
    memopt.revert(model)
    memopt.anatomy(model, batch, measure=True)
    memopt.plan(model, batch, 1 << 30, measure=False).apply().undo()
    assert Fingerprint(model, batch).differences(before) == []


@pytest.mark.parametrize("name", ["segformer", "llama", "bert"])
def test_a_converted_model_records_each_output_once(name: str) -> None:
    model, batch = fresh(name)
    expected = model.eval()(**batch)
    other, _ = fresh(name)
    other.load_state_dict(model.state_dict())
    memopt.convert(other.eval(), batch)
    found = other(**batch)
    assert found.keys() == expected.keys()
    for key in ("hidden_states", "attentions"):
        if expected.get(key) is not None:
            assert len(found[key]) == len(expected[key])
