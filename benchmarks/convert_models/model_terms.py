"""Tensors that the models of models.py keep for backward in bfloat16 with PyTorch's fused
attention, term by term, before convert and after.

Symbols: n layers; h the width; m the MLP's; heads, kv_heads; kv the width of all key heads
together; r the part of a head that is rotated; W words; T tokens of each of the two sequences.

What convert takes away is always the same: the outputs of norms (2 h) and activations (2 m), which
the linear behind them reads; the products of gated units; what composed norms (an input widened to
float32 and one rounded before the weight) and activations (transformers' tanh GELU has three steps)
keep beside their input; and what is made of all that by sums, products and numbers, such as queries
and keys that are rotated behind a norm. What it adds: the input of such a norm, and 4 bytes in
place of 2 for a LayerNorm's statistics, which are float32.

What stays though one might expect it to go, and why:

- GPT-NeoX and ModernBERT rotate queries and keys into copies; values are a view of the tensor with
  all three in it, which stays as a whole.
- GPT-NeoX and Whisper hand attention queries with the heads in front; its output is laid out like
  them, and the linear behind reads a copy.
- T5's attention adds a bias that is trained, for which no fused attention exists on the CPU: plain
  operators, with probabilities.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

import memopt
from benchmarks.convert_models.byte_terms import Term
from benchmarks.convert_models.models import MODELS
from benchmarks.convert_models.sizes import (
    SEQUENCES,
    Sizes,
    causal,
    common,
    gpt2,
    grouped,
    modern_bert,
    positions,
    side,
    t5,
    vit,
    vit_symbols,
    whisper,
)
from benchmarks.convert_models.terms import (
    ATTENTION,
    COPY,
    COS_SIN,
    GATED,
    GELU,
    GELU_CHAIN,
    GROUPED,
    IDS,
    LLAMA,
    LM_HEAD,
    LOGSUMEXP,
    NEW_GELU_STEPS,
    OUTPUT,
    PACKED,
    ROTATED,
    T5_ATTENTION,
    Terms,
    both,
    centred_rms_norm,
    formula,
    layer_norm,
    logits,
    of,
    rms_norm,
    rms_norm_read,
    t5_norm,
    times,
)
from memopt.memory.saved import SavedTensors


@dataclass(frozen=True)
class ModelTerms:
    layer: Terms
    """Terms of one layer; in an encoder-decoder of one layer of each."""

    rest: Terms
    changes: Callable[[Sizes], dict[str, Any]]
    """Changes to the config, by its own names."""

    inputs: Callable[[Sizes], dict[str, Any]] = field(default=lambda s: {"tokens": s.tokens})
    more: Callable[[Sizes], dict[str, int]] = field(default=lambda s: {})
    """Further symbols; `tokens`, where that is not SEQUENCES T."""

    def symbols(self, s: Sizes) -> dict[str, int]:
        kv = s.kv_heads * s.head
        symbols = {"h": s.h, "heads": s.heads, "kv": kv, "kv_heads": s.kv_heads, "m": s.m}
        symbols |= {"W": s.words, "T": s.tokens, "r": s.head, "tokens": SEQUENCES * s.tokens}
        return symbols | self.more(s)

    def terms(self, s: Sizes) -> tuple[list[Term], list[Term]]:
        """The terms before and after convert."""
        all_terms = times(self.layer, s.n) + self.rest
        return [*all_terms.both, *all_terms.before], [*all_terms.both, *all_terms.after]

    def formulas(self) -> dict[str, dict[str, str]]:
        """Bytes a token (a frame, a call), before and after, of a layer and of the rest."""
        return {
            part: {
                "before": formula(terms.both + terms.before),
                "after": formula(terms.both + terms.after),
            }
            for part, terms in (("layer", self.layer), ("rest", self.rest))
        }


MODEL_TERMS: dict[str, ModelTerms] = {
    "BERT": ModelTerms(
        layer=ATTENTION + layer_norm(2) + GELU,
        rest=layer_norm(2, shared_inputs=1)
        + GELU_CHAIN
        + both(IDS, Term("token types of one sequence", per_call={"T": 8}), *logits(2)),
        changes=common,
    ),
    "RoBERTa": ModelTerms(
        layer=ATTENTION + layer_norm(2) + GELU,
        rest=layer_norm(2)
        + Terms(before=(Term("head: gelu()'s output, which a norm reads", h=2),))
        + both(
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
        + layer_norm(2, shared_inputs=1)
        + GELU,
        rest=layer_norm(1) + both(COS_SIN) + LM_HEAD,
        changes=causal,
        more=lambda s: {"r": s.head // 4},
    ),
    "Llama": ModelTerms(
        layer=LLAMA, rest=rms_norm_read(1) + both(COS_SIN) + LM_HEAD, changes=grouped
    ),
    "Qwen3": ModelTerms(
        layer=rms_norm_read(2)
        + ROTATED
        + GATED
        + rms_norm(1, "norm of each query head", width="h", rows="heads")
        + rms_norm(1, "norm of each key head", width="kv", rows="kv_heads"),
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
        inputs=lambda s: {"size": 8 * side(s)},
        more=vit_symbols,
    ),
    "T5": ModelTerms(
        # The encoder's self-attention; the decoder's, and the one that reads the encoder.
        layer=times(T5_ATTENTION, 3)
        + t5_norm(5)
        + Terms(before=(Term("RMSNorms: output", count=5, h=2),))
        + times(GATED + NEW_GELU_STEPS, 2),
        rest=t5_norm(2)
        + Terms(before=(Term("the encoder's output", h=2), Term("last norm's output, scaled", h=2)))
        + both(
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
        + Terms(before=(Term("first gelu()'s output", per_call={"frames h": 4}),))
        + both(
            Term("the spectrum", per_call={"frames mel": 4}),
            Term("first gelu()'s input", per_call={"frames h": 4}),
            Term("second gelu()'s input", per_call={"frames h": 2}),
            Term("the decoder's ids, its positions, labels", count=3, one=8),
            *logits(2),
        ),
        changes=whisper,
        inputs=lambda s: {"tokens": s.tokens, "frames": 2 * positions(s)},
        more=lambda s: {"frames": SEQUENCES * positions(s), "mel": 8},
    ),
    "ModernBERT": ModelTerms(
        # The first layer's attention has the embeddings' norm.
        layer=both(PACKED, Term("q, k, rotated", count=2, h=2), OUTPUT, LOGSUMEXP)
        + layer_norm(2)
        + Terms(
            both=(Term("gate and up in one tensor", m=4),),
            before=(Term("f(gate)", m=2), Term("f(gate) up", m=2)),
        ),
        rest=layer_norm(2, shared_inputs=1)
        + GELU_CHAIN
        + both(
            Term("cos, sin, for near and for all", count=4, per_call={"T r": 2}), IDS, *logits(4)
        ),
        changes=modern_bert,
    ),
}


def model_and_inputs(name: str, sizes: Sizes) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model in bfloat16, and what to call it with."""
    terms = MODEL_TERMS[name]
    model = MODELS[name].make(**terms.changes(sizes)).bfloat16()
    inputs = MODELS[name].inputs(**terms.inputs(sizes))
    return model, {k: v.bfloat16() if v.is_floating_point() else v for k, v in inputs.items()}


def count(model: nn.Module, inputs: dict[str, Tensor]) -> SavedTensors:
    """Counts what one forward saves beside parameters and buffers."""
    with SavedTensors(exclude=[*model.parameters(), *model.buffers()]) as saved:
        output = model(**inputs)
    del output
    return saved


def count_before_and_after(name: str, sizes: Sizes) -> tuple[SavedTensors, SavedTensors]:
    model, inputs = model_and_inputs(name, sizes)
    before = count(model, inputs)
    memopt.convert(model, head=False)
    return before, count(model, inputs)
