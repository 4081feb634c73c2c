"""Proves: beside transformers' gradient checkpointing, on a model of each kind, convert's regions
take its place in the layers that they are made of, and say so; it may be on in some layers only, be
turned off again, be of either kind of PyTorch's, stand under adapters or be a model of diffusers'
own. tests/convert/test_checkpointing_families.py has all families.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import memopt
from tests.convert.checkpointed import (
    Run,
    Step,
    checkpoint,
    convert,
    convert_with_regions,
    of_family,
    run,
    same_bits,
    train,
)
from tests.support.families import QUICK
from tests.support.tiny_transformers import tiny

pytest.importorskip("transformers", minversion="5.23")


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.parametrize("first", ["checkpoint", "regions"])
def test_regions_take_its_place(name: str, first: str) -> None:
    """No layer runs three times: neither inside the other's."""
    family = tiny(name)
    steps = [checkpoint, convert_with_regions][:: 1 if first == "checkpoint" else -1]
    alone, regions = train(family, checkpoint), train(family, *steps)
    assert regions.forwards == alone.forwards
    assert regions.held <= alone.held
    model = family.make()
    checkpoint(model)
    report = memopt.convert(model, checkpoint=True)
    assert any("take the place of transformers' gradient checkpointing" in n for n in report.notes)
    assert not any("twice" in note for note in report.notes)
    memopt.revert(model)
    reverted = of_family(family, model)
    assert (reverted.forwards, reverted.held) == (alone.forwards, alone.held)


@pytest.mark.parametrize("name", QUICK)
def test_regions_chosen_with_a_batch_take_its_place(name: str) -> None:
    """Nor is a region put around several layers, in which it would go on."""
    family = tiny(name)
    alone, model = train(family, checkpoint), family.make()
    checkpoint(model)
    report = memopt.convert(model, family.inputs(), checkpoint=True)
    both = of_family(family, model)
    assert all(both.forwards[path] <= count for path, count in alone.forwards.items())
    assert not any("twice" in note or "as they ran" in note for note in report.notes)
    if report.checkpointed:
        assert any("take the place of transformers'" in note for note in report.notes)


def test_a_report_without_it_does_not_mention_it() -> None:
    for step in (checkpoint, lambda m: (checkpoint(m), m.activation_checkpointing_disable())):
        model = tiny("llama").make()
        step(model)
        notes = str(memopt.convert(model).notes)
        assert "gradient checkpointing" not in notes


def test_regions_around_layers_that_it_is_on_in() -> None:
    family = tiny("llama")
    model = nn.Sequential(family.make())
    checkpoint(model[0])
    notes = memopt.convert(model, checkpoint=lambda m: m is model[0]).notes
    assert any(
        n.endswith("backward recomputes its layers twice: 0.layers.0, 0.layers.1") for n in notes
    )
    step = of_family(family, model[0])
    assert set(step.forwards.values()) == {3}


def test_some_of_the_layers_only() -> None:
    """As every_n_layers chooses them."""
    family = tiny("llama")

    def every_second(model: nn.Module) -> None:
        model.activation_checkpointing_enable(every_n_layers=2)  # type: ignore[operator]

    alone = train(family, every_second)
    assert sorted(alone.forwards.values()) == [1, 2]
    for steps in ((convert, every_second), (every_second, convert)):
        both = train(family, *steps)
        assert both.forwards == alone.forwards
        assert both.held <= alone.held


def test_turned_off_again_it_is_off() -> None:
    family = tiny("llama")

    def on_and_off(model: nn.Module) -> None:
        checkpoint(model)
        model.activation_checkpointing_disable()  # type: ignore[operator]

    converted, off = train(family, convert), train(family, convert, on_and_off)
    assert (off.forwards, off.held) == (converted.forwards, converted.held)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("first", ["convert", "checkpoint"])
def test_both_kinds_of_pytorch_s_checkpoint(use_reentrant: bool, first: str) -> None:
    family = tiny("llama")

    def enable(model: nn.Module) -> None:
        model.activation_checkpointing_enable(  # type: ignore[operator]
            activation_checkpointing_kwargs={"use_reentrant": use_reentrant}
        )
        model.enable_input_require_grads()  # type: ignore[operator]

    steps = [convert, enable][:: 1 if first == "convert" else -1]
    alone, both = train(family, enable), train(family, *steps)
    assert set(alone.forwards.values()) == {2}
    assert both.forwards == alone.forwards
    assert both.held <= alone.held
    assert same_bits(both, train(family, convert))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize(
    "order", ["wrap convert enable", "convert wrap enable", "wrap enable convert"]
)
def test_adapters(use_reentrant: bool, order: str) -> None:
    """PEFT's LoRA, on a frozen model."""
    peft = pytest.importorskip("peft")
    from transformers import LlamaForCausalLM

    family = tiny("llama")
    ids = family.inputs()["input_ids"]

    def adapted(order: str) -> Run:
        torch.manual_seed(0)
        model: Any = LlamaForCausalLM(family.config).train()
        for step in order.split():
            if step == "wrap":
                settings = peft.LoraConfig(target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
                torch.manual_seed(1)
                model = peft.get_peft_model(model, settings)
            elif step == "convert":
                convert(model)
            else:
                model.enable_input_require_grads()
                model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        return run(model, lambda: model(input_ids=ids, labels=ids).loss)

    alone, both = adapted("wrap enable"), adapted(order)
    assert set(alone.forwards.values()) == {2}
    assert both.forwards == alone.forwards
    assert both.held <= alone.held
    assert both.gradients.keys() == alone.gradients.keys()
    assert same_bits(both, adapted("wrap convert"))


def test_diffusers_models_that_checkpoint_their_blocks_themselves() -> None:
    """The model runs the block under a checkpoint; a region there keeps nothing less."""
    diffusers = pytest.importorskip("diffusers")

    def train(*steps: Step) -> Counter[int]:
        torch.manual_seed(0)
        model = diffusers.DiTTransformer2DModel(
            num_attention_heads=2,
            attention_head_dim=8,
            in_channels=4,
            num_layers=2,
            sample_size=4,
            num_embeds_ada_norm=4,
        ).train()
        for step in steps:
            step(model)
        calls: Counter[int] = Counter()
        for i, block in enumerate(model.transformer_blocks):
            block.attn1.to_q.register_forward_pre_hook(lambda *_, i=i: calls.update([i]))
        ones = torch.ones(1, dtype=torch.long)
        image = torch.randn(1, 4, 4, 4)
        model(image, timestep=ones, class_labels=ones).sample.sum().backward()
        return calls

    def enable(model: Any) -> None:
        model.enable_gradient_checkpointing()

    def regions(model: nn.Module) -> None:
        notes = memopt.convert(model, checkpoint=True).notes
        said = any("nothing left for that to save: transformer_blocks.0" in n for n in notes)
        assert said == model.gradient_checkpointing

    expected = {0: 2, 1: 2}
    for steps in ((enable,), (convert, enable), (enable, convert), (enable, regions), (regions,)):
        assert train(*steps) == expected
    assert train(convert) == {0: 1, 1: 1}
