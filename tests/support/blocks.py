"""Transformer blocks of torch.nn alone, and what changes them into memopt's on the same parameters.

Where a tensor would be kept twice, for the op that made it and for the linear behind, the two are
one nn.Sequential here, so that one module can take its place.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memopt.nn as mnn


class GPT2Block(nn.Module):
    """Pre-LN: attention on heads of h / heads, an MLP of 4 h, dropout p after either and on the
    embeddings that come in; none in attention.
    """

    def __init__(self, h: int, heads: int, p: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.drop_embedding, self.drop_attention, self.drop_mlp = (nn.Dropout(p) for _ in range(3))
        self.qkv = nn.Sequential(nn.LayerNorm(h), nn.Linear(h, 3 * h))
        self.proj = nn.Linear(h, h)
        self.up = nn.Sequential(nn.LayerNorm(h), nn.Linear(h, 4 * h))
        self.down = nn.Sequential(nn.GELU("tanh"), nn.Linear(4 * h, h))

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop_embedding(x)
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop_attention(self.proj(y.transpose(1, 2).flatten(2)))
        return x + self.drop_mlp(self.down(self.up(x)))


def fuse_gpt2(block: GPT2Block) -> None:
    """LayerNorm and GELU with the linears behind them, and dropout without masks."""
    block.qkv = mnn.LayerNormLinear.from_modules(*block.qkv)
    block.up = mnn.LayerNormLinear.from_modules(*block.up)
    block.down = mnn.GELULinear.from_modules(*block.down)
    for name in ("drop_embedding", "drop_attention", "drop_mlp"):
        setattr(block, name, mnn.Dropout(getattr(block, name).p))


def fuse_gpt2_recompute_all(block: GPT2Block) -> None:
    """The same with the MLP in one, of which only the input is kept."""
    mlp = mnn.MLP.from_modules(
        norm=block.up[0],
        up=block.up[1],
        down=block.down[1],
        activation="gelu_tanh",
        recompute="all",
    )
    fuse_gpt2(block)
    block.up, block.down = mlp, nn.Identity()


class WideRMSNorm(nn.RMSNorm):
    """As Llama's code has it: in float32, rounded before the weight."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * (wide * rstd).to(x.dtype)


class BeforeSeveral(nn.Module):
    """A norm and linears that share its output."""

    def __init__(self, norm: nn.Module, *linears: nn.Linear) -> None:
        super().__init__()
        self.norm, self.linears = norm, nn.ModuleList(linears)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.norm(x)
        return tuple(linear(y) for linear in self.linears)


class GatedThenLinear(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        y: Tensor = self.linear(F.silu(gate) * up)
        return y


class LlamaBlock(nn.Module):
    """Pre-RMSNorm, `heads` heads of h / heads for queries and kv_heads for keys and values, rotary
    embedding, an MLP of m gated by SiLU; no biases.
    """

    def __init__(self, h: int, heads: int, kv_heads: int, m: int) -> None:
        super().__init__()
        self.head = h // heads
        kv = kv_heads * self.head
        linear = [nn.Linear(h, out, bias=False) for out in (h, kv, kv, m, m)]
        self.qkv = BeforeSeveral(WideRMSNorm(h, 1e-6), *linear[:3])
        self.proj = nn.Linear(h, h, bias=False)
        self.gate_up = BeforeSeveral(WideRMSNorm(h, 1e-6), *linear[3:])
        self.down = GatedThenLinear(nn.Linear(m, h, bias=False))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """cos and sin: (1, tokens, h / heads)."""
        q, k, v = (t.unflatten(-1, (-1, self.head)).transpose(1, 2) for t in self.qkv(x))
        q, k = rotated(q, cos[:, None], sin[:, None]), rotated(k, cos[:, None], sin[:, None])
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.down(*self.gate_up(x))


def fuse_llama(block: LlamaBlock) -> None:
    """RMSNorm with the linears behind it, and the gated unit with its own."""
    for name in ("qkv", "gate_up"):
        apart = getattr(block, name)
        norm = nn.RMSNorm(apart.norm.normalized_shape, apart.norm.eps)
        norm.weight = apart.norm.weight
        setattr(block, name, mnn.RMSNormLinear.from_modules(norm, *apart.linears))
    block.down = mnn.GatedLinear.from_modules(mnn.SwiGLU(), block.down.linear)


def fuse_llama_recompute_all(block: LlamaBlock) -> None:
    """The same with the MLP in one, of which only the input is kept."""
    fuse_llama(block)
    gate, up = block.gate_up.linears
    mlp = mnn.MLP.from_modules(
        norm=block.gate_up.norm,
        gate=gate,
        up=up,
        down=block.down.linear,
        activation="silu",
        recompute="all",
    )
    block.gate_up, block.down = Alone(mlp), nn.Identity()


class Alone(nn.Module):
    """A module in the place of one that returns a tuple."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (self.module(x),)


def angles(tokens: int, head: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary embedding, the two halves of a head alike. Source: Su et al.,
    arXiv:2104.09864.
    """
    frequencies = 10000.0 ** -(torch.arange(0, head, 2) / head)
    phase = (torch.arange(tokens)[:, None] * frequencies).repeat(1, 2)[None]
    return phase.cos().to(dtype), phase.sin().to(dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
