"""Proves: transformers' gradient checkpointing runs each layer of a converted model as often as a
layer of the plain one, and holds no more bytes for backward, in whichever order the two are turned
on; convert's own regions take its place in the layers that they are made of, and say so.

Bits alone would not show it: with and without checkpointing they are the same.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt.memory.allocator import LiveBytes
from tests.support.tiny_transformers import Tiny, loss_of, tiny

transformers: Any = pytest.importorskip("transformers", minversion="5.23")

FAMILIES = re.findall(
    r"\S+",
    """
    afmoe aimv2_vision_model apertus arcee aria_text bart beam beit bert bert-generation big_bird
    bigbird_pegasus biogpt bitnet blenderbot blenderbot-small bloom camembert canine
    chinese_clip_vision_model clip_text_model clip_vision_model cohere cohere2 cohere2_moe convbert
    cwm data2vec-audio data2vec-text data2vec-vision deberta deberta-v2 deepseek_v4 deit diffllama
    dinov2 dinov2_with_registers dinov3_vit distilbert doge dpt electra embedding_gemma2
    embedding_gemma2_text ernie ernie4_5 eurobert evolla exaone4 exaone_moe falcon falcon_mamba
    flava flex_olmo flint fnet gemma gemma2 gemma3_text gemma4_unified_text glm glm4 glm4_moe
    glmasr_encoder gpt-sw3 gpt2 gpt_bigcode gpt_neox gpt_oss granite granite_docling
    granite_docling_text granite_swa granitemoe granitemoe_swa granitemoeshared gte helium
    higgs_audio_v2 hrm_text hubert hy_v3 hy_v4 hyperclovax ijepa imagegpt inkling2_text inkling_text
    internlm3 internvl_vision iquestcoder jais2 jamba jina_embeddings_v3 kolibri1 kosmos-2.5 laguna
    layoutlm led lfm2 llama llama4_text longformer longt5 m2m_100 mamba marian mbart megatron-bert
    mellum mimo_v2_flash minimax minimax_m2 minimax_m3_vl minimax_m3_vl_text ministral3 mistral
    mixtral mlcd mlcd_vision_model mllama mobilebert modernbert modernbert-decoder molmo2_text moshi
    moss_transcribe_diarize_audio mpt mra mt5 muse_glimmer_text mvp nanochat nemotron_h nllb-moe
    nomic_bert nystromformer olmo olmo2 olmo3 olmo_hybrid olmoe openai_privacy_filter opt pegasus
    pegasus_x persimmon phi phi3 phi4_multimodal phimoe pixio pixtral plbart prophetnet
    qianfan_ocr_vision qwen2 qwen2_audio_encoder qwen2_moe qwen3 qwen3_5_text qwen3_moe qwen3_next
    qwen3_vl qwen3_vl_moe qwen3_vl_moe_text qwen3_vl_text radio rembert roberta roberta-prelayernorm
    roformer rwkv sam_hq_vision_model sam_vision_model sapiens2 seed_oss sew sew-d
    siglip_vision_model smollm3 solar_open splinter stablelm starcoder2 switch_transformers t5
    t5gemma tapas tipsv2 tipsv2_text_model tipsv2_vision_model ultrabert umt5 unispeech
    unispeech-sat vaultgemma visual_bert vit vit_mae vit_msn vitdet voxtral_encoder
    voxtral_realtime_encoder wav2vec2 wav2vec2-conformer wavlm whisper xglm xlm-roberta
    xlm-roberta-xl yolos yoso
    """,
)

# One of each kind: a decoder, an encoder, one for images, one for sound, two towers, experts.
QUICK = ("llama", "bert", "vit", "wav2vec2", "t5", "mixtral")

Step = Callable[[nn.Module], object]


@dataclass
class Run:
    """A training step."""

    forwards: Counter[str]
    """Of each layer that transformers can checkpoint, in forward and backward: how often the leaf
    in it is called that is called first.
    """

    held: int
    """Bytes that are allocated when forward has returned and backward begins; -1 if not counted."""

    gradients: dict[str, Tensor]


def train(family: Tiny, *steps: Step, count: bool = True) -> Run:
    """One step of a new model, after these changes of it; `count` says whether to count bytes."""
    model = family.make()
    for step in steps:
        step(model)
    return run(model, lambda: loss_of(model(**family.inputs())), count)


def run(model: nn.Module, loss_of_model: Callable[[], Tensor], count: bool = True) -> Run:
    calls: Counter[tuple[str, str]] = Counter()
    handles = [
        leaf.register_forward_pre_hook(
            lambda *_, path=path, name=name: calls.update([(path, name)])
        )
        for path, layer in layers(model).items()
        for name, leaf in layer.named_modules()
        if not leaf._modules
    ]
    model.zero_grad(set_to_none=True)
    torch.manual_seed(2)
    live = LiveBytes()
    with live if count else nullcontext():
        loss = loss_of_model()
        live.mark()
        loss.backward()
    for handle in handles:
        handle.remove()
    forwards: Counter[str] = Counter()
    for (path, _), number in calls.items():
        forwards.setdefault(path, number)
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return Run(forwards, live.marks[0].nbytes if count else -1, gradients)


def layers(model: nn.Module) -> dict[str, nn.Module]:
    from transformers.modeling_layers import GradientCheckpointingLayer

    return {n: m for n, m in model.named_modules() if isinstance(m, GradientCheckpointingLayer)}


def checkpoint(model: nn.Module) -> None:
    model.activation_checkpointing_enable()  # type: ignore[operator]


def convert(model: nn.Module) -> None:
    assert memopt.convert(model).recipes


def convert_with_regions(model: nn.Module) -> None:
    assert memopt.convert(model, checkpoint=True).checkpointed


def same_bits(ours: Run, theirs: Run) -> bool:
    return ours.gradients.keys() == theirs.gradients.keys() and all(
        torch.equal(gradient, theirs.gradients[name]) for name, gradient in ours.gradients.items()
    )


@pytest.mark.parametrize(
    "name", [pytest.param(f, marks=() if f in QUICK else pytest.mark.slow) for f in FAMILIES]
)
def test_each_layer_runs_as_often_and_holds_no_more(name: str) -> None:
    family = tiny(name)
    plain, converted = (train(family, *steps, count=False) for steps in ((), (convert,)))
    alone = train(family, checkpoint)
    assert sum(alone.forwards.values()) > sum(plain.forwards.values())  # else it proves nothing
    assert converted.forwards == plain.forwards
    # Where a tensor goes to several layers its gradients are added in another order, as in plain.
    bits = same_bits(alone, plain)
    after = train(family, convert, checkpoint)
    before = train(family, checkpoint, convert)
    for both in (after, before):
        assert both.forwards == alone.forwards
        assert both.held <= alone.held
        assert same_bits(both, converted) or not bits
        assert same_bits(both, after)
    regions = train(family, checkpoint, convert_with_regions)
    assert regions.held <= alone.held
    assert same_bits(regions, converted) or not bits


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
    reverted = run(model, lambda: loss_of(model(**family.inputs())))
    assert (reverted.forwards, reverted.held) == (alone.forwards, alone.held)


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
        n.endswith("backward runs its layers again twice: 0.layers.0, 0.layers.1") for n in notes
    )
    step = run(model, lambda: loss_of(model[0](**family.inputs())))
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
