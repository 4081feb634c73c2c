"""Configurations of transformers at a size for a test: numbers that are known by their names, or by
a part of them, made small, in the parts of a configuration too and in lists and dictionaries.
"""

from __future__ import annotations

import math
import re
from typing import Any

WORDS, TOKENS, SAMPLES, IMAGE, PATCH, WIDTH, HEADS = 96, 16, 1600, 32, 8, 32, 4
HEAD = WIDTH // HEADS

# Where configurations have one of these attributes, it becomes this number.
_SIZES: dict[str, tuple[int, str]] = {
    "width": (
        WIDTH,
        "hidden_size d_model n_embd dim embed_dim embedding_size emb_dim model_dim hidden_dim "
        "encoder_hidden_size decoder_hidden_size projection_dim out_hidden_size qk_dim "
        "word_embed_proj_dim rnn_hidden_dim attention_hidden_size q_lora_rank kv_lora_rank "
        "lru_width encoder_dim entity_emb_size output_dim out_dim decoder_hidden_dim",
    ),
    "layers": (
        2,
        "num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers depth "
        "num_encoder_layers num_decoder_layers decoder_num_hidden_layers encoder_num_layers "
        "decoder_num_layers num_blocks num_layers_per_stack",
    ),
    "heads": (
        HEADS,
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
        HEAD,
        "head_dim d_kv qk_rope_head_dim qk_nope_head_dim v_head_dim attention_head_dim "
        "key_value_proj_dim num_queries index_head_dim",
    ),
    "words": (WORDS, "vocab_size text_vocab_size"),
    "places": (
        64,
        "max_position_embeddings n_positions n_ctx max_source_positions max_target_positions "
        "max_seq_len max_sequence_length",
    ),
    "heads of state spaces": (
        4,
        "mamba_n_heads mamba_num_heads n_mamba_heads",
    ),
    "their width": (16, "mamba_d_head mamba_head_dim mamba_headdim"),
    "width of state spaces": (64, "mamba_d_ssm"),
    "experts": (4, "num_experts n_routed_experts num_local_experts moe_num_experts"),
    "experts of a token": (2, "num_experts_per_tok moe_topk top_k_experts moe_k"),
    "groups": (
        1,
        "n_group topk_group first_k_dense_replace n_shared_experts num_expert_group "
        "n_groups mamba_n_groups mamba_ngroups",
    ),
    "rest": (16, "num_conv_pos_embeddings sliding_window num_mel_bins mamba_d_state state_size"),
    "time masks": (2, "mask_time_length mask_feature_length"),
}
_BY_NAME = {name: size for size, names in _SIZES.values() for name in names.split()}

_SECTIONS = [HEAD // 2 - 2, 1, 1]

# Without a default, or with one that the class makes of other numbers than these.
_WHERE_NONE = {
    "head_dim": HEAD,
    "num_key_value_heads": HEADS,
    "vocab_size": WORDS,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "prediction_length": 4,
    "pad_token_id": 1,
    "rope_dim": HEAD,
    "image_token_index": WORDS - 12,
}

# Others, by a part of the name; what is smaller already stays.
_BY_PART: tuple[tuple[str, int], ...] = (
    (r"vocab|num_embeddings$", WORDS),
    (r"(^|_)(num|n)_.*layers$|_layers$|_depth$|_blocks$|experts_per_tok", 2),
    (r"(kv|key_value)_heads$", 2),
    (r"heads$", HEADS),
    (r"head_(dim|size)$|rotary_dim$|filters$", HEAD),
    (r"_groups$", WIDTH),
    (r"(intermediate|ffn|mlp|feed_?forward|inner).*(size|dim|channels)$", 64),
    (r"experts$", 4),
    (r"(hidden|bottleneck|embed|model|proj|lora|state|channel|latent|fpn|feature|output|dim|width|q_dim).*"
     r"(size|dim|rank|channels|width|d)$|_dim$|_width$|_channels$|_rank$|_model$", WIDTH),
)  # fmt: skip


def shrunk(config: Any, changes: dict[str, Any] | None = None) -> Any:
    """A configuration of the same class and with the same choices, but small.

    config: with the values that stay where no rule says otherwise.
    changes: values for attributes that the rules do not reach; names with dots are of parts.
    """
    own: dict[str, Any] = {}
    inner: dict[str, dict[str, Any]] = {}
    for name, value in (changes or {}).items():
        part, _, rest = name.partition(".")
        if rest:
            inner.setdefault(part, {})[rest] = value
        else:
            own[name] = value
    if config.model_type == "timm_backbone":
        return _backbone()  # of transformers itself, with as many features
    values = dict(vars(config))
    small = {**_explicit(config), **_small(values)}
    for name, value in values.items():
        if is_config(value):
            small[name] = shrunk(value, inner.get(name))
    _one_for_each_layer(config, small)
    return type(config)(**{**small, **own})


def _backbone() -> Any:
    from transformers import ResNetConfig

    sizes = {"embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]}
    stages = [f"stage{n}" for n in range(1, 5)]
    return ResNetConfig(**sizes, layer_type="basic", out_features=stages)


def _one_for_each_layer(config: Any, small: dict[str, Any]) -> None:
    """Shortens what has an entry for each layer; a backbone keeps a layer for each feature."""
    values = vars(config)
    if "depths" in values:  # layers are stages
        for name in ("num_hidden_layers", "num_layers"):
            small.pop(name, None)
    layers = next((n for n in ("num_hidden_layers", "num_layers") if n in small), None)
    if layers is None:
        return
    before = values[layers]
    features = getattr(config, "out_features", None)
    if features and max(map(_number, features)) > small[layers]:
        small[layers] = max(2, len(features))
        small["out_features"] = [f"stage{n + 1}" for n in range(len(features))]
        small["out_indices"] = None
    for name, value in {**values, **small}.items():
        if isinstance(value, (list, tuple)) and len(value) == before > small[layers]:
            small[name] = value[: small[layers]]
        elif "label" not in name and _is_by_layer(value):
            small[name] = {n: v for n, v in value.items() if int(n) < small[layers]}


def _is_by_layer(value: Any) -> bool:
    return isinstance(value, dict) and bool(value) and all(str(n).isdigit() for n in value)


def _number(stage: str) -> int:
    return int(re.sub(r"\D", "", stage) or 0)


def is_config(value: object) -> bool:
    from transformers import PreTrainedConfig

    return isinstance(value, PreTrainedConfig)


def _explicit(config: Any) -> dict[str, Any]:
    """What a part has from its owner, other than its class's defaults."""
    try:
        changed = config.to_diff_dict()
    except Exception:  # a class without defaults
        changed = config.to_dict()
    lists = {n for n, v in changed.items() if isinstance(v, list) and len(v) > 8}
    drop = {
        "model_type",
        "id2label",
        "label2id",
        "transformers_version",
        "architectures",
        "dtype",
        *lists,
    }
    return {n: v for n, v in changed.items() if n not in drop and not n.startswith("_")}


def _small(values: dict[str, Any]) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    tokens = 0
    lengths = {len(v) for v in values.values() if isinstance(v, (list, tuple))}
    for name, value in values.items():
        if name == "use_cache":
            changes[name] = False
        elif value is None and name in _WHERE_NONE:
            changes[name] = _WHERE_NONE[name]
        elif name == "partial_rotary_factor":
            changes[name] = 1.0
        elif value is None or isinstance(value, bool) or str(name).startswith("_"):
            continue
        elif re.search(r"token_(id|index)$", str(name)) and isinstance(value, int):
            if value >= WORDS:
                tokens += 1
                changes[name] = WORDS - tokens % 12
        elif name == "image_size" and value:
            changes[name] = _like(value, IMAGE)
        elif name == "patch_size" and value:
            stages = 4 if "depths" in values else PATCH
            changes[name] = value if _least(value) <= stages else _like(value, stages)
        elif name == "window_size" and "depths" in values:
            changes[name] = _like(value, 2)
        elif name == "conv_dim" and value:
            changes[name] = _like(value, 32)
        elif isinstance(value, int):
            counts = value in lengths and str(name).endswith(("layers", "blocks", "stages"))
            size = None if counts and name not in _BY_NAME else _size(str(name), value)
            if size is not None:
                changes[name] = size
        elif ("drop" in name or name.startswith("mask_")) and isinstance(value, float):
            changes[name] = 0.0
        elif isinstance(value, (list, tuple)) and value and all(type(v) is int for v in value):
            small = _small_list(name, list(value))
            if small != list(value):
                changes[name] = type(value)(small)
        elif isinstance(value, dict) and name not in ("id2label", "label2id"):
            inner = _small(value)
            if name in ("rope_parameters", "rope_scaling") and "rope_type" in value:
                inner["mrope_section"] = _SECTIONS  # of the tables of three axes, where asked for
            if inner:
                changes[name] = {**value, **inner}
    if "kv_lora_rank" in values and "num_key_value_heads" in changes:
        changes["num_key_value_heads"] = HEADS  # keys and values of all heads come of one vector
    return changes


def _size(name: str, value: int) -> int | None:
    if name in _BY_NAME:
        return _BY_NAME[name]
    for part, size in _BY_PART:
        if re.search(part, name):
            return size if value > size else None
    return None


def _small_list(name: str, values: list[int]) -> list[int]:
    """One number for each stage. Widths and heads keep their ratios, so that they divide."""
    if name == "mrope_section":
        return _SECTIONS
    if re.search(r"depths|layers|blocks$", name):
        return [min(v, 2) for v in values]
    if re.search(r"experts", name):
        return [4 for _ in values]
    if re.search(r"intermediate", name):
        return [64 for _ in values]
    if re.search(r"heads", name):
        if len(set(values)) == 1:
            return [min(v, HEADS) for v in values]
        return [2 ** int(math.log2(v)) for v in values]
    if max(values) >= 64 and re.search(r"(sizes?|dims?|channels?|widths?)$", name):
        return [max(8, v * 16 // min(values) // 8 * 8) for v in values]
    return values


def _like(value: Any, size: int) -> Any:
    return type(value)(size for _ in value) if isinstance(value, (list, tuple)) else size


def _least(value: Any) -> int:
    return min(value) if isinstance(value, (list, tuple)) else value
