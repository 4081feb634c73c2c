"""Real models of transformers at sizes for a test, with random weights and without dropout."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor, nn

WORDS, HIDDEN, LAYERS, HEADS, INNER = 99, 32, 2, 4, 64
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": INNER,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
IS_DECODER = {"num_key_value_heads": 2, "head_dim": 8}


@dataclass(frozen=True)
class Model:
    """How a model is made and called, and how many modules of which class convert swaps in it,
    beside dropout."""

    make: Callable[..., nn.Module]
    """Takes the weights' seed, and changes of the config, by its own names."""

    inputs: Callable[..., dict[str, Tensor]]
    """Two sequences; takes their lengths."""

    swapped: dict[str, int]
    generates: bool = False


def _words(tokens: int = 12) -> dict[str, Tensor]:
    ids = torch.randint(3, WORDS, (2, tokens), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def _image(size: int = 16) -> dict[str, Tensor]:
    pixels = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))
    return {"pixel_values": pixels, "labels": torch.tensor([0, 1])}


def _speech(tokens: int = 12, frames: int = 32) -> dict[str, Tensor]:
    features = torch.randn(2, 8, frames, generator=torch.Generator().manual_seed(1))
    return {"input_features": features, "labels": _words(tokens)["labels"]}


def _of(name: str, config: str, **settings: Any) -> Callable[..., nn.Module]:
    # Attention in plain operators, so that a float64 oracle has no narrower kernel in it.
    settings["attn_implementation"] = "eager"

    def make(*, seed: int = 0, **changes: Any) -> nn.Module:
        import transformers  # which the formulas do without

        torch.manual_seed(seed)
        built = getattr(transformers, config)(**{**settings, **changes})
        model: nn.Module = getattr(transformers, name)(built)
        for parameter_name, parameter in model.named_parameters():
            # Weights of norms begin at 1 or 0 and biases at 0, which hides mistakes.
            if parameter.dim() == 1:
                generator = torch.Generator().manual_seed(len(parameter_name))
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.data.add_(noise, alpha=0.1)
        return model.train()

    return make


MODELS: dict[str, Model] = {
    "BERT": Model(
        _of("BertForMaskedLM", "BertConfig", **SIZES, **NO_DROPOUT),
        _words,
        {"LayerNorm": 6, "GELUActivation": 3},
    ),
    "RoBERTa": Model(
        _of("RobertaForMaskedLM", "RobertaConfig", **SIZES, **NO_DROPOUT),
        _words,
        {"LayerNorm": 6, "GELUActivation": 2},
    ),
    "GPT-2": Model(
        _of(
            "GPT2LMHeadModel",
            "GPT2Config",
            vocab_size=WORDS,
            n_embd=HIDDEN,
            n_layer=LAYERS,
            n_head=HEADS,
            bos_token_id=1,
            eos_token_id=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        ),
        _words,
        {"LayerNorm": 5, "NewGELUActivation": 2},
        generates=True,
    ),
    "GPT-NeoX": Model(
        _of("GPTNeoXForCausalLM", "GPTNeoXConfig", **SIZES),
        _words,
        {"LayerNorm": 5, "GELUActivation": 2},
        generates=True,
    ),
    "Llama": Model(
        _of("LlamaForCausalLM", "LlamaConfig", **SIZES, **IS_DECODER),
        _words,
        {"LlamaRMSNorm": 5, "LlamaMLP": 2, "SiLUActivation": 2},
        generates=True,
    ),
    "Qwen3": Model(
        _of("Qwen3ForCausalLM", "Qwen3Config", **SIZES, **IS_DECODER),
        _words,
        {"Qwen3RMSNorm": 9, "Qwen3MLP": 2, "SiLUActivation": 2},
        generates=True,
    ),
    "Gemma": Model(
        _of("GemmaForCausalLM", "GemmaConfig", **SIZES, **IS_DECODER),
        _words,
        {"GemmaRMSNorm": 5, "GemmaMLP": 2, "GELUTanh": 2},
        generates=True,
    ),
    "Mistral": Model(
        _of("MistralForCausalLM", "MistralConfig", **SIZES, **IS_DECODER),
        _words,
        {"MistralRMSNorm": 5, "MistralMLP": 2, "SiLUActivation": 2},
        generates=True,
    ),
    "ViT": Model(
        _of(
            "ViTForImageClassification",
            "ViTConfig",
            hidden_size=HIDDEN,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            intermediate_size=INNER,
            image_size=16,
            patch_size=8,
            **NO_DROPOUT,
        ),
        _image,
        {"LayerNorm": 5, "GELUActivation": 2},
    ),
    "T5": Model(
        _of(
            "T5ForConditionalGeneration",
            "T5Config",
            vocab_size=WORDS,
            d_model=HIDDEN,
            d_kv=8,
            d_ff=INNER,
            num_layers=LAYERS,
            num_heads=HEADS,
            dropout_rate=0.0,
            feed_forward_proj="gated-gelu",
            decoder_start_token_id=0,
        ),
        _words,
        {"T5LayerNorm": 12, "T5DenseGatedActDense": 4, "NewGELUActivation": 4},
        generates=True,
    ),
    "Whisper": Model(
        _of(
            "WhisperForConditionalGeneration",
            "WhisperConfig",
            vocab_size=WORDS,
            num_mel_bins=8,
            d_model=HIDDEN,
            encoder_layers=LAYERS,
            decoder_layers=LAYERS,
            encoder_attention_heads=HEADS,
            decoder_attention_heads=HEADS,
            encoder_ffn_dim=INNER,
            decoder_ffn_dim=INNER,
            max_source_positions=16,
            max_target_positions=32,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
            dropout=0.0,
        ),
        _speech,
        {"LayerNorm": 12, "GELUActivation": 4},
    ),
    "ModernBERT": Model(
        _of(
            "ModernBertForMaskedLM",
            "ModernBertConfig",
            **SIZES,
            cls_token_id=1,
            sep_token_id=2,
        ),
        _words,
        {"LayerNorm": 6, "ModernBertMLP": 2, "GELUActivation": 3},
    ),
}
