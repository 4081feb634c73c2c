"""Recurrent, state space and transformer blocks of one's own."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.region_models.parts import Attention, Block, Made, Residual, Tower, mlp, random


class Mamba(nn.Module):
    """A selective state space, its scan a loop (Gu and Dao, 2023)."""

    def __init__(self, width: int = 16, states: int = 4) -> None:
        super().__init__()
        inner = 2 * width
        self.norm, self.in_proj = nn.LayerNorm(width), nn.Linear(width, 2 * inner)
        self.conv = nn.Conv1d(inner, inner, 3, padding=2, groups=inner)
        self.x_proj, self.dt = nn.Linear(inner, 2 * states + 1), nn.Linear(1, inner)
        self.A = nn.Parameter(torch.rand(inner, states))
        self.out = nn.Linear(inner, width)
        self.states = states

    def forward(self, x: Tensor) -> Tensor:
        y, gate = self.in_proj(self.norm(x)).chunk(2, -1)
        y = F.silu(self.conv(y.mT)[..., : x.shape[1]].mT)
        dt, b, c = self.x_proj(y).split((1, self.states, self.states), -1)
        dt = F.softplus(self.dt(dt))
        decay = torch.exp(-dt[..., None] * self.A)
        state, found = torch.zeros_like(decay[:, 0]), []
        for step in range(x.shape[1]):
            state = decay[:, step] * state + (dt * y)[:, step, :, None] * b[:, step, None]
            found.append((state * c[:, step, None]).sum(-1))
        out: Tensor = x + self.out(torch.stack(found, 1) * F.silu(gate))
        return out


class Rwkv(nn.Module):
    """Time mixing and channel mixing with shifted tokens (Peng et al., 2023)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix = nn.Parameter(torch.rand(5, width))
        self.key, self.value = nn.Linear(width, width), nn.Linear(width, width)
        self.receptance, self.output = nn.Linear(width, width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gate = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln1(x)
        before = F.pad(y, (0, 0, 1, -1))
        k, v, r = (torch.lerp(before, y, mix) for mix in self.mix[:3])
        weights = self.key(k).clamp(max=8).exp()
        mixed = (weights * self.value(v)).cumsum(1) / weights.cumsum(1)
        x = x + self.output(torch.sigmoid(self.receptance(r)) * mixed)
        y = self.ln2(x)
        before = F.pad(y, (0, 0, 1, -1))
        k, r = (torch.lerp(before, y, mix) for mix in self.mix[3:])
        return x + torch.sigmoid(self.gate(r)) * self.down(F.relu(self.up(k)).square())


class Parallel(nn.Module):
    """Attention and MLP side by side (GPT-J, PaLM)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm, self.attn, self.mlp = nn.LayerNorm(width), Attention(width), mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        out: Tensor = x + self.attn(y) + self.mlp(y)
        return out


class LucidStyle(nn.Module):
    """A list of lists, whose modules a loop takes out (vit-pytorch, x-transformers)."""

    def __init__(self, width: int = 32, depth: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList([_PreNorm(width, Attention(width)), _PreNorm(width, mlp(width))])
            for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        for attention, feed_forward in self.layers:  # type: ignore[misc]
            x = attention(x) + x
            x = feed_forward(x) + x
        return x


class _PreNorm(nn.Module):
    def __init__(self, width: int, fn: nn.Module) -> None:
        super().__init__()
        self.norm, self.fn = nn.LayerNorm(width), fn

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fn(self.norm(x))
        return out


class Experts(nn.Module):
    """A router, and experts of which each gets some of the tokens."""

    def __init__(self, width: int = 32, count: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(width, count)
        self.experts = nn.ModuleList(mlp(width) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        outputs = torch.stack([expert(x) for expert in self.experts], -2)
        return (weights[..., None] * outputs).sum(-2)


class OneLayer(nn.Module):
    """One layer that runs again and again (ALBERT, Universal Transformer)."""

    def __init__(self, times: int = 6) -> None:
        super().__init__()
        self.layer, self.times = Block(), times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.layer(x)
        return x


class Recurrent(nn.Module):
    """A cell in a loop, and linear layers over what it returns."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(width, width), mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        state, found = torch.zeros_like(x[:, 0]), []
        for step in range(x.shape[1]):
            state = self.cell(x[:, step], state)
            found.append(state)
        out: Tensor = self.head(torch.stack(found, 1))
        return out


class Lstm(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.rnn = nn.LSTM(width, width, 3, batch_first=True)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.rnn(x)[0])
        return out


class TemporalConv(nn.Module):
    """TCN's: dilated causal convolutions."""

    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.dilation = dilation
        self.one = nn.Conv1d(width, width, 3, dilation=dilation)
        self.two = nn.Conv1d(width, width, 3, dilation=dilation)

    def forward(self, x: Tensor) -> Tensor:
        pad = (2 * self.dilation, 0)
        y = F.relu(self.one(F.pad(x, pad)))
        return F.relu(x + F.relu(self.two(F.pad(y, pad))))


class Perceiver(nn.Module):
    """Latents that attend to the input, with the same block each time."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(8, width))
        self.cross, self.norm = Attention(width), nn.LayerNorm(width)
        self.latent = nn.Sequential(Block(width), Block(width))

    def forward(self, x: Tensor) -> Tensor:
        found = self.latents.expand(len(x), -1, -1)
        for _ in range(3):
            found = self.latent(found + self.cross(self.norm(found), x))
        return found


def _torch_encoder() -> tuple[nn.Module, Any]:
    layer = nn.TransformerEncoderLayer(32, 4, 128, batch_first=True)
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), (random(2, 32, 32),)


def _mixer() -> tuple[nn.Module, Any]:
    blocks = [
        nn.Sequential(_Swapped(nn.LayerNorm(32), mlp(16)), Residual(nn.LayerNorm(32), mlp(32)))
        for _ in range(6)
    ]
    return nn.Sequential(*blocks), (random(2, 16, 32),)


class _Swapped(nn.Module):
    """Mixes tokens, not channels."""

    def __init__(self, norm: nn.Module, inner: nn.Module) -> None:
        super().__init__()
        self.norm, self.inner = norm, inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.inner(self.norm(x).mT).mT
        return out


def _row(kind: Any, count: int, *shape: int) -> Made:
    return lambda: (nn.Sequential(*(kind() for _ in range(count))), (random(*shape),))


MODELS: dict[str, Made] = {
    "Mamba": _row(Mamba, 4, 2, 24, 16),
    "RWKV": _row(Rwkv, 6, 2, 32, 32),
    "parallel attention and MLP": _row(Parallel, 6, 2, 32, 32),
    "lists of lists (vit-pytorch)": lambda: (LucidStyle(), (random(2, 32, 32),)),
    "mixture of experts": lambda: (
        nn.Sequential(*(Residual(nn.LayerNorm(32), Experts()) for _ in range(4))),
        (random(2, 32, 32),),
    ),
    "one layer repeated": lambda: (OneLayer(), (random(2, 32, 32),)),
    "GRU cell in a loop": lambda: (Recurrent(), (random(4, 32, 16),)),
    "LSTM": lambda: (Lstm(), (random(4, 32, 32),)),
    "TCN": lambda: (
        nn.Sequential(*(TemporalConv(16, 2**n) for n in range(6))),
        (random(2, 16, 128),),
    ),
    "Perceiver": lambda: (Perceiver(), (random(2, 64, 32),)),
    "torch.nn.TransformerEncoder": _torch_encoder,
    "MLP-Mixer": _mixer,
    "deep transformer": lambda: (Tower(24, 16), (random(2, 16, 16),)),
    "MLP": lambda: (
        nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(16))),
        (random(64, 32),),
    ),
}
