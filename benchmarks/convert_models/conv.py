"""Convolutional networks as papers and libraries write them, small, and what each keeps for
backward before convert and after, tensor by tensor.

    model, x = CONV_MODELS["ResNet"].make()
    CONV_MODELS["ResNet"].kept()

A convolution saves its input, a batch or group norm its input and statistics, an activation what it
overwrites or its result, a product both factors. What convert takes away is the result of a norm,
of an activation, their sum or product with another tensor, and what is pooled, interpolated or
joined of these, which the next convolution reads: they are made again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.convert_models.conv_terms import (
    BLOCKS,
    EDGE,
    IMAGES,
    PIXELS,
    Kept,
    always,
    batch_norm,
    result,
)
from benchmarks.convert_models.joined import detector, detector_keeps, inception, inception_keeps


class Bottleneck(nn.Module):
    """He et al., arXiv:1512.03385, as torchvision writes it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(4 * width, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x
        return self.relu(out)  # type: ignore[no-any-return]


def resnet() -> tuple[nn.Module, int]:
    return nn.Sequential(*(Bottleneck(4) for _ in range(BLOCKS))), 16


def resnet_keeps() -> Iterable[Kept]:
    yield always("input of the first block", PIXELS * 16)
    yield from batch_norm(4, 2 * BLOCKS)
    yield from batch_norm(16, BLOCKS)
    yield result("result of relu_ behind a norm", PIXELS * 4, 2 * BLOCKS)
    yield result("result of a block's relu_", PIXELS * 16, BLOCKS)


class SqueezeExcite(nn.Module):
    """Hu et al., arXiv:1709.01507."""

    def __init__(self, channels: int, squeezed: int, act: nn.Module, gate: nn.Module) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(channels, squeezed, 1), nn.Conv2d(squeezed, channels, 1)
        self.act, self.gate = act, gate

    def forward(self, x: Tensor) -> Tensor:
        scale = self.up(self.act(self.down(x.mean((2, 3), keepdim=True))))
        return x * self.gate(scale)  # type: ignore[no-any-return]


class InvertedResidual(nn.Module):
    """The block of MobileNetV3, arXiv:1905.02244, and EfficientNet, arXiv:1905.11946."""

    def __init__(
        self, channels: int, expanded: int, act: Callable[[], nn.Module], se: nn.Module
    ) -> None:
        super().__init__()
        self.expand = nn.Conv2d(channels, expanded, 1, bias=False)
        self.bn1, self.act1 = nn.BatchNorm2d(expanded), act()
        self.depthwise = nn.Conv2d(expanded, expanded, 3, padding=1, groups=expanded, bias=False)
        self.bn2, self.act2, self.se = nn.BatchNorm2d(expanded), act(), se
        self.project = nn.Conv2d(expanded, channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        h = self.act1(self.bn1(self.expand(x)))
        h = self.se(self.act2(self.bn2(self.depthwise(h))))
        return x + self.bn3(self.project(h))  # type: ignore[no-any-return]


def efficientnet() -> tuple[nn.Module, int]:
    def block() -> nn.Module:
        se = SqueezeExcite(24, 3, nn.SiLU(inplace=True), nn.Sigmoid())
        return InvertedResidual(8, 24, lambda: nn.SiLU(inplace=True), se)

    return nn.Sequential(*(block() for _ in range(BLOCKS))), 8


def mobilenet() -> tuple[nn.Module, int]:
    def block() -> nn.Module:
        se = SqueezeExcite(24, 3, nn.ReLU(inplace=True), nn.Hardsigmoid(inplace=True))
        return InvertedResidual(8, 24, lambda: nn.Hardswish(inplace=True), se)

    return nn.Sequential(*(block() for _ in range(BLOCKS))), 8


def inverted_residuals_keep() -> Iterable[Kept]:
    yield always("input of the first block", PIXELS * 8)
    yield result("input of a block, the sum of the one before", PIXELS * 8, BLOCKS - 1)
    yield from batch_norm(24, 2 * BLOCKS)
    yield from batch_norm(8, BLOCKS)
    yield result("what an activation overwrites", PIXELS * 24, 2 * BLOCKS)
    yield result("its result", PIXELS * 24, 2 * BLOCKS)
    yield result("the product with the gate", PIXELS * 24, BLOCKS)
    yield always("the mean of a channel", IMAGES * 24, BLOCKS)


def efficientnet_keeps() -> Iterable[Kept]:
    yield from inverted_residuals_keep()
    yield always("what the squeezed silu_ overwrites", IMAGES * 3, BLOCKS)
    yield result("its result", IMAGES * 3, BLOCKS)
    yield always("the gate", IMAGES * 24, BLOCKS)


def mobilenet_keeps() -> Iterable[Kept]:
    yield from inverted_residuals_keep()
    yield always("result of the squeezed relu_", IMAGES * 3, BLOCKS)
    yield always("what hardsigmoid_ overwrites", IMAGES * 24, BLOCKS)
    yield result("the gate", IMAGES * 24, BLOCKS)


class LayerNorm2d(nn.Module):
    """ConvNeXt's own, and Segment Anything's: over channels, by a formula."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        u = x.mean(1, keepdim=True)
        s = (x - u).pow(2).mean(1, keepdim=True)
        x = (x - u) / torch.sqrt(s + self.eps)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class ConvNeXtBlock(nn.Module):
    """Liu et al., arXiv:2201.03545."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.pwconv1, self.act = nn.Linear(channels, 4 * channels), nn.GELU()
        self.pwconv2 = nn.Linear(4 * channels, channels)
        self.gamma = nn.Parameter(torch.full((channels,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.dwconv(x).permute(0, 2, 3, 1))
        h = self.gamma * self.pwconv2(self.act(self.pwconv1(h)))
        return x + h.permute(0, 3, 1, 2)  # type: ignore[no-any-return]


def convnext() -> tuple[nn.Module, int]:
    blocks = (ConvNeXtBlock(8) for _ in range(BLOCKS))
    stem = nn.Conv2d(8, 8, 1), LayerNorm2d(8), nn.Conv2d(8, 8, 1)
    return nn.Sequential(*stem, *blocks), 8


def convnext_keeps() -> Iterable[Kept]:
    of_pixels, width = PIXELS, PIXELS * 8
    yield always("input of the first convolution", width)
    yield Kept("LayerNorm2d's x - u, twice, and their quotient", width, 3, 0)
    yield Kept("LayerNorm2d's root", of_pixels, 1, 0)
    yield Kept("LayerNorm2d's input", width, 0, 1)
    yield Kept("LayerNorm2d's statistics", of_pixels, 0, 2)
    yield result("LayerNorm2d's result, which the next convolution reads", width)
    yield always("input of the first block", width)
    yield result("input of the next, the sum of that and of what gamma scales", width, BLOCKS - 1)
    yield always("input of its norm", width, BLOCKS)
    yield always("statistics of its norm", of_pixels, 2 * BLOCKS)
    yield result("result of its norm", width, BLOCKS)
    yield always("input of gelu", 4 * width, BLOCKS)
    yield result("result of gelu", 4 * width, BLOCKS)
    yield always("what gamma scales", width, BLOCKS)


class ResidualBlock(nn.Module):
    """The residual block of DDPM's U-Net, Ho et al., arXiv:2006.11239."""

    def __init__(self, channels: int, out: int, embedding: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, channels), nn.Conv2d(channels, out, 3, padding=1)
        self.embed = nn.Linear(embedding, out)
        self.norm2, self.conv2 = nn.GroupNorm(4, out), nn.Conv2d(out, out, 3, padding=1)
        self.skip = nn.Conv2d(channels, out, 1) if channels != out else nn.Identity()

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x))) + self.embed(t)[:, :, None, None]
        h = self.conv2(F.silu(self.norm2(h)))
        return self.skip(x) + h  # type: ignore[no-any-return]


class UNet(nn.Module):
    """Two scales: down, in the middle, up, with the first scale's result beside."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(IMAGES, 5))
        self.down = ResidualBlock(channels, channels, 5)
        self.shrink = nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1)
        self.middle = ResidualBlock(2 * channels, 2 * channels, 5)
        self.up = ResidualBlock(3 * channels, channels, 5)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down(x, self.embedding)
        middle = self.middle(self.shrink(first), self.embedding)
        wide = F.interpolate(middle, scale_factor=2.0)
        return self.up(torch.cat((wide, first), 1), self.embedding)  # type: ignore[no-any-return]


def unet() -> tuple[nn.Module, int]:
    return UNet(8), 8


def residual_block_keeps(channels: int, out: int, pixels: int) -> Iterable[Kept]:
    yield always("mean and rstd of a group norm", IMAGES * 4, 4)
    yield always("input of a block", pixels * channels)
    yield result("input of the first silu", pixels * channels)
    yield result("its result", pixels * channels)
    yield always("input of the second group norm", pixels * out)
    yield result("input of the second silu", pixels * out)
    yield result("its result", pixels * out)


def unet_keeps() -> Iterable[Kept]:
    yield from residual_block_keeps(8, 8, PIXELS)
    yield always("input of the convolution that shrinks", PIXELS * 8)
    yield from residual_block_keeps(16, 16, PIXELS // 4)
    yield from residual_block_keeps(24, 8, PIXELS)


@dataclass(frozen=True)
class ConvModel:
    """How a model is made, and what it keeps."""

    build: Callable[[], tuple[nn.Module, int]]
    """The model, and the channels of its input."""
    keeps: Callable[[], Iterable[Kept]]

    def make(self) -> tuple[nn.Module, Tensor]:
        """The model in training mode, and its input."""
        torch.manual_seed(0)
        model, channels = self.build()
        return model.train(), torch.randn(IMAGES, channels, EDGE, EDGE)

    def kept(self, when: str) -> Counter[int]:
        """How many tensors of how many bytes: "before" convert or "after"."""
        found: Counter[int] = Counter()
        for kept in self.keeps():
            found[4 * kept.numbers] += getattr(kept, when)
        return +found


CONV_MODELS: dict[str, ConvModel] = {
    "ResNet": ConvModel(resnet, resnet_keeps),
    "EfficientNet": ConvModel(efficientnet, efficientnet_keeps),
    "MobileNetV3": ConvModel(mobilenet, mobilenet_keeps),
    "ConvNeXt": ConvModel(convnext, convnext_keeps),
    "DDPM's U-Net": ConvModel(unet, unet_keeps),
    "YOLO": ConvModel(detector, detector_keeps),
    "Inception": ConvModel(inception, inception_keeps),
}
