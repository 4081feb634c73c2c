"""Proves, storage by storage, what whole transformer blocks in bfloat16 keep for backward on the
CPU, weights not counted. Per token, with h the width and m the MLP's:

    a pre-LN GPT-2 block      20 h and statistics,              eager 32 h
        with dropout          the same and 16 bytes a call,     eager 2 h more for each mask
        with an MLP that keeps its input alone (recompute="all")        12 h and statistics
    a Llama block             8 h + 4 kv + 4 m and statistics,  eager 20 h + 4 kv + 8 m
        with such an MLP                                                8 h + 4 kv and statistics
        (kv: width of all key heads together)

`pytest -rP` prints the tables. Beside the statistics of the norms there is attention's logsumexp, 4
bytes a head. On the CPU PyTorch keeps a LayerNorm's statistics in the parameters' dtype, and a
dropout mask in the input's (on a GPU it is a byte an element). Each block computes what the eager
one does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from benchmarks.convert_models.byte_terms import Term, sum_per_token
from memopt.memory.saved import SavedTensors
from tests.support.blocks import (
    GPT2Block,
    LlamaBlock,
    angles,
    fuse_gpt2,
    fuse_gpt2_recompute_all,
    fuse_llama,
    fuse_llama_recompute_all,
)
from tests.support.byte_table import assert_kept

BATCH, TOKENS = 2, 24

ATTENTION = (
    Term("attention: logsumexp", heads=4),
    Term("attention's output, proj's input", h=2),
)

GPT2_KEPT = (
    Term("the block's input", h=2),
    Term("LayerNorms: mean, rstd", count=4, one=4),
    Term("q, k, v in one tensor", h=6),
    *ATTENTION,
    Term("the MLP's input", h=2),
    Term("GELU's input", h=8),
)
GPT2_EAGER = (
    Term("the block's input", h=2),
    Term("LayerNorms: mean, rstd", count=4, one=2),
    Term("LayerNorm's output, qkv's input", h=2),
    Term("q, k, v in one tensor", h=6),
    *ATTENTION,
    Term("the MLP's input", h=2),
    Term("LayerNorm's output, up's input", h=2),
    Term("GELU's input", h=8),
    Term("GELU's output, down's input", h=8),
)
GPT2_ALL = tuple(term for term in GPT2_KEPT if term.what != "GELU's input")
STATES = (Term("dropout: seed and offset", count=3, per_call=16),)
MASKS = (Term("dropout: mask", count=3, h=2),)

# How a block is changed, its dropout, what it then keeps, and of that the part that grows with h.
GPT2_BLOCKS: dict[str, tuple[Callable[[GPT2Block], None], float, tuple[Term, ...], int]] = {
    "fused": (fuse_gpt2, 0.0, GPT2_KEPT, 20),
    "fused, dropout": (fuse_gpt2, 0.1, GPT2_KEPT + STATES, 20),
    "recompute='all'": (fuse_gpt2_recompute_all, 0.0, GPT2_ALL, 12),
    "recompute='all', dropout": (fuse_gpt2_recompute_all, 0.1, GPT2_ALL + STATES, 12),
    "eager": (lambda block: None, 0.0, GPT2_EAGER, 32),
    "eager, dropout": (lambda block: None, 0.1, GPT2_EAGER + MASKS, 38),
}

LLAMA_KEPT = (
    Term("the block's input", h=2),
    Term("RMSNorms: rstd", count=2, one=4),
    Term("q, rotated", h=2),
    Term("k, rotated", kv=2),
    Term("v", kv=2),
    *ATTENTION,
    Term("the MLP's input", h=2),
    Term("gate, up", count=2, m=2),
)
LLAMA_ALL = tuple(term for term in LLAMA_KEPT if term.what != "gate, up")
LLAMA_EAGER = (
    Term("RMSNorms: input in float32", count=2, h=4),
    Term("RMSNorms: rstd", count=2, one=4),
    Term("RMSNorms: without the weight", count=2, h=2),
    Term("RMSNorms: output, the linears' input", count=2, h=2),
    Term("q, rotated", h=2),
    Term("k, rotated", kv=2),
    Term("v", kv=2),
    *ATTENTION,
    Term("gate, up", count=2, m=2),
    Term("silu(gate)", m=2),
    Term("silu(gate) up, down's input", m=2),
)
LLAMA_BLOCKS: dict[str, tuple[Callable[[LlamaBlock], None], tuple[Term, ...], dict[str, int]]] = {
    "fused": (fuse_llama, LLAMA_KEPT, {"h": 8, "kv": 4, "m": 4}),
    "recompute='all'": (fuse_llama_recompute_all, LLAMA_ALL, {"h": 8, "kv": 4}),
    "eager": (lambda block: None, LLAMA_EAGER, {"h": 20, "kv": 4, "m": 8}),
}


def run(
    module: nn.Module, dtype: torch.dtype, h: int, *more: Tensor
) -> tuple[SavedTensors, list[Tensor]]:
    """What a call saves beside `more` and the parameters, and its output."""
    module.to(dtype)
    x = torch.randn(BATCH, TOKENS, h, generator=torch.Generator().manual_seed(0)).to(dtype)
    with SavedTensors(exclude=[*module.parameters(), *more]) as saved:
        output = module(x.requires_grad_(), *more)
    output.backward(torch.ones_like(output))
    assert x.grad is not None
    return saved, [output.detach(), x.grad]


@pytest.mark.parametrize(("h", "heads"), [(64, 4), (96, 3)])
@pytest.mark.parametrize("name", GPT2_BLOCKS)
def test_a_gpt2_block(name: str, h: int, heads: int) -> None:
    change, p, terms, of_h = GPT2_BLOCKS[name]
    assert sum_per_token(terms)["h"] == of_h
    block = GPT2Block(h, heads, p)
    change(block)
    saved, _ = run(block, torch.bfloat16, h)
    assert_kept(terms, saved, tokens=BATCH * TOKENS, h=h, heads=heads)


@pytest.mark.parametrize(
    ("h", "heads", "kv_heads", "m"), [(64, 4, 2, 172), (96, 3, 1, 256), (64, 2, 2, 160)]
)
@pytest.mark.parametrize("name", LLAMA_BLOCKS)
def test_a_llama_block(name: str, h: int, heads: int, kv_heads: int, m: int) -> None:
    change, terms, widths = LLAMA_BLOCKS[name]
    assert {symbol: sum_per_token(terms)[symbol] for symbol in widths} == widths
    block = LlamaBlock(h, heads, kv_heads, m)
    change(block)
    saved, _ = run(block, torch.bfloat16, h, *angles(TOKENS, h // heads, torch.bfloat16))
    kv = kv_heads * h // heads
    assert_kept(terms, saved, tokens=BATCH * TOKENS, h=h, heads=heads, kv=kv, m=m)


@pytest.mark.parametrize(
    ("block", "fuse", "more"),
    [
        (GPT2Block(64, 4), fuse_gpt2, ()),
        (GPT2Block(64, 4), fuse_gpt2_recompute_all, ()),
        (LlamaBlock(64, 4, 2, 172), fuse_llama, angles(TOKENS, 16, torch.float64)),
        (LlamaBlock(64, 4, 2, 172), fuse_llama_recompute_all, angles(TOKENS, 16, torch.float64)),
    ],
    ids=["gpt2", "gpt2, all", "llama", "llama, all"],
)
def test_the_blocks_compute_what_the_eager_ones_do(
    block: nn.Module, fuse: Callable[[nn.Module], None], more: tuple[Tensor, ...]
) -> None:
    block = copy.deepcopy(block)
    parameters = list(block.double().parameters())

    def results() -> list[Tensor]:
        for parameter in parameters:
            parameter.grad = None
        _, tensors = run(block, torch.float64, 64, *more)
        gradients = [parameter.grad for parameter in parameters]
        assert all(gradient is not None for gradient in gradients)
        return [*tensors, *(gradient for gradient in gradients if gradient is not None)]

    expected = results()
    fuse(block)
    for actual, exact in zip(results(), expected, strict=True):
        torch.testing.assert_close(actual, exact, rtol=1e-9, atol=1e-9)


def test_the_eager_llama_block_keeps_what_transformers_does() -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    h, heads, kv_heads, m = 64, 4, 2, 172
    config = llama.LlamaConfig(
        hidden_size=h,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=m,
        attn_implementation="sdpa",
    )
    cos, sin = angles(TOKENS, h // heads, torch.bfloat16)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = llama.LlamaDecoderLayer(config, 0)

        def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            output: Tensor = self.layer(x, position_embeddings=(cos, sin))
            return output

    saved, _ = run(Layer(), torch.bfloat16, h, cos, sin)
    kv = kv_heads * h // heads
    assert_kept(LLAMA_EAGER, saved, tokens=BATCH * TOKENS, h=h, heads=heads, kv=kv, m=m)
