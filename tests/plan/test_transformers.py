"""Proves that plans of models of transformers are found within ten budgets each, from the least
that any plan takes to all that the model takes, and that they hold: every third of a model's plans
is applied, another one first for each model. What is said to fit does, by the ledger of a real
step; predictions are exact; and gradients are those of the same ops without regions in every bit.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import memopt
from memopt._plan.curve import curve_of
from memopt.applied import assigned
from tests.plan.support import gradients, without_regions

pytestmark = pytest.mark.slow
transformers = pytest.importorskip("transformers")

WORDS = 120
_SMALL = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}


def text() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, WORDS, (2, 32), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids.clone()}


def gpt2() -> tuple[nn.Module, Any]:
    config = transformers.GPT2Config(
        n_embd=32, n_layer=4, n_head=2, vocab_size=WORDS, bos_token_id=1, eos_token_id=2
    )
    return transformers.GPT2LMHeadModel(config), text()


def llama() -> tuple[nn.Module, Any]:
    config = transformers.LlamaConfig(**_SMALL, intermediate_size=80, vocab_size=WORDS)
    return transformers.LlamaForCausalLM(config), text()


def bert() -> tuple[nn.Module, Any]:
    config = transformers.BertConfig(**_SMALL, intermediate_size=128, vocab_size=WORDS)
    return transformers.BertForMaskedLM(config), text()


def t5() -> tuple[nn.Module, Any]:
    config = transformers.T5Config(
        d_model=32, num_layers=2, num_heads=2, d_ff=128, d_kv=16, vocab_size=WORDS,
        decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config), text()


def vit() -> tuple[nn.Module, Any]:
    config = transformers.ViTConfig(**_SMALL, intermediate_size=128, image_size=32, patch_size=8)
    pixels = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    batch = {"pixel_values": pixels, "labels": torch.zeros(4, dtype=torch.long)}
    return transformers.ViTForImageClassification(config), batch


MODELS = (gpt2, llama, bert, t5, vit)


@pytest.mark.filterwarnings("ignore:checkpoint_wrapper")
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_ten_budgets(make: Any) -> None:
    torch.manual_seed(0)
    model, batch = make()
    model.train()
    plan = memopt.plan(model, batch, 1 << 40, measure=False)
    least = curve_of(plan.profile, plan.terms, 2).plans[0].peak
    chosen: dict[Any, memopt.Plan] = {}
    for part in range(10):
        budget = least + (plan.plain_peak - least) * part // 9
        try:
            found = plan.within(budget)
        except memopt.BudgetTooSmall as error:
            assert part == 0, budget
            found = plan.within(error.floor)
            budget = error.floor
        assert found.peak <= budget
        chosen[tuple(block.choice for block in found.blocks)] = found
    for found in list(chosen.values())[MODELS.index(make) % 3 :: 3]:
        found.apply()
        assert found.measured_peak == found.peak
        mine = gradients(model, batch)
        found.undo()
        with assigned(model, without_regions(found)):
            expected = gradients(model, batch)
        for name, gradient in mine.items():
            assert torch.equal(gradient, expected[name]), name
