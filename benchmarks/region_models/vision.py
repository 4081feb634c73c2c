"""Convolutional networks, U-Nets, detection and segmentation."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.region_models.parts import (
    Block,
    Made,
    Residual,
    Tower,
    random,
)


def layer(before: int, width: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> nn.Module:
    """A convolution, batch norm and an activation in place."""
    convolution = nn.Conv2d(before, width, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(width), nn.ReLU(inplace=True))


class Inception(nn.Module):
    """Branches side by side."""

    def __init__(self, width: int) -> None:
        super().__init__()
        part = width // 4
        self.branch1 = layer(width, part, 1)
        self.branch2 = nn.Sequential(layer(width, part, 1), layer(part, part))
        self.branch3 = nn.Sequential(layer(width, part, 1), layer(part, part, 5))
        self.branch4 = nn.Sequential(nn.MaxPool2d(3, 1, 1), layer(width, part, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.branch1(x), self.branch2(x), self.branch3(x), self.branch4(x)], 1)


class GoogLeNet(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.stem = layer(3, width, 3, 2)
        self.mixed_3a, self.mixed_3b = Inception(width), Inception(width)
        self.mixed_4a, self.mixed_4b = Inception(width), Inception(width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mixed_3b(self.mixed_3a(self.stem(x)))
        x = self.mixed_4b(self.mixed_4a(F.max_pool2d(x, 2)))
        out: Tensor = self.head(x.mean((2, 3)))
        return out


class BasicBlock(nn.Module):
    def __init__(self, before: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.short = (
            nn.Identity() if before == width else nn.Conv2d(before, width, 1, stride, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.short(x))


class Tree(nn.Module):
    """DLA's: a tree of blocks whose root joins their outputs."""

    def __init__(self, levels: int, before: int, width: int, stride: int = 1) -> None:
        super().__init__()
        if levels == 1:
            self.tree1: nn.Module = BasicBlock(before, width, stride)
            self.tree2: nn.Module = BasicBlock(width, width)
        else:
            self.tree1 = Tree(levels - 1, before, width, stride)
            self.tree2 = Tree(levels - 1, width, width)
        self.root = layer(2 * width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        one = self.tree1(x)
        out: Tensor = self.root(torch.cat([one, self.tree2(one)], 1))
        return out


class Dla(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base_layer = layer(3, 8, 7)
        self.level2, self.level3 = Tree(1, 8, 16, 2), Tree(2, 16, 32, 2)
        self.level4 = Tree(1, 32, 64, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.level4(self.level3(self.level2(self.base_layer(x))))
        return out


class MobileVit(nn.Module):
    """Convolutions, and transformer blocks over patches between them."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.local = nn.Sequential(layer(width, width), nn.Conv2d(width, width, 1))
        self.transformer = nn.Sequential(*(Block(width) for _ in range(2)))
        self.fusion = layer(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.local(x)
        found = self.transformer(y.flatten(2).mT).mT.reshape(y.shape)
        out: Tensor = self.fusion(torch.cat([x, found], 1))
        return out


class InvertedResidual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        inner = 4 * width
        self.conv = nn.Sequential(
            layer(width, inner, 1), layer(inner, inner, 3, 1, inner), nn.Conv2d(inner, width, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x)


class RepVit(nn.Module):
    """A depthwise convolution of several kernels, and an MLP of 1 x 1 convolutions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.narrow = nn.Conv2d(width, width, 1, groups=width)
        self.bn = nn.BatchNorm2d(width)
        self.channel = Residual(
            nn.Conv2d(width, 2 * width, 1), nn.GELU(), nn.Conv2d(2 * width, width, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.channel(self.bn(self.wide(x) + self.narrow(x) + x))
        return out


class Star(nn.Module):
    """StarNet's: a product of two branches."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dwconv = nn.Sequential(
            nn.Conv2d(width, width, 7, padding=3, groups=width), nn.BatchNorm2d(width)
        )
        self.f1, self.f2 = nn.Conv2d(width, 3 * width, 1), nn.Conv2d(width, 3 * width, 1)
        self.g = nn.Conv2d(3 * width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.dwconv(x)
        return x + self.g(F.relu6(self.f1(y)) * self.f2(y))


def stages(first: nn.Module, second: nn.Module, third: nn.Module, fourth: nn.Module) -> nn.Module:
    """A stem, and stages of mixed blocks with layers between that halve the image."""
    return nn.Sequential(
        nn.Sequential(layer(3, 8, 3, 2), layer(8, 16)),
        nn.Sequential(first, second),
        layer(16, 16, 3, 2),
        nn.Sequential(third, fourth),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )


class DenseLayer(nn.Module):
    """DenseNet's: what it makes stands beside all that was made before."""

    def __init__(self, before: int, growth: int = 8) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(before), nn.Conv2d(before, growth, 3, padding=1)

    def forward(self, features: list[Tensor]) -> Tensor:
        out: Tensor = self.conv(F.relu(self.norm(torch.cat(features, 1))))
        return out


class DenseBlock(nn.Module):
    def __init__(self, before: int, layers: int = 4) -> None:
        super().__init__()
        for number in range(layers):
            self.add_module(f"denselayer{number + 1}", DenseLayer(before + 8 * number))

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for each in self.children():
            features.append(each(features))
        return torch.cat(features, 1)


def image(size: int = 32) -> Any:
    return (random(2, 3, size, size),)


MODELS: dict[str, Made] = {
    "Inception": lambda: (GoogLeNet(), image()),
    "DLA": lambda: (Dla(), image()),
    "DenseNet": lambda: (
        nn.Sequential(layer(3, 16, 3, 2), DenseBlock(16), layer(48, 16, 1), DenseBlock(16)),
        image(),
    ),
    "VGG": lambda: (
        nn.Sequential(
            layer(3, 16), layer(16, 16), nn.MaxPool2d(2), layer(16, 32), layer(32, 32),
            nn.MaxPool2d(2), layer(32, 64), layer(64, 64), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(64, 10),
        ),
        image(),
    ),
    "ResNet by attributes": lambda: (
        nn.Sequential(
            layer(3, 16, 7, 2), BasicBlock(16, 16), BasicBlock(16, 32, 2), BasicBlock(32, 32),
            BasicBlock(32, 64, 2), BasicBlock(64, 64),
        ),
        image(),
    ),
    "MobileViT stages": lambda: (
        stages(InvertedResidual(16), InvertedResidual(16), MobileVit(), InvertedResidual(16)),
        image(),
    ),
    "RepViT stages": lambda: (stages(RepVit(16), RepVit(16), RepVit(16), RepVit(16)), image()),
    "StarNet stages": lambda: (stages(Star(16), Star(16), Star(16), Star(16)), image()),
    "ViT over patches": lambda: (
        nn.Sequential(nn.Conv2d(3, 32, 4, 4), nn.Flatten(2), Transposed(), Tower(8)),
        image(),
    ),
}  # fmt: skip


class Transposed(nn.Module):
    """Channels last."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mT
