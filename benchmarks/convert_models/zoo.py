"""Models of eight libraries, small and with random weights, as their libraries build them: training
mode, each with its own default dropout and attention.

    for entry in ZOO: model, inputs = entry.make()
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor, nn

Inputs = dict[str, Any] | tuple[Any, ...]


@dataclass(frozen=True)
class Entry:
    """A model of the table."""

    library: str
    """The package to import."""

    name: str
    build: Callable[[], tuple[nn.Module, Inputs]] = field(repr=False)

    def make(self) -> tuple[nn.Module, Inputs]:
        """The model in training mode, and the arguments of its forward."""
        torch.manual_seed(0)
        model, inputs = self.build()
        return model.train(), inputs

    def importable(self) -> bool:
        """Whether its library is installed and can be imported."""
        try:
            importlib.import_module(self.library)
        except Exception:  # a library that is there in part may raise anything
            return False
        return True


WORDS, HIDDEN, LAYERS, HEADS, INNER, TOKENS = 96, 64, 2, 4, 128, 32

# The names that configs have for these sizes; a config ignores those that it does not know.
_SMALL: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "head_dim": HIDDEN // HEADS,
    "intermediate_size": INNER,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SEQ2SEQ: dict[str, Any] = {
    "vocab_size": WORDS,
    "d_model": HIDDEN,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": INNER,
    "decoder_ffn_dim": INNER,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}


def _ids(tokens: int = TOKENS) -> Tensor:
    return torch.randint(3, WORDS, (2, tokens), generator=torch.Generator().manual_seed(1))


def _image(size: int = 32, channels: int = 3) -> Tensor:
    return torch.randn(2, channels, size, size, generator=torch.Generator().manual_seed(1))


def _transformers(kind: str, auto: str, inputs: Callable[[], Inputs], **settings: Any) -> Entry:
    def build() -> tuple[nn.Module, Inputs]:
        import transformers

        config = transformers.AutoConfig.for_model(kind, **settings)
        return getattr(transformers, auto).from_config(config), inputs()

    return Entry("transformers", kind, build)


def _words() -> Inputs:
    return {"input_ids": _ids(), "labels": _ids()}


def _causal(kind: str, **changes: Any) -> Entry:
    settings = {**_SMALL, "use_cache": False, **changes}
    return _transformers(kind, "AutoModelForCausalLM", _words, **settings)


def _gpt(kind: str, **changes: Any) -> Entry:
    sizes = {"n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 64}
    ids = {"vocab_size": WORDS, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
    settings = {**sizes, **ids, **changes}
    return _transformers(kind, "AutoModelForCausalLM", _words, **settings)


def _masked(kind: str, **changes: Any) -> Entry:
    settings = {k: v for k, v in _SMALL.items() if k not in ("num_key_value_heads", "head_dim")}
    return _transformers(kind, "AutoModelForMaskedLM", _words, **{**settings, **changes})


def _seq2seq(kind: str, **changes: Any) -> Entry:
    settings = {**_SEQ2SEQ, "use_cache": False, **changes}
    return _transformers(kind, "AutoModelForSeq2SeqLM", _words, **settings)


def _t5(kind: str, **changes: Any) -> Entry:
    sizes = {"d_model": HIDDEN, "d_kv": 16, "d_ff": INNER, "num_layers": LAYERS, "num_heads": HEADS}
    ids = {"vocab_size": WORDS, "decoder_start_token_id": 0, "pad_token_id": 0, "use_cache": False}
    return _transformers(kind, "AutoModelForSeq2SeqLM", _words, **{**sizes, **ids, **changes})


def _vision(kind: str, **settings: Any) -> Entry:
    def inputs() -> Inputs:
        return {"pixel_values": _image(), "labels": torch.tensor([0, 1])}

    return _transformers(kind, "AutoModelForImageClassification", inputs, **settings)


_VIT = {**_SMALL, "image_size": 32, "patch_size": 8}


def _speech(kind: str) -> Entry:
    sizes = {**_SMALL, "conv_dim": (32, 32), "conv_stride": (5, 4), "conv_kernel": (10, 8)}
    extra = {
        "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 4,
        "mask_time_length": 2,
        "layerdrop": 0.0,
    }

    def inputs() -> Inputs:
        return {"input_values": torch.randn(2, 1600), "labels": _ids(8)}

    return _transformers(kind, "AutoModelForCTC", inputs, **sizes, **extra)


def _whisper() -> Entry:
    def inputs() -> Inputs:
        return {"input_features": torch.randn(2, 8, 64), "labels": _ids(16)}

    sizes = {"num_mel_bins": 8, "max_source_positions": 32, "max_target_positions": 64}
    settings = {**_SEQ2SEQ, **sizes, "use_cache": False}
    return _transformers("whisper", "AutoModelForSpeechSeq2Seq", inputs, **settings)


def _clip() -> Entry:
    def build() -> tuple[nn.Module, Inputs]:
        import transformers

        text, vision = {**_SMALL}, {**_VIT}
        config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=32)
        inputs = {"input_ids": _ids(), "pixel_values": _image(), "return_loss": True}
        return transformers.CLIPModel(config), inputs

    return Entry("transformers", "clip", build)


def _timm(name: str, size: int = 32, **settings: Any) -> Entry:
    def build() -> tuple[nn.Module, Inputs]:
        import timm

        return timm.create_model(name, num_classes=10, **settings), (_image(size),)

    return Entry("timm", name, build)


_TINY = {"embed_dim": HIDDEN, "depth": LAYERS, "num_heads": HEADS, "img_size": 32, "patch_size": 8}


def _diffusers(name: str, inputs: Callable[[], Inputs], **settings: Any) -> Entry:
    def build() -> tuple[nn.Module, Inputs]:
        import diffusers

        return getattr(diffusers, name)(**settings), inputs()

    return Entry("diffusers", name, build)


def _torchtune(name: str, builder: str, **settings: Any) -> Entry:
    def build() -> tuple[nn.Module, Inputs]:
        module, function = builder.split(":")
        make = getattr(importlib.import_module(f"torchtune.models.{module}"), function)
        return make(**settings), (_ids(),)

    return Entry("torchtune", name, build)


_TUNE: dict[str, Any] = {
    "vocab_size": WORDS,
    "num_layers": LAYERS,
    "num_heads": HEADS,
    "num_kv_heads": 2,
    "embed_dim": HIDDEN,
    "intermediate_dim": INNER,
    "max_seq_len": 64,
}


def _x_transformers(name: str, **settings: Any) -> Entry:
    def build() -> tuple[nn.Module, Inputs]:
        import x_transformers

        layers = x_transformers.Decoder(dim=HIDDEN, depth=LAYERS, heads=HEADS, **settings)
        model = x_transformers.TransformerWrapper(
            num_tokens=WORDS, max_seq_len=64, attn_layers=layers
        )
        return model, (_ids(),)

    return Entry("x_transformers", name, build)


def _vit_pytorch(name: str, path: str, **settings: Any) -> Entry:
    def build() -> tuple[nn.Module, Inputs]:
        module, cls = path.split(":")
        model = getattr(importlib.import_module(f"vit_pytorch.{module}"), cls)(**settings)
        return model, (_image(),)

    return Entry("vit_pytorch", name, build)


_LUCID: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 8,
    "num_classes": 10,
    "dim": HIDDEN,
    "depth": LAYERS,
    "heads": HEADS,
    "mlp_dim": INNER,
}


def _open_clip() -> Entry:
    def build() -> tuple[nn.Module, Inputs]:
        from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

        vision = CLIPVisionCfg(
            layers=LAYERS, width=HIDDEN, head_width=16, patch_size=8, image_size=32
        )
        text = CLIPTextCfg(
            context_length=TOKENS, vocab_size=WORDS, width=HIDDEN, heads=HEADS, layers=LAYERS
        )
        return CLIP(32, vision, text), (_image(), _ids())

    return Entry("open_clip", "CLIP", build)


def _peft(kind: str, targets: list[str]) -> Entry:
    def build() -> tuple[nn.Module, Inputs]:
        import peft

        base, inputs = next(e for e in ZOO if e.name == kind).build()
        config = peft.LoraConfig(r=4, target_modules=targets, lora_dropout=0.1)
        model: Any = peft.get_peft_model(base, config)
        return model, inputs

    return Entry("peft", f"LoRA of {kind}", build)


ZOO: tuple[Entry, ...] = (
    *map(_causal, ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text")),
    *map(_causal, ("phi", "olmo", "olmo2", "cohere", "starcoder2", "stablelm", "granite")),
    *map(_causal, ("gpt_neox", "helium", "nemotron", "glm", "smollm3", "persimmon")),
    _gpt("falcon", hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS),
    _causal("phi3", rope_scaling=None),
    _causal("mixtral", num_local_experts=2),
    _causal("qwen2_moe", moe_intermediate_size=16, shared_expert_intermediate_size=32),
    _causal("opt", ffn_dim=INNER, word_embed_proj_dim=HIDDEN),
    _causal("biogpt"),
    _causal("xglm", d_model=HIDDEN, num_layers=LAYERS, attention_heads=HEADS, ffn_dim=INNER),
    _causal("bloom", n_layer=LAYERS, n_head=HEADS),
    _causal("mpt", d_model=HIDDEN, n_layers=LAYERS, n_heads=HEADS, max_seq_len=64),
    _causal("gpt_neo", num_layers=2, num_heads=HEADS, attention_types=[[["global", "local"], 1]]),
    _gpt("gpt2"),
    _gpt("gptj", rotary_dim=8),
    _gpt("codegen", rotary_dim=8),
    _gpt("openai-gpt"),
    _gpt("gpt_bigcode"),
    *map(_masked, ("bert", "roberta", "electra", "deberta", "deberta-v2", "mpnet", "camembert")),
    *map(_masked, ("modernbert", "convbert", "layoutlm", "roformer", "megatron-bert", "rembert")),
    _masked("albert", embedding_size=32),
    _masked("distilbert", dim=HIDDEN, n_layers=LAYERS, n_heads=HEADS, hidden_dim=INNER),
    _masked("esm", position_embedding_type="rotary", token_dropout=False, mask_token_id=3),
    _masked("mobilebert", embedding_size=32, intra_bottleneck_size=32, true_hidden_size=32),
    _masked("squeezebert", embedding_size=HIDDEN, q_groups=1, k_groups=1, v_groups=1),
    *map(_seq2seq, ("bart", "mbart", "pegasus", "marian", "blenderbot", "m2m_100")),
    *map(_t5, ("t5", "mt5", "umt5", "longt5")),
    _whisper(),
    *(_vision(kind, **_VIT) for kind in ("vit", "beit", "dinov2")),
    _vision(
        "swin",
        image_size=32,
        patch_size=4,
        embed_dim=16,
        depths=[1, 1],
        num_heads=[2, 4],
        window_size=4,
    ),
    _vision("convnext", hidden_sizes=[16, 32], depths=[1, 1], num_stages=2),
    _vision("convnextv2", hidden_sizes=[16, 32], depths=[1, 1], num_stages=2),
    _vision("resnet", hidden_sizes=[16, 32], depths=[1, 1], embedding_size=16, layer_type="basic"),
    _speech("wav2vec2"),
    _speech("hubert"),
    _clip(),
    _timm("vit_tiny_patch16_224", **_TINY),
    _timm("deit3_small_patch16_224", **_TINY),
    _timm("eva02_tiny_patch14_224", **_TINY),
    _timm("vit_base_patch14_reg4_dinov2", **_TINY),
    _timm("mixer_s16_224", img_size=32),
    _timm("convnext_atto", depths=(1, 1, 1, 1), dims=(16, 16, 32, 32)),
    _timm(
        "swin_tiny_patch4_window7_224",
        img_size=32,
        embed_dim=16,
        depths=(1, 1),
        num_heads=(2, 4),
        window_size=4,
    ),
    _timm("resnet10t"),
    _timm("mobilenetv3_small_050"),
    _timm("efficientnet_lite0"),
    _diffusers(
        "DiTTransformer2DModel",
        lambda: (_image(8, 4), torch.tensor([1, 2]), torch.tensor([3, 4])),
        num_attention_heads=HEADS,
        attention_head_dim=16,
        num_layers=LAYERS,
        sample_size=8,
        num_embeds_ada_norm=10,
    ),
    _diffusers(
        "UNet2DConditionModel",
        lambda: (_image(8, 4), torch.tensor([1, 2]), torch.randn(2, 8, 32)),
        sample_size=8,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=8,
    ),
    _diffusers(
        "Transformer2DModel",
        lambda: (_image(4, 32),),
        num_attention_heads=HEADS,
        attention_head_dim=16,
        in_channels=32,
        num_layers=1,
        sample_size=8,
        norm_num_groups=8,
    ),
    _diffusers(
        "SD3Transformer2DModel",
        lambda: (_image(8, 4), torch.randn(2, 8, 32), torch.randn(2, 32), torch.tensor([1, 2])),
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=LAYERS,
        attention_head_dim=16,
        num_attention_heads=HEADS,
        joint_attention_dim=32,
        caption_projection_dim=64,
        pooled_projection_dim=32,
    ),
    _torchtune("llama3", "llama3:llama3", **_TUNE),
    _torchtune("gemma", "gemma:gemma", head_dim=16, **_TUNE),
    _torchtune("qwen2", "qwen2:qwen2", **_TUNE),
    _x_transformers("plain"),
    _x_transformers("glu", ff_glu=True),
    _x_transformers("swish glu, RMSNorm", ff_glu=True, ff_swish=True, use_rmsnorm=True),
    _x_transformers("relu squared", ff_relu_squared=True),
    _vit_pytorch("ViT", "vit:ViT", **_LUCID),
    _vit_pytorch("SimpleViT", "simple_vit:SimpleViT", **_LUCID),
    _vit_pytorch(
        "CCT-like CvT", "cvt:CvT", num_classes=10, s1_emb_dim=16, s2_emb_dim=16, s3_emb_dim=32
    ),
    _open_clip(),
    _peft("llama", ["q_proj", "v_proj"]),
    _peft("bert", ["query", "value"]),
)
