"""Any model of transformers at a size for a test: its configuration with the numbers that are known
by their names made small. `FAMILIES` in tests/support/families.py has the names of those that come
out trainable.
"""

from __future__ import annotations

import copy
import functools
import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.support.tiny_configs import shrunk
from tests.support.tiny_inputs import candidates

# What the names do not say. Two layers of each kind, so that there are blocks.
_OF_FAMILY: dict[str, dict[str, Any]] = {
    "olmo_hybrid": {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "neomme": {"layer_types": ["sliding_attention", "full_attention"]},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "deepseek_ocr2": {"text_config.mlp_layer_types": ["dense", "sparse"]},
    "mamba2": {"head_dim": 16},
    "zaya": {"num_experts_per_tok": 1},
    "esmc": {"num_key_value_heads": 4},
    "esm": {"mask_token_id": 90},
    "unlimited_ocr_text": {"num_key_value_heads": 4},
    "unlimited_ocr": {"text_config.num_key_value_heads": 4},
    "moonshine": {"decoder_num_key_value_heads": 4, "encoder_num_key_value_heads": 4},
    "nemotron3_5_transcribe_word_timestamp": {"num_key_value_heads": 4},
    "xmod": {"default_language": "en_XX"},
    "t5gemma2_text": {"dropout_rate": 0.0},
    "t5gemma2_encoder": {"text_config.dropout_rate": 0.0},
    "t5gemma2_decoder": {"dropout_rate": 0.0},
    "vipllava": {"vision_feature_layers": [-2, -1]},
    "dbrx": {"attn_config.rope_theta": 1e4, "attn_config.clip_qkv": 8.0},
    "ernie4_5_vl_moe_text": {
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "mrope_section": [1, 1, 2]}
    },
    "swin2sr": {"num_heads": [4, 4], "depths": [2, 2], "embed_dim": 32},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_theta": 1e4, "rope_type": "default"}}
    },
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 64},
    "pix2struct_text_model": {"initializer_range": 0.02},
    "wav2vec2-bert": {"feature_projection_input_dim": 16},
    "vitpose_backbone": {"part_features": 8, "num_experts": 1},
    "hiera": {"patch_size": [7, 7]},
    "step3p5": {"sliding_window": 16},
    "step3p7": {"text_config.sliding_window": 16},
    "sapiens2": {"num_key_value_heads_per_layer": [4, 4]},
    "nemotron_asr_streaming_encoder": {"default_num_lookahead_tokens": 3},
    "nemotron_asr_streaming": {"encoder_config.default_num_lookahead_tokens": 3},
    "nemotron3_5_asr": {"encoder_config.default_num_lookahead_tokens": 3},
    "vitpose": {"backbone_config.part_features": 8, "backbone_config.num_experts": 1},
    "zoedepth": {"bottleneck_features": 32},
    "swin": {"patch_size": 2},
    "donut-swin": {"patch_size": 2},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "lilt": {"hidden_size": 48},
    "molmo2": {"adapter_config.vision_feature_layer": [1, 0]},
    "vits": {
        "upsample_initial_channel": 32,
        "upsample_rates": [2, 2],
        "upsample_kernel_sizes": [4, 4],
        "resblock_kernel_sizes": [3],
        "resblock_dilation_sizes": [[1, 3]],
    },
    "glm5_next_text": {"qk_rope_head_dim": 0},
    "glm5_next": {"text_config.qk_rope_head_dim": 0},
    "chameleon": {"vocabulary_map": {"<image>": 90}},
    "emu3": {"vocabulary_map": {"<image>": 90}},
    "fun_asr_nano": {"adaptor_config.intermediate_size": 8},
    "mobilevitv2": {"image_size": 64},
    "xclip_vision_model": {"num_frames": 2},
    "clvp_encoder": {"use_rotary_embedding": False},
    "dots3_note": {"audio_config.adapter_input_size": 32},
}


@dataclass(frozen=True)
class Tiny:
    """A model to be made, and what it is called with."""

    config: Any
    make_class: type[nn.Module]

    def make(self) -> nn.Module:
        """In training mode, without dropout and without a cache; the same weights each time."""
        torch.manual_seed(0)
        with _nan_where_uninitialized():
            model = self._new()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.isnan().any():  # experts whose weights transformers does not fill
                    parameter.normal_(std=0.02)
        return model.train()

    def size(self) -> int:
        """How many numbers the parameters have; the model is not made for it."""
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in self._new().parameters())

    def _new(self) -> nn.Module:
        return self.make_class._from_config(self.config)  # type: ignore[attr-defined]

    def inputs(self) -> dict[str, Any]:
        return copy.deepcopy(self._inputs)

    @functools.cached_property
    def _inputs(self) -> dict[str, Any]:
        """Of what may be meant by the main input's name, the first that the model runs with."""
        problems = []
        model = self.make()
        for inputs in candidates(model, self.config):
            try:
                with torch.no_grad():
                    model(**copy.deepcopy(inputs))
            except Exception as e:
                shapes = {n: tuple(getattr(v, "shape", ())) for n, v in inputs.items()}
                problems.append(f"{shapes}: {e}")
            else:
                return inputs
        raise ValueError("runs with none of these inputs: " + "; ".join(problems))


def tiny(family: str) -> Tiny:
    """The base model of a family, by its `model_type`."""
    from transformers import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[family]
    changes = _OF_FAMILY.get(family, {})
    config = shrunk(_default(config_class), changes)
    config._attn_implementation = "eager"
    return Tiny(config, model_class(config_class))


@contextmanager
def _nan_where_uninitialized() -> Iterator[None]:
    """torch.empty gives NaN in place of what happens to be in memory."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def model_class(config_class: Any) -> type[nn.Module]:
    """The base model of a configuration; of a part without one of its own, the part's module."""
    return _from_table(config_class) or min(
        _beside(config_class), key=lambda c: not c.__name__.endswith("Model")
    )


def _from_table(config_class: Any) -> type[nn.Module] | None:
    """In transformers' table of base models; None where there is none, or is no such class."""
    from transformers import MODEL_MAPPING

    try:
        found = MODEL_MAPPING[config_class]
    except (KeyError, ValueError):
        return None
    return found[0] if isinstance(found, tuple) else found


def _beside(config_class: Any) -> list[Any]:
    """Models in the module that belongs to a configuration's that are made of it, and that
    transformers can checkpoint. ModuleNotFoundError where there is no such module.
    """
    from transformers import PreTrainedModel

    module = importlib.import_module(
        config_class.__module__.replace(".configuration_", ".modeling_")
    )
    return [
        one
        for one in vars(module).values()
        if isinstance(one, type)
        and issubclass(one, PreTrainedModel)
        and one.__module__ == module.__name__
        and one.config_class is config_class
        and one.supports_gradient_checkpointing
        and not one.__name__.endswith("PreTrainedModel")
    ]


def checkpointing_families() -> set[str]:
    """Every `model_type` that has a model with gradient checkpointing, or one that cannot be
    imported here for want of another package.
    """
    from transformers import CONFIG_MAPPING

    return {f for f in CONFIG_MAPPING if _checkpoints(CONFIG_MAPPING[f], f)}


def _checkpoints(config_class: Any, family: str) -> bool:
    if config_class.model_type not in ("", family):
        return False  # a second name of another family
    base: Any = _from_table(config_class)
    try:
        return bool((base and base.supports_gradient_checkpointing) or _beside(config_class))
    except ImportError as e:
        return not (e.name or "").startswith("transformers.")  # it has no such module


def _default(config_class: Any) -> Any:
    try:
        return config_class()
    except Exception:  # one that has no defaults for its parts
        parts = config_class.sub_configs
        return config_class(**{name: _default(part) for name, part in parts.items()})


def loss_of(output: Any) -> Tensor:
    """A number that all floating tensors of a model's output enter."""
    values = output.to_tuple() if hasattr(output, "to_tuple") else output
    return sum(  # type: ignore[return-value]
        leaf.pow(2).sum()
        for leaf in pytree.tree_leaves(values)
        if isinstance(leaf, Tensor) and leaf.requires_grad
    )
