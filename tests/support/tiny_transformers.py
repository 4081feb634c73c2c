"""Any model of transformers at a size for a test: its configuration with the numbers that are known
by their names made small. `FAMILIES` in tests/convert/test_gradient_checkpointing.py has the names
of those that come out trainable.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

WORDS, TOKENS, SAMPLES, IMAGE = 96, 16, 1600, 32

# Where configurations have one of these attributes, it becomes this number.
_SIZES: dict[str, tuple[int, str]] = {
    "width": (
        32,
        "hidden_size d_model n_embd dim embed_dim embedding_size emb_dim model_dim hidden_dim "
        "encoder_hidden_size decoder_hidden_size projection_dim out_hidden_size qk_dim "
        "word_embed_proj_dim rnn_hidden_dim attention_hidden_size q_lora_rank kv_lora_rank "
        "lru_width encoder_dim entity_emb_size output_dim out_dim decoder_hidden_dim",
    ),
    "layers": (
        2,
        "num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers depth "
        "num_encoder_layers num_decoder_layers decoder_num_hidden_layers encoder_num_layers "
        "decoder_num_layers num_blocks",
    ),
    "heads": (
        4,
        "num_attention_heads num_heads n_head n_heads encoder_attention_heads "
        "decoder_attention_heads decoder_num_attention_heads num_encoder_attention_heads "
        "encoder_num_attention_heads num_decoder_attention_heads",
    ),
    "key-value heads": (
        2,
        "num_key_value_heads num_kv_heads decoder_num_key_value_heads encoder_num_key_value_heads",
    ),
    "inner width": (
        64,
        "intermediate_size d_ff ffn_dim n_inner encoder_ffn_dim decoder_ffn_dim mlp_dim ff_dim "
        "moe_intermediate_size shared_expert_intermediate_size ffn_hidden_size inner_dim "
        "decoder_intermediate_size feed_forward_hidden_size dense_intermediate_size",
    ),
    "width of a head": (
        8,
        "head_dim d_kv qk_rope_head_dim qk_nope_head_dim v_head_dim attention_head_dim "
        "key_value_proj_dim num_queries index_head_dim",
    ),
    "words": (WORDS, "vocab_size text_vocab_size"),
    "places": (
        64,
        "max_position_embeddings n_positions n_ctx max_source_positions max_target_positions "
        "max_seq_len max_sequence_length",
    ),
    "experts": (4, "num_experts n_routed_experts num_local_experts moe_num_experts"),
    "experts of a token": (2, "num_experts_per_tok moe_topk top_k_experts"),
    "groups": (1, "n_group topk_group first_k_dense_replace n_shared_experts"),
    "rest": (16, "num_conv_pos_embeddings sliding_window num_mel_bins mamba_d_state state_size"),
    "time masks": (2, "mask_time_length mask_feature_length"),
}
_BY_NAME = {name: size for size, names in _SIZES.values() for name in names.split()}

# What the names do not say. Two layers of each kind, so that there are blocks.
_OF_FAMILY: dict[str, dict[str, Any]] = {
    "olmo_hybrid": {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    }
}


@dataclass(frozen=True)
class Tiny:
    """A model to be made, and what it is called with."""

    config: Any
    make_class: type[nn.Module]

    def make(self) -> nn.Module:
        """In training mode, without dropout and without a cache; the same weights each time."""
        torch.manual_seed(0)
        model: nn.Module = self.make_class._from_config(self.config)  # type: ignore[attr-defined]
        return model.train()

    def inputs(self) -> dict[str, Tensor]:
        name = self.make_class.main_input_name
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(3, 80, (2, TOKENS), generator=generator)
        if name == "input_ids":
            inputs = {name: ids}
        elif name == "pixel_values":
            channels = _find(self.config, "num_channels", 3)
            inputs = {name: torch.randn(2, channels, IMAGE, IMAGE, generator=generator)}
        elif name == "input_values":
            inputs = {name: torch.randn(2, SAMPLES, generator=generator)}
        else:
            assert name == "input_features"
            bins = _find(self.config, "num_mel_bins", 16)
            inputs = {name: torch.randn(2, bins, 128, generator=generator)}
        if self.config.is_encoder_decoder:
            inputs["decoder_input_ids"] = ids
        return inputs


def tiny(family: str) -> Tiny:
    """The base model of a family, by its `model_type`."""
    from transformers import CONFIG_MAPPING, MODEL_MAPPING

    config_class = CONFIG_MAPPING[family]
    found = MODEL_MAPPING[config_class]
    config = _tiny_config(config_class, _OF_FAMILY.get(family, {}))
    config._attn_implementation = "eager"
    return Tiny(config, found[0] if isinstance(found, tuple) else found)


def loss_of(output: Any) -> Tensor:
    """A number that all floating tensors of a model's output enter."""
    values = output.to_tuple() if hasattr(output, "to_tuple") else output
    return sum(  # type: ignore[return-value]
        leaf.pow(2).sum()
        for leaf in pytree.tree_leaves(values)
        if isinstance(leaf, Tensor) and leaf.requires_grad
    )


def _tiny_config(config_class: Any, changes: dict[str, Any]) -> Any:
    parts: dict[str, Any] = {}
    for name, part in config_class.sub_configs.items():
        try:
            parts[name] = _tiny_config(part, {})
        except Exception:  # a part of any kind: it stays as it is
            continue
    try:
        full = config_class()
    except Exception:  # one that has no defaults for its parts
        full = config_class(**parts)
    return config_class(**{**_small(full), **parts, **changes})


def _small(config: Any) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    for name, value in vars(config).items():
        if name == "use_cache":
            changes[name] = False
        elif isinstance(value, bool) or name.startswith("_"):
            continue
        elif name in _BY_NAME and isinstance(value, int):
            changes[name] = _BY_NAME[name]
        elif name == "image_size" and value:
            changes[name] = _like(value, IMAGE)
        elif name == "patch_size" and value:
            changes[name] = _like(value, 8)
        elif name == "conv_dim" and value:
            changes[name] = _like(value, 32)
        elif ("drop" in name or name.startswith("mask_")) and isinstance(value, float):
            changes[name] = 0.0
        elif name.endswith("token_id") and isinstance(value, int) and value >= WORDS:
            changes[name] = WORDS - 1 - len(changes) % 8
    return changes


def _like(value: Any, size: int) -> Any:
    return type(value)(size for _ in value) if isinstance(value, (list, tuple)) else size


def _find(config: Any, name: str, default: int) -> int:
    parts = [getattr(config, part, None) for part in config.sub_configs]
    found = (getattr(each, name, None) for each in (config, *parts))
    return next((value for value in found if value is not None), default)
