"""Networks that pool, interpolate and join what their convolutions read: a detector, Inception."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.convert_models.conv_terms import BLOCKS, PIXELS, Kept, always, batch_norm, result


class ConvNormAct(nn.Module):
    """The convolution of detectors and of Inception: a norm and an activation are behind it."""

    def __init__(self, channels: int, out: int, edge: int, act: nn.Module, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, out, edge, stride, padding=edge // 2, bias=False)
        self.bn, self.act = nn.BatchNorm2d(out), act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(x)))  # type: ignore[no-any-return]


class CrossStage(nn.Module):
    """YOLOv8's C2f: halves of a result, one of them through a bottleneck, all joined."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        half, act = channels // 2, nn.SiLU(inplace=True)
        self.first = ConvNormAct(channels, channels, 1, act)
        self.bottleneck = nn.Sequential(
            ConvNormAct(half, half, 3, act), ConvNormAct(half, half, 3, act)
        )
        self.last = ConvNormAct(3 * half, channels, 1, act)

    def forward(self, x: Tensor) -> Tensor:
        halves = list(self.first(x).chunk(2, 1))
        halves.append(halves[-1] + self.bottleneck(halves[-1]))
        return self.last(torch.cat(halves, 1))  # type: ignore[no-any-return]


class PyramidPooling(nn.Module):
    """YOLOv5's SPPF: poolings of poolings, all joined."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = ConvNormAct(channels, channels // 2, 1, nn.SiLU(inplace=True))
        self.pool = nn.MaxPool2d(5, 1, 2)
        self.last = ConvNormAct(2 * channels, channels, 1, nn.SiLU(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        pooled = [self.first(x)]
        for _ in range(3):
            pooled.append(self.pool(pooled[-1]))
        return self.last(torch.cat(pooled, 1))  # type: ignore[no-any-return]


class Detector(nn.Module):
    """Two scales of YOLOv8: down, pooled, up and joined with the first."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = CrossStage(channels)
        self.shrink = ConvNormAct(channels, 2 * channels, 3, nn.SiLU(inplace=True), stride=2)
        self.pyramid = PyramidPooling(2 * channels)
        self.last = ConvNormAct(3 * channels, channels, 1, nn.SiLU(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        wide = F.interpolate(self.pyramid(self.shrink(first)), scale_factor=2.0)
        return self.last(torch.cat((wide, first), 1))  # type: ignore[no-any-return]


def detector() -> tuple[nn.Module, int]:
    return Detector(8), 8


def detector_keeps() -> Iterable[Kept]:
    quarter, overwritten = PIXELS // 4, "what silu_ overwrites"
    yield always("input of the first block", PIXELS * 8)
    yield from batch_norm(8, 3)
    yield result(overwritten, PIXELS * 8, 3)
    yield from batch_norm(4, 2)
    yield result(overwritten, PIXELS * 4, 2)
    yield result("the halves, which the bottleneck reads", PIXELS * 8)
    yield result("what its second convolution reads", PIXELS * 4)
    yield result("the halves and the bottleneck's result, joined", PIXELS * 12)
    yield result("the first block's result", PIXELS * 8)
    yield from batch_norm(16, 2, quarter)
    yield result(overwritten, quarter * 16, 2)
    yield result("what the pyramid reads", quarter * 16)
    yield from batch_norm(8, 1, quarter)
    yield result(overwritten, quarter * 8)
    yield result("what is pooled", quarter * 8, 3)
    yield always("indices of a pooling, of 8 bytes", 2 * quarter * 8, 3)
    yield result("the pyramid, joined", quarter * 32)
    yield result("both scales, joined", PIXELS * 24)


class InceptionBlock(nn.Module):
    """Szegedy et al., arXiv:1512.00567, as torchvision writes it: four branches, joined."""

    def __init__(self, channels: int) -> None:
        super().__init__()

        def unit(channels: int, out: int, edge: int) -> nn.Module:
            return ConvNormAct(channels, out, edge, nn.ReLU(inplace=True))

        self.one = unit(channels, 4, 1)
        self.three = nn.Sequential(unit(channels, 2, 1), unit(2, 4, 3))
        self.five = nn.Sequential(unit(channels, 2, 1), unit(2, 4, 5))
        self.pooled = nn.Sequential(nn.AvgPool2d(3, 1, 1), unit(channels, 4, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pooled(x)], 1)


def inception() -> tuple[nn.Module, int]:
    return nn.Sequential(*(InceptionBlock(16) for _ in range(BLOCKS))), 16


def inception_keeps() -> Iterable[Kept]:
    yield always("input of the first block", PIXELS * 16)
    yield always("the same, pooled", PIXELS * 16)
    yield from batch_norm(4, 4 * BLOCKS)
    yield from batch_norm(2, 2 * BLOCKS)
    yield result("result of relu_ that is joined", PIXELS * 4, 4 * BLOCKS)
    yield result("result of relu_ that a convolution reads", PIXELS * 2, 2 * BLOCKS)
    yield result("input of a block, what the one before has joined", PIXELS * 16, BLOCKS - 1)
    yield always("the same, pooled: windows overlap", PIXELS * 16, BLOCKS - 1)
