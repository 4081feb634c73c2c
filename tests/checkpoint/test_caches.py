"""Proves: a model of transformers trains in regions as it does without them, in every bit and at
fewer bytes, whatever its cache of keys and values is: made by the model or given, read by another
tower afterwards, grown by several calls. The recompute grows a copy that is dropped, and a region
keeps no cache alive.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from tests.checkpoint.support import step_results
from tests.support.bits import assert_same_bits

transformers: Any = pytest.importorskip("transformers")

pytestmark = pytest.mark.slow  # for whichever test imports the library first

SMALL = {"vocab_size": 50, "hidden_size": 16, "num_attention_heads": 2}
T5 = {"vocab_size": 50, "d_model": 16, "d_ff": 16, "d_kv": 8, "num_heads": 2, "num_layers": 2}
BART = {
    "vocab_size": 50,
    "d_model": 16,
    **{f"{part}_layers": 2 for part in ("encoder", "decoder")},
    **{f"{part}_attention_heads": 2 for part in ("encoder", "decoder")},
    **{f"{part}_ffn_dim": 16 for part in ("encoder", "decoder")},
}
XLM = {"n_words": 50, "emb_dim": 16, "n_layers": 2, "n_heads": 2}
IDS = torch.randint(3, 50, (2, 7), generator=torch.Generator().manual_seed(0))

CONFIGS = {
    "Llama": lambda: transformers.LlamaConfig(**SMALL, num_hidden_layers=2, intermediate_size=16),
    "GPT-2": lambda: transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2),
    "BLOOM": lambda: transformers.BloomConfig(vocab_size=50, hidden_size=16, n_layer=2, n_head=2),
    "Falcon": lambda: transformers.FalconConfig(**SMALL, num_hidden_layers=2),
    "Gemma 2": lambda: transformers.Gemma2Config(
        **SMALL, num_hidden_layers=2, intermediate_size=16, num_key_value_heads=2, head_dim=8
    ),
    "T5": lambda: transformers.T5Config(**T5, decoder_start_token_id=0, pad_token_id=0),
    "BART": lambda: transformers.BartConfig(**BART),
    "Jamba": lambda: transformers.JambaConfig(
        **SMALL,
        num_hidden_layers=4,
        intermediate_size=16,
        num_key_value_heads=2,
        attn_layer_period=2,
        attn_layer_offset=1,
    ),
    "Mamba": lambda: transformers.MambaConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, state_size=4
    ),
    # These make their cache themselves, whatever one asks for.
    "Flaubert": lambda: transformers.FlaubertConfig(**XLM),
    "XLM": lambda: transformers.XLMConfig(**XLM),
}


def make(name: str, training: bool = True) -> nn.Module:
    torch.manual_seed(0)
    config = CONFIGS[name]()
    kind = "Seq2SeqLM" if config.is_encoder_decoder else "CausalLM"
    if name in ("Flaubert", "XLM"):
        kind = "MaskedLM"
    model: nn.Module = getattr(transformers, f"AutoModelFor{kind}").from_config(config)
    return model.train(training)


def forwards_of(model: nn.Module, names: list[str]) -> dict[str, int]:
    """How often the forward of each module ran, from now on."""
    counts = dict.fromkeys(names, 0)
    for name in names:
        child = next(model.get_submodule(name).children())  # is called in the recompute, too

        def count(*_: Any, name: str = name) -> None:
            counts[name] += 1

        child.register_forward_pre_hook(count)
    return counts


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_is_that_without_regions(name: str, use_cache: bool, training: bool) -> None:
    model = make(name, training)
    options = {} if name in ("Flaubert", "XLM") else {"use_cache": use_cache}

    def loss() -> Tensor:
        return model(input_ids=IDS, labels=IDS, **options).loss

    expected = step_results(loss, model.parameters())
    before = memopt.saved_bytes(loss)
    names = memopt.apply_activation_checkpointing(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same_bits(step_results(loss, model.parameters()), expected)
    assert memopt.saved_bytes(loss) < before / 2
    counts = forwards_of(model, [name for name in names if "layers" in name or ".h." in name])
    loss().backward()
    assert set(counts.values()) <= {2}  # forward and recompute


def pi0() -> tuple[nn.Module, dict[str, Tensor]]:
    """A language tower whose keys and values are the prefix of the action expert."""
    torch.manual_seed(0)
    gemma = {
        "model_type": "gemma",
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
    }
    vision = {
        "model_type": "siglip_vision_model",
        "intermediate_size": 16,
        "hidden_size": 16,
        "patch_size": 4,
        "image_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vision_use_head": False,
    }
    config = transformers.PI0Config(
        vlm_config={
            "model_type": "paligemma",
            "text_config": {**gemma, "vocab_size": 64},
            "vision_config": vision,
            "projection_dim": 16,
            "image_token_id": 63,
        },
        dit_config=gemma,
        chunk_size=3,
        max_state_dim=4,
        max_action_dim=4,
    )
    ids = torch.tensor([[63] * 4 + [3, 4, 5], [63] * 4 + [6, 7, 8]])
    batch = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.randn(2, 1, 3, 8, 8),
        "pixel_attention_mask": torch.ones(2, 1, dtype=torch.bool),
        "state": torch.randn(2, 4),
        "actions": torch.randn(2, 3, 4),
        "noise": torch.randn(2, 3, 4),
        "timestep": torch.rand(2),
    }
    return transformers.PI0ForConditionalGeneration(config).train(), batch


@pytest.mark.skipif(not hasattr(transformers, "PI0Config"), reason="a newer transformers has it")
def test_a_cache_that_another_tower_reads_in_the_same_step() -> None:
    model, batch = pi0()

    def loss() -> Tensor:
        return model(**batch).loss

    expected = step_results(loss, model.parameters())
    before = memopt.saved_bytes(loss)
    names = memopt.apply_activation_checkpointing(model)
    assert any("language_model" in name for name in names)
    assert any("dit" in name for name in names)
    assert_same_bits(step_results(loss, model.parameters()), expected)
    loss().backward()
    attention = model.model.vlm.language_model.layers[0].self_attn
    assert all(p.grad is not None and p.grad.any() for p in attention.k_proj.parameters())
    assert memopt.saved_bytes(loss) < before / 2


@pytest.mark.parametrize("kind", ["DynamicCache", "StaticCache"])
@pytest.mark.parametrize("name", ["Llama", "Gemma 2"])
def test_a_cache_with_tokens_in_it(name: str, kind: str) -> None:
    model = make(name)
    options = {"max_cache_len": 16} if kind == "StaticCache" else {}

    def loss() -> Tensor:
        cache = getattr(transformers, kind)(config=model.config, **options)
        with torch.no_grad():
            model(input_ids=IDS[:, :3], past_key_values=cache)
        return model(input_ids=IDS[:, 3:], past_key_values=cache).logits.square().mean()

    expected = step_results(loss, model.parameters())
    memopt.apply_activation_checkpointing(model)
    assert_same_bits(step_results(loss, model.parameters()), expected)


def test_gradients_through_the_cache_of_an_earlier_call() -> None:
    model = make("Llama")

    def loss() -> Tensor:
        first = model(input_ids=IDS[:, :3])
        again = model(input_ids=IDS[:, 3:], past_key_values=first.past_key_values)
        keys = again.past_key_values.layers[1].keys
        assert keys.shape[-2] == IDS.shape[1]
        return again.logits.square().mean() + keys.square().mean()

    expected = step_results(loss, model.parameters())
    memopt.apply_activation_checkpointing(model)
    assert_same_bits(step_results(loss, model.parameters()), expected)


def test_the_cache_in_the_output_is_that_of_the_plain_call() -> None:
    model = make("BLOOM", training=False)
    tokens = model.generate(IDS, max_new_tokens=4, do_sample=False, pad_token_id=0)
    expected = model(input_ids=IDS).past_key_values
    memopt.apply_activation_checkpointing(model)
    output = model(input_ids=IDS)
    output.logits.sum().backward()  # whose recompute grows another one
    for layer, other in zip(output.past_key_values.layers, expected.layers, strict=True):
        assert torch.equal(layer.keys, other.keys)
        assert torch.equal(layer.values, other.values)
    got = model.generate(IDS, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert torch.equal(got, tokens)


def test_a_region_keeps_no_cache_alive() -> None:
    model = make("Llama")
    memopt.apply_activation_checkpointing(model)
    output = model(input_ids=IDS, labels=IDS)
    keys = [weakref.ref(layer.keys) for layer in output.past_key_values.layers]
    cache = weakref.ref(output.past_key_values)
    loss = output.loss
    del output
    assert cache() is None
    assert [key() for key in keys] == [None, None]
    loss.backward()


class InRegion(nn.Module):
    """A module as a model of one's own calls it."""

    def __init__(self, inner: nn.Module, style: str) -> None:
        super().__init__()
        self.inner = inner
        self.style = style

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.style == "function":
            return memopt.checkpoint(lambda a, k: self.inner(*a, **k), args, kwargs)
        fn = self.inner.forward if self.style == "method" else self.inner
        return memopt.checkpoint(fn, *args, **kwargs)


@pytest.mark.parametrize("style", ["module", "method", "function"])
@pytest.mark.parametrize("what", ["layer", "attention"])
def test_checkpoint_of_what_gets_a_cache(what: str, style: str) -> None:
    model = make("Llama")

    def loss() -> Tensor:
        return model(input_ids=IDS, labels=IDS).loss

    expected = step_results(loss, model.parameters())
    for i, layer in enumerate(model.model.layers):
        if what == "layer":
            model.model.layers[i] = InRegion(layer, style)
        else:
            layer.self_attn = InRegion(layer.self_attn, style)
    assert_same_bits(step_results(loss, model.parameters()), expected)


def test_checkpoint_sequential_with_a_cache() -> None:
    linear = nn.Linear(4, 4)

    def attend(x: Tensor, cache: Any) -> Tensor:
        keys, values = cache.update(linear(x)[:, None], x[:, None], 0)
        return keys.sum(2)[:, 0] * values.mean()

    def loss(sequential: bool) -> Tensor:
        cache = transformers.DynamicCache()
        stages = [attend, torch.sin, torch.cos]
        x = torch.ones(2, 3, 4)
        if sequential:
            return memopt.checkpoint_sequential(stages, 3, x, cache=cache).sum()
        return torch.cos(torch.sin(attend(x, cache))).sum()

    expected = step_results(lambda: loss(False), linear.parameters())
    assert_same_bits(step_results(lambda: loss(True), linear.parameters()), expected)


class ReadsLayer0(nn.Module):
    """Layer 1 of a model; reads the keys of layer 0, which none of its attributes says."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_idx = 1

    def forward(self, x: Tensor, cache: Any) -> Tensor:
        return x * (x * cache.layers[0].keys).sum()


@pytest.mark.parametrize("what", ["held", "dropped", "written"])
def test_a_layer_of_the_cache_that_is_gone_is_named(what: str) -> None:
    keys = torch.randn(2, 1, 1, 4)
    cache = transformers.DynamicCache()
    cache.update(keys.clone(), keys.clone(), 0)
    x = torch.randn(2, 1, 1, 4, requires_grad=True)
    out = memopt.checkpoint(ReadsLayer0(), x, cache).sum()
    if what == "held":
        out.backward()
        (expected,) = torch.autograd.grad((x * (x * keys).sum()).sum(), x)
        assert torch.equal(x.grad, expected)
        return
    if what == "written":
        cache.layers[0].keys.zero_()
    else:
        del cache
    with pytest.raises(RuntimeError, match=r"^checkpoint: the region .*ReadsLayer0 must find"):
        out.backward()


def test_what_a_region_keeps_of_a_cache_must_not_be_written() -> None:
    keys = torch.randn(2, 1, 3, 4)
    cache = transformers.DynamicCache()
    cache.update(keys, keys, 0)
    held = cache.layers[0].keys

    def attend(x: Tensor, cache: Any) -> Tensor:
        return cache.update(x, x, 0)[0].square().sum()

    x = torch.randn(2, 1, 1, 4, requires_grad=True)
    out = memopt.checkpoint(attend, x, cache)
    held.zero_()
    with pytest.raises(RuntimeError, match=r"cache before the call.*must not be written"):
        out.backward()


def test_the_report_says_what_a_cache_costs() -> None:
    model = make("BLOOM")
    report = memopt.convert(model, checkpoint=True)
    assert [note for note in report.notes if "use_cache=True" in note]
    model.config.use_cache = False
    assert not [n for n in memopt.convert(model, checkpoint=True).notes if "use_cache" in n]


SMALL_ENCODER = {**SMALL, "num_hidden_layers": 2, "intermediate_size": 16}
VIT = {**SMALL_ENCODER, "image_size": 8, "patch_size": 4}


@pytest.mark.parametrize(
    ("kind", "config", "has_cache"),
    [
        ("BertModel", lambda: transformers.BertConfig(**SMALL_ENCODER), False),
        ("BertModel", lambda: transformers.BertConfig(**SMALL_ENCODER, is_decoder=True), True),
        ("RobertaModel", lambda: transformers.RobertaConfig(**SMALL_ENCODER), False),
        ("ViTModel", lambda: transformers.ViTConfig(**VIT), False),
        ("T5EncoderModel", lambda: transformers.T5Config(**T5), False),
        ("T5Model", lambda: transformers.T5Config(**T5), True),
        ("BartModel", lambda: transformers.BartConfig(**BART), True),
        ("GPT2Model", CONFIGS["GPT-2"], True),
        ("LlamaModel", CONFIGS["Llama"], True),
    ],
)
def test_it_says_so_of_models_that_make_a_cache(
    kind: str, config: Callable[[], Any], has_cache: bool
) -> None:
    model = getattr(transformers, kind)(config())
    if kind == "ViTModel":
        model.config.use_cache = True
    batch = {"pixel_values": torch.randn(2, 3, 8, 8)} if "ViT" in kind else {"input_ids": IDS}
    if kind in ("T5Model", "BartModel"):
        batch["decoder_input_ids"] = IDS
    assert (getattr(model(**batch), "past_key_values", None) is not None) == has_cache
    notes = memopt.convert(model, checkpoint=True).notes
    assert any("use_cache=True" in note for note in notes) == has_cache
