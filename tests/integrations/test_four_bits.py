"""Proves: a base in 4 bits (bitsandbytes' NF4) with PEFT's adapters is converted, planned and
checked: losses are those of the plain model but for rounding, peaks by the allocator fall, and a
plan's measured peak is the predicted one and within its budget; in evaluation mode, and with 8
bits, nothing is refused either, and the predicted peak is the allocator's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import memopt
from memopt.memory.allocator import LiveBytes

bitsandbytes = pytest.importorskip("bitsandbytes")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers", minversion="5.23")
pytest.importorskip("accelerate")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama as it is published: in full precision."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=192, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("llama")
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def adapted(folder: Path, bits: int = 4) -> Any:
    quantized = transformers.BitsAndBytesConfig(
        load_in_4bit=bits == 4,
        load_in_8bit=bits == 8,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.float32,
    )
    base = transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=quantized, device_map="cpu"
    )
    base = peft.prepare_model_for_kbit_training(base, use_gradient_checkpointing=False)
    layer = bitsandbytes.nn.Linear4bit if bits == 4 else bitsandbytes.nn.Linear8bitLt
    assert isinstance(base.model.layers[0].mlp.up_proj, layer)
    torch.manual_seed(1)
    lora = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(base, lora).train()


def batch() -> dict[str, torch.Tensor]:
    torch.manual_seed(2)
    ids = torch.randint(256, (4, 64))
    return {"input_ids": ids, "labels": ids}


def step(model: Any) -> tuple[float, int]:
    with LiveBytes() as live:
        loss = model(**batch()).loss
        loss.backward()
    model.zero_grad()
    return loss.item(), live.most


def test_convert_and_check(folder: Path) -> None:
    model = adapted(folder)
    loss, peak = step(model)
    report = memopt.convert(model, batch())
    assert report.bytes_before is not None
    assert report.bytes_after is not None
    assert report.bytes_after < 0.7 * report.bytes_before
    converted, less = step(model)
    assert converted == pytest.approx(loss, rel=1e-5)
    assert less < 0.75 * peak
    memopt.convert(model, batch(), checkpoint=True)
    regions, least = step(model)
    assert regions == converted
    assert least < 0.75 * less
    memopt.check(model, batch()).raise_if_not_ok()


def test_a_plan(folder: Path) -> None:
    model = adapted(folder)
    loss, peak = step(model)
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    plain = memopt.plan(model, batch(), optimizer=optimizer, measure=False)
    plan = plain.within(int(0.6 * plain.plain_peak)).apply()
    assert plan.measured_peak == plan.peak <= plan.budget
    planned, less = step(model)
    assert planned == pytest.approx(loss, rel=1e-5)
    assert less < 0.7 * peak


@pytest.mark.parametrize("bits", [4, 8])
def test_in_evaluation_mode(folder: Path, bits: int) -> None:
    """On some processors a layer packs its weight in another order then, on its first call."""
    model = adapted(folder, bits).eval()
    for _ in range(2):
        report = memopt.anatomy(model, batch())
        assert report.predicted is not None
        assert memopt.fits(model, batch(), "80GB")
        memopt.check(model, batch()).raise_if_not_ok()
        step(model)
    memopt.plan(model, batch(), measure=False)
