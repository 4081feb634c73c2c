"""U-Nets, detection and segmentation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.region_models.parts import Attention, Block, Made, batch_norm, conv, mlp, random
from benchmarks.region_models.vision import BasicBlock, image, layer


class DoubleConv(nn.Module):
    def __init__(self, dims: int, before: int, width: int) -> None:
        super().__init__()
        self.double_conv = nn.Sequential(
            conv(dims, before, width, 3, padding=1),
            batch_norm(dims, width),
            nn.ReLU(inplace=True),
            conv(dims, width, width, 3, padding=1),
            batch_norm(dims, width),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.double_conv(x)
        return out


class UNet(nn.Module):
    """Skips from the way down to the way up, whose layers are attributes of their own."""

    def __init__(self, dims: int, width: int = 8) -> None:
        super().__init__()
        self.dims = dims
        self.inc = DoubleConv(dims, 1, width)
        self.down1 = DoubleConv(dims, width, 2 * width)
        self.down2 = DoubleConv(dims, 2 * width, 4 * width)
        self.up1 = DoubleConv(dims, 6 * width, 2 * width)
        self.up2 = DoubleConv(dims, 3 * width, width)
        self.outc = conv(dims, width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        one = self.inc(x)
        two = self.down1(self._pool(one))
        x = self.down2(self._pool(two))
        x = self.up1(torch.cat([F.interpolate(x, two.shape[2:]), two], 1))
        x = self.up2(torch.cat([F.interpolate(x, one.shape[2:]), one], 1))
        out: Tensor = self.outc(x)
        return out

    def _pool(self, x: Tensor) -> Tensor:
        return (F.max_pool1d, F.max_pool2d, F.max_pool3d)[self.dims - 1](x, 2)


class Skips(nn.Module):
    """MONAI's: each level holds the one below between its own way down and up."""

    def __init__(self, down: nn.Module, below: nn.Module, up: nn.Module) -> None:
        super().__init__()
        self.model = nn.Sequential(down, _Beside(below), up)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.model(x)
        return out


class _Beside(nn.Module):
    def __init__(self, submodule: nn.Module) -> None:
        super().__init__()
        self.submodule = submodule

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.submodule(x)], 1)


def nested_unet() -> nn.Module:
    def level(before: int, width: int, below: nn.Module, inner: int) -> nn.Module:
        up = nn.Sequential(nn.Upsample(scale_factor=2), DoubleConv(2, inner, before))
        return Skips(DoubleDown(before, width), below, up)

    bottom = DoubleConv(2, 32, 32)
    return nn.Sequential(level(8, 16, level(16, 32, bottom, 64), 32), nn.Conv2d(8, 1, 1))


class DoubleDown(nn.Sequential):
    def __init__(self, before: int, width: int) -> None:
        super().__init__(nn.Conv2d(before, width, 3, 2, 1), DoubleConv(2, width, width))


class Detr(nn.Module):
    """A backbone, an encoder, and a decoder whose every output gets the same heads."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.backbone = nn.Sequential(layer(3, 16, 3, 2), BasicBlock(16, 32, 2), BasicBlock(32, 32))
        self.encoder = nn.ModuleList(Block(width) for _ in range(3))
        self.query = nn.Embedding(10, width)
        self.decoder = nn.ModuleList(_Cross(width) for _ in range(3))
        self.class_embed, self.bbox_embed = nn.Linear(width, 5), mlp(width, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        memory = self.backbone(x).flatten(2).mT
        for block in self.encoder:
            memory = block(memory)
        found = self.query.weight.expand(len(x), -1, -1)
        outputs = []
        for block in self.decoder:
            found = block(found, memory)
            outputs.append(found)
        stacked = torch.stack(outputs)
        return {"logits": self.class_embed(stacked), "boxes": self.bbox_embed(stacked).sigmoid()}


class _Cross(nn.Module):
    """Attention to itself and to another sequence."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.own, self.cross, self.mlp = Attention(width), Attention(width), mlp(width)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = self.norms[0](x + self.own(x))
        x = self.norms[1](x + self.cross(x, memory))
        out: Tensor = self.norms[2](x + self.mlp(x))
        return out


class SamDecoder(nn.Module):
    """Tokens and image attend to each other; an MLP for each mask token."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(3, width, 8, 8), nn.Flatten(2))
        self.tokens = nn.Embedding(4, width)
        self.layers = nn.ModuleList(nn.ModuleList([_Cross(width), _Cross(width)]) for _ in range(2))
        self.upscale = nn.Sequential(
            nn.ConvTranspose2d(width, 16, 2, 2),
            nn.GELU(),
            nn.ConvTranspose2d(16, 8, 2, 2),
            nn.GELU(),
        )
        self.hyper = nn.ModuleList(nn.Sequential(mlp(width), nn.Linear(width, 8)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        keys = self.image(x).mT
        tokens = self.tokens.weight.expand(len(x), -1, -1)
        for to_image, to_tokens in self.layers:  # type: ignore[misc]
            tokens = to_image(tokens, keys)
            keys = to_tokens(keys, tokens)
        side = int(keys.shape[1] ** 0.5)
        pixels = self.upscale(keys.mT.unflatten(-1, (side, side)))
        weights = torch.stack([each(tokens[:, n]) for n, each in enumerate(self.hyper)], 1)
        return torch.einsum("bmc,bchw->bmhw", weights, pixels)


class Unetr(nn.Module):
    """A transformer encoder whose hidden states feed a convolutional decoder (MONAI)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patch = nn.Conv3d(1, width, 4, 4)
        self.vit = nn.ModuleList(Block(width) for _ in range(4))
        self.encoder1 = DoubleConv(3, 1, 8)
        self.encoder2 = nn.ConvTranspose3d(width, 8, 2, 2)
        self.decoder2 = nn.Sequential(nn.ConvTranspose3d(width, 8, 2, 2))
        self.merge2, self.merge1 = DoubleConv(3, 16, 8), DoubleConv(3, 16, 8)
        self.up, self.out = nn.ConvTranspose3d(8, 8, 2, 2), nn.Conv3d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.patch(x)
        grid, tokens, hidden = y.shape[2:], y.flatten(2).mT, []
        for block in self.vit:
            tokens = block(tokens)
            hidden.append(tokens.mT.unflatten(-1, grid))
        y = torch.cat([self.decoder2(hidden[3]), self.encoder2(hidden[1])], 1)
        y = torch.cat([self.up(self.merge2(y)), self.encoder1(x)], 1)
        out: Tensor = self.out(self.merge1(y))
        return out


class Fpn(nn.Module):
    """Features of several levels, and heads that all levels share (RetinaNet)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            [layer(3, 16, 3, 2), BasicBlock(16, 32, 2), BasicBlock(32, 64, 2)]
        )
        self.lateral = nn.ModuleList(nn.Conv2d(w, width, 1) for w in (16, 32, 64))
        self.head = nn.Sequential(*(layer(width, width) for _ in range(4)), nn.Conv2d(width, 9, 3))

    def forward(self, x: Tensor) -> list[Tensor]:
        features = []
        for stage, lateral in zip(self.stages, self.lateral, strict=True):
            x = stage(x)
            features.append(lateral(x))
        for number in (1, 0):
            above = F.interpolate(features[number + 1], features[number].shape[2:])
            features[number] = features[number] + above
        return [self.head(each) for each in features]


MODELS: dict[str, Made] = {
    "U-Net, 1 dimension": lambda: (UNet(1), (random(4, 1, 256),)),
    "U-Net, 2 dimensions": lambda: (UNet(2), (random(2, 1, 32, 32),)),
    "U-Net, 3 dimensions": lambda: (UNet(3), (random(1, 1, 16, 16, 16),)),
    "U-Net of nested levels (MONAI)": lambda: (nested_unet(), (random(2, 8, 32, 32),)),
    "UNETR": lambda: (Unetr(), (random(1, 1, 16, 16, 16),)),
    "DETR": lambda: (Detr(), image()),
    "SAM's mask decoder": lambda: (SamDecoder(), image(64)),
    "RetinaNet": lambda: (Fpn(), image(64)),
}
