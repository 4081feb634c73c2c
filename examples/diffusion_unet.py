"""A diffusion U-Net: blocks of unequal sizes, for each of which a plan finds a fate.

python examples/diffusion_unet.py
"""

import torch
from step_cost import compared, step_cost
from torch import Tensor, nn

import memopt


class Block(nn.Module):
    """GroupNorm, SiLU and convolution, twice, with the time's embedding between."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, channels), nn.GroupNorm(4, out)
        self.conv1, self.conv2 = (nn.Conv2d(c, out, 3, padding=1) for c in (channels, out))
        self.time, self.skip = nn.Linear(32, out), nn.Conv2d(channels, out, 1)
        self.act = nn.SiLU()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.conv1(self.act(self.norm1(x))) + self.time(self.act(time))[..., None, None]
        return self.skip(x) + self.conv2(self.act(self.norm2(y)))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, 32), nn.SiLU(), nn.Linear(32, 32))
        self.first, self.last = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 3, 3, padding=1)
        self.down = nn.ModuleList([Block(16, 16), Block(16, 32), Block(32, 64)])
        self.up = nn.ModuleList([Block(64, 32), Block(64, 16), Block(32, 16)])

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        time, x, skips = self.time(t), self.first(x), []
        for block in self.down:
            x = block(x, time)
            skips.append(x)
            x = nn.functional.avg_pool2d(x, 2)
        for block, skip in zip(self.up, reversed(skips), strict=True):
            x = block(x, time)
            x = nn.functional.interpolate(x, scale_factor=2.0)
            x = torch.cat([x, skip[:, : x.shape[1]]], 1) if block is not self.up[-1] else x
        return self.last(x)


class Denoising(nn.Module):
    """The model with its loss, as a step calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.unet = UNet()

    def forward(self, images: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        mixed = images * (1 - t)[..., None, None] + noise * t[..., None, None]
        return nn.functional.mse_loss(self.unet(mixed, t), noise)


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Denoising().to(device)
    images, noise = torch.randn(2, 8, 3, 32, 32, device=device)
    batch = {"images": images, "noise": noise, "t": torch.rand(8, 1, device=device)}
    optimizer = torch.optim.AdamW(model.parameters())

    before = step_cost(model, lambda: model(**batch).backward())
    everything = memopt.plan(model, batch, optimizer=optimizer, blocks=Block)
    budget = int(0.7 * everything.plain_peak)
    plan = memopt.plan(model, batch, budget, optimizer=optimizer, blocks=Block)
    print(plan)
    plan.apply()
    print(compared(before, step_cost(model, lambda: model(**batch).backward())))
    for step in range(5):
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
