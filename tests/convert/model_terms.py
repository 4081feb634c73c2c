"""What the models of models.py keep for backward in bfloat16 with PyTorch's fused attention, term
by term, before convert and after.

Symbols: n layers; h the width; m the MLP's; heads, kv_heads; kv the width of all key heads
together; r the part of a head that is rotated; W words; T tokens of each of the two sequences.

What convert takes away is always the same: the outputs of norms (2 h) and activations (2 m), which
the linear behind them reads; the products of gated units; what composed norms (an input widened to
float32 and one rounded before the weight) and activations (transformers' tanh GELU has three steps)
keep beside their input. What it adds: the input of such a norm, and 4 bytes in place of 2 for a
LayerNorm's statistics, which are float32.

What stays though one might expect it to go, and why:

- RoBERTa's head calls gelu() as a function, which only patch_functional() would catch; so does the
  front of Whisper's encoder, twice.
- GPT-NeoX and ModernBERT rotate queries and keys into copies; values are a view of the tensor with
  all three in it, which stays as a whole.
- GPT-NeoX and Whisper hand attention queries with the heads in front; its output is laid out like
  them, and the linear behind reads a copy.
- T5 scales the last norm's output before the head reads it.
- T5's attention adds a bias that is trained, for which no fused attention exists on the CPU: plain
  operators, with probabilities.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.support.byte_table import Term, format_sum, sum_per_token

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


@dataclass(frozen=True)
class Terms:
    both: tuple[Term, ...] = ()
    before: tuple[Term, ...] = ()
    after: tuple[Term, ...] = ()

    def __add__(self, other: Terms) -> Terms:
        return Terms(self.both + other.both, self.before + other.before, self.after + other.after)

    def each(self, change: Callable[[Term], Term]) -> Terms:
        kinds = (self.both, self.before, self.after)
        return Terms(*(tuple(change(term) for term in kind) for kind in kinds))


def both(*terms: Term) -> Terms:
    return Terms(both=terms)


def times(terms: Terms, number: int) -> Terms:
    def change(term: Term) -> Term:
        changed = copy.copy(term)
        changed.count = number * term.count
        return changed

    return terms.each(change)


def of(rows: str, terms: Terms) -> Terms:
    """Of other rows than tokens, whose number is a symbol."""
    return terms.each(
        lambda term: Term(
            term.what,
            count=term.count,
            per_call={
                rows if name == "one" else f"{rows} {name}": c for name, c in term.per_token.items()
            },
        )
    )


def layer_norm(count: int) -> Terms:
    return Terms(
        both=(Term("LayerNorms: input", count=count, h=2),),
        before=(
            Term("LayerNorms: mean, rstd", count=2 * count, one=2),
            Term("LayerNorms: output", count=count, h=2),
        ),
        after=(Term("LayerNorms: mean, rstd", count=2 * count, one=4),),
    )


def rms_norm(count: int, what: str = "RMSNorms", of: str = "h", rows: str = "one") -> Terms:
    """`rows` norms a token, of together `of` elements, whose output nothing keeps."""
    return Terms(
        both=(Term(f"{what}: rstd", count=count, **{rows: 4}),),
        before=(
            Term(f"{what}: input in float32", count=count, **{of: 4}),
            Term(f"{what}: without the weight", count=count, **{of: 2}),
        ),
        after=(Term(f"{what}: input", count=count, **{of: 2}),),
    )


def rms_norm_read(count: int) -> Terms:
    """By linears."""
    return rms_norm(count) + Terms(before=(Term("RMSNorms: output", count=count, h=2),))


def centred_rms_norm(count: int) -> Terms:
    """Gemma's: (1 + weight) in float32, times what is rounded afterwards."""
    return Terms(
        both=(Term("RMSNorms: rstd", count=count, one=4),),
        before=(
            Term("RMSNorms: input in float32", count=count, h=4),
            Term("RMSNorms: without the weight, in float32", count=count, h=4),
            Term("RMSNorms: 1 + weight", count=count, per_call={"h": 4}),
            Term("RMSNorms: output", count=count, h=2),
        ),
        after=(Term("RMSNorms: input", count=count, h=2),),
    )


def t5_norm(count: int) -> Terms:
    """T5's: float32 for the mean of squares alone."""
    return Terms(
        both=(
            Term("RMSNorms: input", count=count, h=2),
            Term("RMSNorms: rstd", count=count, one=4),
        ),
        before=(
            Term("RMSNorms: input in float32", count=count, h=4),
            Term("RMSNorms: without the weight", count=count, h=2),
        ),
    )


LOGSUMEXP = Term("attention: logsumexp", heads=4)
OUTPUT = Term("attention's output", h=2)
COPY = Term("attention's output, copied for the linear", h=2)
PACKED = Term("q, k, v in one tensor", h=6)
ATTENTION = both(Term("q, k, v", count=3, h=2), OUTPUT, LOGSUMEXP)
GROUPED = both(Term("q", h=2), Term("k, v", count=2, kv=2), OUTPUT, LOGSUMEXP)
GELU = Terms(both=(Term("GELU's input", m=2),), before=(Term("GELU's output", m=2),))
NEW_GELU_STEPS = Terms(before=(Term("GELU in operators: between", count=3, m=2),))
GATED = Terms(
    both=(Term("gate, up", count=2, m=2),),
    before=(Term("f(gate)", m=2), Term("f(gate) up", m=2)),
)
T5_ATTENTION = both(
    Term("q, k, v", count=3, h=2), Term("attention's probabilities", **{"heads T": 2}), COPY
)

IDS = Term("ids, which are the labels too", one=8)
SHIFTED = Term("ids, labels shifted", count=2, one=8)
COS_SIN = Term("cos, sin", count=2, per_call={"T r": 2})


def logits(bytes_each: int) -> tuple[Term, Term]:
    """The loss is computed on them as they are, or in float32."""
    return Term("log-probabilities", W=bytes_each), Term("loss: weight", per_call=bytes_each)


LM_HEAD = both(SHIFTED, *logits(4))
LLAMA = rms_norm_read(2) + GROUPED + GATED
GELU_CHAIN = Terms(
    both=(Term("head: GELU's input", h=2),),
    before=(Term("head: GELU's output, LayerNorm's input", h=2),),
)


def head_norm() -> Terms:
    """The head's LayerNorm: its input is a GELU's output."""
    norm = layer_norm(1)
    return Terms((), norm.before, norm.after)


@dataclass(frozen=True)
class ModelTerms:
    layer: Terms
    """Of one layer; of one encoder and one decoder layer."""

    rest: Terms
    changes: Callable[[Sizes], dict[str, Any]]
    """Of the config, by its own names."""

    inputs: Callable[[Sizes], dict[str, Any]] = field(default=lambda s: {"tokens": s.tokens})
    more: Callable[[Sizes], dict[str, int]] = field(default=lambda s: {})
    """Further symbols; `tokens`, where that is not SEQUENCES T."""

    def symbols(self, s: Sizes) -> dict[str, int]:
        kv = s.kv_heads * s.head
        symbols = {"h": s.h, "heads": s.heads, "kv": kv, "kv_heads": s.kv_heads, "m": s.m}
        symbols |= {"W": s.words, "T": s.tokens, "r": s.head, "tokens": SEQUENCES * s.tokens}
        return symbols | self.more(s)

    def terms(self, s: Sizes) -> tuple[list[Term], list[Term]]:
        """Before and after."""
        all_terms = times(self.layer, s.n) + self.rest
        return [*all_terms.both, *all_terms.before], [*all_terms.both, *all_terms.after]

    def formulas(self) -> tuple[str, str]:
        """Bytes a call before and after."""
        before, after = (
            f"n ({_formula(self.layer.both + layer)}) + {_formula(self.rest.both + rest)}"
            for layer, rest in (
                (self.layer.before, self.rest.before),
                (self.layer.after, self.rest.after),
            )
        )
        return before, after

    def layer_formulas(self) -> tuple[str, str]:
        """The part that grows with n."""
        layer = self.layer
        return _formula(layer.both + layer.before), _formula(layer.both + layer.after)


def _formula(terms: Sequence[Term]) -> str:
    per_token, per_call = sum_per_token(terms), dict[str, int]()
    for term in terms:
        for name, c in term.per_call.items():
            per_call[name] = per_call.get(name, 0) + term.count * c
    parts = [f"tokens ({format_sum(_sorted(per_token))})"] if per_token else []
    per_call = {name: c for name, c in per_call.items() if c}
    return " + ".join([*parts, *([format_sum(_sorted(per_call))] if per_call else [])])


def _sorted(coefficients: Mapping[str, int]) -> dict[str, int]:
    order = ("h", "kv", "m", "W", "heads", "kv_heads", "heads T")
    names = [name for name in order if name in coefficients]
    return {name: coefficients[name] for name in (*names, *coefficients)}


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
    """Without a cache of keys and values, which training does not need."""
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


def vit(s: Sizes) -> dict[str, Any]:
    """As many patches as tokens fit in a square."""
    changes = {**common(s), "image_size": 8 * _side(s)}
    del changes["vocab_size"]
    return changes


def _side(s: Sizes) -> int:
    return int((s.tokens - 1) ** 0.5)


def _vit_symbols(s: Sizes) -> dict[str, int]:
    side, images = _side(s), SEQUENCES
    pixels = images * 3 * (8 * side) ** 2
    return {"tokens": images * (side**2 + 1), "images": images, "pixels": pixels, "labels": 2}


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
        "max_source_positions": _positions(s),
        "max_target_positions": s.tokens,
        "use_cache": False,
        "attn_implementation": "sdpa",
    }


def _positions(s: Sizes) -> int:
    """Of the encoder."""
    return 4 * s.tokens // 5


MODEL_TERMS: dict[str, ModelTerms] = {
    "BERT": ModelTerms(
        layer=ATTENTION + layer_norm(2) + GELU,
        rest=layer_norm(1)
        + GELU_CHAIN
        + head_norm()
        + both(IDS, Term("token types of one sequence", per_call={"T": 8}), *logits(2)),
        changes=common,
    ),
    "RoBERTa": ModelTerms(
        layer=ATTENTION + layer_norm(2) + GELU,
        rest=layer_norm(2)
        + both(
            Term("head: gelu()'s input", h=2),
            IDS,
            Term("token types, positions", count=2, one=8),
            *logits(2),
        ),
        changes=common,
    ),
    "GPT-2": ModelTerms(
        layer=both(PACKED, OUTPUT, LOGSUMEXP) + layer_norm(2) + GELU + NEW_GELU_STEPS,
        rest=layer_norm(1) + both(Term("positions of one sequence", per_call={"T": 8})) + LM_HEAD,
        changes=gpt2,
    ),
    "GPT-NeoX": ModelTerms(
        # Both norms read the layer's input.
        layer=both(PACKED, Term("q, k, rotated", count=2, h=2), OUTPUT, COPY, LOGSUMEXP)
        + layer_norm(1)
        + head_norm()
        + GELU,
        rest=layer_norm(1) + both(COS_SIN) + LM_HEAD,
        changes=causal,
        more=lambda s: {"r": s.head // 4},
    ),
    "Llama": ModelTerms(
        layer=LLAMA, rest=rms_norm_read(1) + both(COS_SIN) + LM_HEAD, changes=grouped
    ),
    "Qwen3": ModelTerms(
        layer=LLAMA
        + rms_norm(1, "norm of each query head", of="h", rows="heads")
        + rms_norm(1, "norm of each key head", of="kv", rows="kv_heads"),
        rest=rms_norm_read(1) + both(COS_SIN) + LM_HEAD,
        changes=grouped,
    ),
    "Gemma": ModelTerms(
        layer=centred_rms_norm(2) + GROUPED + GATED,
        rest=centred_rms_norm(1) + both(COS_SIN) + LM_HEAD,
        changes=grouped,
    ),
    "Mistral": ModelTerms(
        layer=LLAMA, rest=rms_norm_read(1) + both(COS_SIN) + LM_HEAD, changes=grouped
    ),
    "ViT": ModelTerms(
        layer=ATTENTION + layer_norm(2) + GELU,
        rest=layer_norm(1)
        + both(
            Term("pixels", per_call={"pixels": 2}),
            Term("labels", per_call={"images": 8}),
            Term("log-probabilities", per_call={"images labels": 2}),
            Term("loss: weight", per_call=2),
        ),
        changes=vit,
        inputs=lambda s: {"size": 8 * _side(s)},
        more=_vit_symbols,
    ),
    "T5": ModelTerms(
        # The encoder's self-attention; the decoder's, and the one that reads the encoder.
        layer=times(T5_ATTENTION, 3)
        + t5_norm(5)
        + Terms(before=(Term("RMSNorms: output", count=5, h=2),))
        + times(GATED + NEW_GELU_STEPS, 2),
        rest=t5_norm(2)
        + Terms(before=(Term("the encoder's output", h=2),))
        + both(
            Term("last norm's output, scaled", h=2),
            Term("buckets of the distances", count=2, per_call={"T T": 8}),
            IDS,
            Term("the decoder's ids", one=8),
            *logits(2),
        ),
        changes=t5,
    ),
    "Whisper": ModelTerms(
        layer=of("frames", ATTENTION + both(COPY) + layer_norm(2) + GELU)
        + ATTENTION
        + both(COPY)
        + both(Term("q of the attention to the encoder", h=2), OUTPUT, COPY, LOGSUMEXP)
        + of("frames", both(Term("k, v of the encoder", count=2, h=2)))
        + layer_norm(3)
        + GELU,
        rest=of("frames", layer_norm(1))
        + layer_norm(1)
        + both(
            Term("the spectrum", per_call={"frames mel": 4}),
            Term("first gelu()'s input and output", count=2, per_call={"frames h": 4}),
            Term("second gelu()'s input", per_call={"frames h": 2}),
            Term("the decoder's ids, its positions, labels", count=3, one=8),
            *logits(2),
        ),
        changes=whisper,
        inputs=lambda s: {"tokens": s.tokens, "frames": 2 * _positions(s)},
        more=lambda s: {"frames": SEQUENCES * _positions(s), "mel": 8},
    ),
    "ModernBERT": ModelTerms(
        # The first layer's attention has the embeddings' norm.
        layer=both(PACKED, Term("q, k, rotated", count=2, h=2), OUTPUT, LOGSUMEXP)
        + layer_norm(2)
        + Terms(
            both=(Term("gate and up in one tensor", m=4),),
            before=(Term("f(gate)", m=2), Term("f(gate) up", m=2)),
        ),
        rest=layer_norm(1)
        + GELU_CHAIN
        + head_norm()
        + both(
            Term("cos, sin, for near and for all", count=4, per_call={"T r": 2}), IDS, *logits(4)
        ),
        changes=common,
    ),
}
