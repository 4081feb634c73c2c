"""Vocoders and speech models."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.region_models.parts import Attention, Made, Residual, mlp, random


def weight_norm(layer: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(layer)


class ResBlock(nn.Module):
    """HiFi-GAN's: pairs of dilated convolutions, each with a sum around it."""

    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()

        def layer(dilation: int) -> nn.Module:
            padding = dilation * (kernel - 1) // 2
            return weight_norm(nn.Conv1d(width, width, kernel, 1, padding, dilation))

        self.convs1 = nn.ModuleList(layer(dilation) for dilation in (1, 3, 5))
        self.convs2 = nn.ModuleList(layer(1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for one, two in zip(self.convs1, self.convs2, strict=True):
            x = x + two(F.leaky_relu(one(F.leaky_relu(x, 0.1)), 0.1))
        return x


class HifiGan(nn.Module):
    """Upsampling layers, and behind each the mean of residual blocks (Kong et al., 2020)."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.pre = weight_norm(nn.Conv1d(16, width, 7, 1, 3))
        widths = [width >> number for number in range(4)]
        self.ups = nn.ModuleList(
            weight_norm(nn.ConvTranspose1d(wide, wide // 2, 4, 2, 1)) for wide in widths[:3]
        )
        self.resblocks = nn.ModuleList(
            ResBlock(wide // 2, kernel) for wide in widths[:3] for kernel in (3, 7, 11)
        )
        self.post = weight_norm(nn.Conv1d(widths[3], 1, 7, 1, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.pre(x)
        for number, up in enumerate(self.ups):
            x = up(F.leaky_relu(x, 0.1))
            x = sum(block(x) for block in self.resblocks[3 * number : 3 * number + 3]) / 3
        return torch.tanh(self.post(F.leaky_relu(x)))


class WaveNet(nn.Module):
    """VITS's: gated convolutions whose outputs are summed beside them."""

    def __init__(self, width: int, layers: int = 4) -> None:
        super().__init__()
        self.width = width
        self.in_layers = nn.ModuleList(
            weight_norm(nn.Conv1d(width, 2 * width, 5, padding=2)) for _ in range(layers)
        )
        self.res_skip = nn.ModuleList(
            weight_norm(nn.Conv1d(width, 2 * width, 1)) for _ in range(layers)
        )

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for inner, skip in zip(self.in_layers, self.res_skip, strict=True):
            gate, value = inner(x).chunk(2, 1)
            rest, kept = skip(torch.tanh(gate) * torch.sigmoid(value)).chunk(2, 1)
            x, out = (x + rest) * mask, out + kept
        return out * mask


class Coupling(nn.Module):
    """One half is shifted by what is computed of the other."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.pre, self.enc = nn.Conv1d(width // 2, width, 1), WaveNet(width)
        self.post = nn.Conv1d(width, width // 2, 1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        one, other = x.chunk(2, 1)
        return torch.cat([one, other + self.post(self.enc(self.pre(one) * mask, mask))], 1)


class Vits(nn.Module):
    """A posterior encoder, a flow and a decoder (Kim et al., 2021)."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.proj, self.enc_q = nn.Conv1d(8, width, 1), WaveNet(width)
        self.flows = nn.ModuleList(Coupling(width) for _ in range(4))
        self.out, self.dec = nn.Conv1d(width, 16, 1), HifiGan(32)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones_like(x[:, :1])
        x = self.enc_q(self.proj(x) * mask, mask)
        prior = x
        for flow in self.flows:
            prior = flow(prior, mask).flip(1)
        return self.dec(self.out(x)).square().mean() + prior.square().mean()


class Conformer(nn.Module):
    """Two halves of an MLP around attention and a convolution (Gulati et al., 2020)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.ff1, self.ff2 = mlp(width), mlp(width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(5))
        self.attn = Attention(width)
        self.pw1, self.pw2 = nn.Conv1d(width, 2 * width, 1), nn.Conv1d(width, width, 1)
        self.dw = nn.Conv1d(width, width, 7, padding=3, groups=width)
        self.bn = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.5 * self.ff1(self.norms[0](x))
        x = x + self.attn(self.norms[1](x))
        y = F.glu(self.pw1(self.norms[2](x).mT), 1)
        x = x + self.pw2(F.silu(self.bn(self.dw(y)))).mT
        x = x + 0.5 * self.ff2(self.norms[3](x))
        out: Tensor = self.norms[4](x)
        return out


class Discriminator(nn.Module):
    """A discriminator of several periods; returns the features of every layer too."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            nn.ModuleList(
                weight_norm(nn.Conv2d(before, width, (5, 1), (3, 1), (2, 0)))
                for before, width in ((1, 8), (8, 16), (16, 32))
            )
            for _ in range(3)
        )

    def forward(self, x: Tensor) -> list[Tensor]:
        features: list[Tensor] = []
        for period, layers in zip((2, 3, 5), self.parts, strict=True):
            y = x[..., : x.shape[-1] // period * period].unflatten(-1, (-1, period))
            for layer in layers:  # type: ignore[union-attr]
                y = F.leaky_relu(layer(y), 0.1)
                features.append(y)
        return features


def _wave_u_net() -> tuple[nn.Module, Any]:
    blocks = [
        Residual(
            nn.Conv1d(16, 64, 9, padding=4), nn.GroupNorm(4, 64), nn.GELU(), nn.Conv1d(64, 16, 1)
        )
        for _ in range(6)
    ]
    return nn.Sequential(nn.Conv1d(1, 16, 7, padding=3), *blocks, nn.Conv1d(16, 1, 7, padding=3)), (
        random(2, 1, 512),
    )


MODELS: dict[str, Made] = {
    "HiFi-GAN generator": lambda: (HifiGan(), (random(2, 16, 64),)),
    "HiFi-GAN discriminator": lambda: (Discriminator(), (random(2, 1, 960),)),
    "VITS": lambda: (Vits(), (random(2, 8, 64),)),
    "Conformer": lambda: (nn.Sequential(*(Conformer() for _ in range(4))), (random(2, 48, 32),)),
    "waveform residual network": _wave_u_net,
}
