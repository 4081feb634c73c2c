"""Terms (byte_terms.py) for what the parts of models keep for backward in bfloat16: before
convert, after, and both times.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.convert_models.byte_terms import Term, format_sum, sum_per_token


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
    """The terms for other rows than tokens, whose number is a symbol."""
    return terms.each(
        lambda term: Term(
            term.what,
            count=term.count,
            per_call={
                rows if name == "one" else f"{rows} {name}": c for name, c in term.per_token.items()
            },
        )
    )


def layer_norm(count: int, shared_inputs: int = 0) -> Terms:
    """`shared_inputs`: so many of the norms have an input that another term is for."""
    return Terms(
        both=(Term("LayerNorms: input", count=count - shared_inputs, h=2),),
        before=(
            Term("LayerNorms: mean, rstd", count=2 * count, one=2),
            Term("LayerNorms: output", count=count, h=2),
        ),
        after=(Term("LayerNorms: mean, rstd", count=2 * count, one=4),),
    )


def rms_norm(count: int, what: str = "RMSNorms", width: str = "h", rows: str = "one") -> Terms:
    """Norms of `rows` rows a token, together `width` elements, whose output nothing keeps."""
    return Terms(
        both=(Term(f"{what}: rstd", count=count, **{rows: 4}),),
        before=(
            Term(f"{what}: input in float32", count=count, **{width: 4}),
            Term(f"{what}: without the weight", count=count, **{width: 2}),
        ),
        after=(Term(f"{what}: input", count=count, **{width: 2}),),
    )


def rms_norm_read(count: int) -> Terms:
    """The terms of RMS norms whose outputs linears read."""
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
ROTATED = Terms(
    both=(Term("v", kv=2), OUTPUT, LOGSUMEXP),
    before=(Term("q, rotated", h=2), Term("k, rotated", kv=2)),
)
"""Attention behind norms of queries and keys, which makes the rotated ones again."""
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


def formula(terms: Sequence[Term]) -> str:
    """`20 h + 8, a frame 16 h, a call 4`."""
    frames, calls = Counter[str](), Counter[str]()
    for term in terms:
        for name, c in term.per_call.items():
            words = name.split()
            if words[0] == "frames":
                frames[" ".join(words[1:]) or "one"] += term.count * c
            elif c:
                calls[name] += term.count * c
    parts = [format_sum(_sorted(sum_per_token(terms)))]
    parts += [f"a frame {format_sum(_sorted(frames))}"] if frames else []
    parts += [f"a call {format_sum(_sorted(calls))}"] if calls else []
    return ", ".join(parts)


def _sorted(coefficients: Mapping[str, int]) -> dict[str, int]:
    order = ("h", "kv", "m", "W", "heads T", "heads", "kv_heads")
    names = [name for name in order if name in coefficients]
    return {name: coefficients[name] for name in (*names, *coefficients)}
