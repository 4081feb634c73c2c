"""Proves, storage by storage, what transformer blocks in bfloat16 that are unmodified keep for
backward once `memopt.convert` has been at them: the terms of memopt's own modules
(tests/nn/test_block_bytes.py), one for one. Per token, with h the width, m the MLP's and kv the
width of all key heads together:

    a pre-LN GPT-2 block    20 h and statistics; with dropout 16 bytes a call and no mask
    a Llama block           8 h + 4 kv + 4 m and statistics

of torch.nn, and transformers' own. `pytest -rP` prints the tables.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memopt
from benchmarks.convert_models.byte_terms import Term, sum_per_token
from memopt._extension import _C
from tests.convert.modules import FeedForward, PlainRMSNorm
from tests.nn.test_block_bytes import (
    BATCH,
    GPT2_KEPT,
    LLAMA_EAGER,
    LLAMA_KEPT,
    TOKENS,
    run,
)
from tests.support.blocks import GPT2Block, LlamaBlock, angles, rotated
from tests.support.byte_table import assert_kept

pytestmark = pytest.mark.usefixtures("collector_off")


def states(calls: int) -> tuple[Term, ...]:
    return (Term("dropout: seed and offset", count=calls, per_call=16),) if calls else ()


def assert_a_converted_block_keeps(
    terms: tuple[Term, ...],
    block: nn.Module,
    h: int,
    *more: Tensor,
    functional: bool = True,
    **symbols: int,
) -> None:
    """And that it is alive no longer than its graph."""
    live = _C.live_handles()
    memopt.convert(block, functional=functional)
    saved, _ = run(block, torch.bfloat16, h, *more)
    assert_kept(terms, saved, tokens=BATCH * TOKENS, h=h, **symbols)
    assert _C.live_handles() == live


@pytest.mark.parametrize(("h", "heads"), [(64, 4), (96, 3)])
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_a_gpt2_block(p: float, h: int, heads: int) -> None:
    assert sum_per_token(GPT2_KEPT)["h"] == 20
    terms = GPT2_KEPT + states(3 if p else 0)
    assert_a_converted_block_keeps(terms, GPT2Block(h, heads, p), h, heads=heads)


class PlainLlamaBlock(nn.Module):
    """As people write it: the norm in operators, linears apart, the MLP with functional SiLU."""

    def __init__(self, h: int, heads: int, kv_heads: int, m: int) -> None:
        super().__init__()
        self.head = h // heads
        kv = kv_heads * self.head
        self.q, self.k, self.v, self.proj = (
            nn.Linear(h, out, bias=False) for out in (h, kv, kv, h)
        )
        self.norm1, self.norm2 = PlainRMSNorm(h), PlainRMSNorm(h)
        self.mlp = FeedForward(h, m)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """cos and sin: (1, tokens, h / heads)."""
        y = self.norm1(x)
        q, k, v = (
            linear(y).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for linear in (self.q, self.k, self.v)
        )
        q, k = rotated(q, cos[:, None], sin[:, None]), rotated(k, cos[:, None], sin[:, None])
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        output: Tensor = x + self.mlp(self.norm2(x))
        return output


@pytest.mark.parametrize(
    ("h", "heads", "kv_heads", "m"), [(64, 4, 2, 172), (96, 3, 1, 256), (64, 2, 2, 160)]
)
def test_a_llama_block(h: int, heads: int, kv_heads: int, m: int) -> None:
    sums = sum_per_token(LLAMA_KEPT)
    assert (sums["h"], sums["kv"], sums["m"]) == (8, 4, 4)
    block = PlainLlamaBlock(h, heads, kv_heads, m)
    kv = kv_heads * h // heads
    cos_sin = angles(TOKENS, h // heads, torch.bfloat16)
    assert_a_converted_block_keeps(LLAMA_KEPT, block, h, *cos_sin, heads=heads, kv=kv, m=m)


def test_a_block_whose_norm_overrides_torch_nn_s() -> None:
    """LlamaBlock's norm is a subclass of nn.RMSNorm with a forward of its own, and known by what it
    computes. The end of its MLP takes two tensors: convert does not know it, and its terms stay.
    """
    norms = (
        Term("RMSNorms: input", count=2, h=2),
        Term("RMSNorms: rstd", count=2, one=4),
    )
    others = tuple(term for term in LLAMA_EAGER if not term.what.startswith("RMSNorms"))
    assert len(LLAMA_EAGER) - len(others) == 4
    block = LlamaBlock(64, 4, 2, 172)
    cos_sin = angles(TOKENS, 16, torch.bfloat16)
    symbols = {"heads": 4, "kv": 32, "m": 172}
    assert_a_converted_block_keeps(norms + others, block, 64, *cos_sin, functional=False, **symbols)


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_transformers_gpt2_block(p: float) -> None:
    """Dropout behind attention and the MLP; the embeddings' is the model's."""
    gpt2 = pytest.importorskip("transformers.models.gpt2.modeling_gpt2")
    h, heads = 64, 4
    config = gpt2.GPT2Config(
        n_embd=h,
        n_head=heads,
        resid_pdrop=p,
        attn_pdrop=0.0,
        attn_implementation="sdpa",
    )
    terms = GPT2_KEPT + states(2 if p else 0)
    assert_a_converted_block_keeps(terms, gpt2.GPT2Block(config, layer_idx=0), h, heads=heads)


class WithAngles(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        output: Tensor = self.layer(x, position_embeddings=(cos, sin))
        return output


def test_transformers_llama_block() -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    h, heads, kv_heads, m = 64, 4, 2, 172
    config = llama.LlamaConfig(
        hidden_size=h,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=m,
        attn_implementation="sdpa",
    )
    block = WithAngles(llama.LlamaDecoderLayer(config, 0))
    cos_sin = angles(TOKENS, h // heads, torch.bfloat16)
    kv = kv_heads * h // heads
    assert_a_converted_block_keeps(LLAMA_KEPT, block, h, *cos_sin, heads=heads, kv=kv, m=m)
