"""Sizes of models.py's models: as changes of each config, by its own names. Attention is PyTorch's
fused one, but for T5, and there is no cache of keys and values, which training does not need.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SEQUENCES = 2


@dataclass(frozen=True)
class Sizes:
    n: int
    h: int
    heads: int
    kv_heads: int
    m: int
    words: int
    tokens: int

    @property
    def head(self) -> int:
        return self.h // self.heads


def common(s: Sizes) -> dict[str, Any]:
    return {
        "num_hidden_layers": s.n,
        "hidden_size": s.h,
        "num_attention_heads": s.heads,
        "intermediate_size": s.m,
        "vocab_size": s.words,
        "attn_implementation": "sdpa",
    }


def causal(s: Sizes) -> dict[str, Any]:
    return {**common(s), "use_cache": False}


def grouped(s: Sizes) -> dict[str, Any]:
    return {**causal(s), "num_key_value_heads": s.kv_heads, "head_dim": s.head}


def gpt2(s: Sizes) -> dict[str, Any]:
    return {
        "n_layer": s.n,
        "n_embd": s.h,
        "n_head": s.heads,
        "n_inner": s.m,
        "vocab_size": s.words,
        "use_cache": False,
        "attn_implementation": "sdpa",
    }


def modern_bert(s: Sizes) -> dict[str, Any]:
    """Near attention sees all of a sequence: else each such layer would keep a mask."""
    return {**common(s), "local_attention": 4 * s.tokens}


def vit(s: Sizes) -> dict[str, Any]:
    """The config of a picture with as many patches as tokens fit in a square."""
    changes = {**common(s), "image_size": 8 * side(s)}
    del changes["vocab_size"]
    return changes


def side(s: Sizes) -> int:
    """Patches on an edge of an image."""
    return int((s.tokens - 1) ** 0.5)


def vit_symbols(s: Sizes) -> dict[str, int]:
    edge, images = side(s), SEQUENCES
    pixels = images * 3 * (8 * edge) ** 2
    return {"tokens": images * (edge**2 + 1), "images": images, "pixels": pixels, "labels": 2}


def t5(s: Sizes) -> dict[str, Any]:
    return {
        "num_layers": s.n,
        "d_model": s.h,
        "d_kv": s.head,
        "d_ff": s.m,
        "num_heads": s.heads,
        "vocab_size": s.words,
        "use_cache": False,
    }


def whisper(s: Sizes) -> dict[str, Any]:
    parts = ("encoder", "decoder")
    return {
        **{f"{part}_layers": s.n for part in parts},
        **{f"{part}_attention_heads": s.heads for part in parts},
        **{f"{part}_ffn_dim": s.m for part in parts},
        "d_model": s.h,
        "vocab_size": s.words,
        "max_source_positions": positions(s),
        "max_target_positions": s.tokens,
        "use_cache": False,
        "attn_implementation": "sdpa",
    }


def positions(s: Sizes) -> int:
    """The number of the encoder's positions."""
    return 4 * s.tokens // 5
