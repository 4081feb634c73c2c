"""Offloading to host memory: activations leave the GPU in forward and come back in backward.

python examples/offload_gpu.py

A copy engine moves them beside the computation, through pinned memory. Without a GPU they wait in
a file instead, so that memory falls on a CPU too.
"""

import tempfile
from pathlib import Path

import torch
from step_cost import compared, step_cost
from torch import nn

import memopt


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


def loss_of(model: nn.Module, x: torch.Tensor, place: str | Path | None = None) -> torch.Tensor:
    if place is None:
        return model(x).square().mean()
    with memopt.offload(place):  # forward alone: backward fetches by itself
        return model(x).square().mean()


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    scratch = tempfile.TemporaryDirectory()
    place = "cpu" if device == "cuda" else Path(scratch.name)
    model = nn.Sequential(*(Block(256) for _ in range(8))).to(device)
    x = torch.randn(1024, 256, device=device)
    plain = step_cost(model, lambda: loss_of(model, x).backward())
    offloaded = step_cost(model, lambda: loss_of(model, x, place).backward())
    print(f"offloaded: {compared(plain, offloaded)}")
    print(memopt.offload.stats())
    assert torch.equal(loss_of(model, x), loss_of(model, x, place))

    # Regions keep their inputs alone, and these may wait elsewhere too: the least memory of all.
    memopt.apply_activation_checkpointing(model, offload=place)
    regions = step_cost(model, lambda: loss_of(model, x).backward())
    print(f"regions, their inputs offloaded: {compared(plain, regions)}")
    scratch.cleanup()


if __name__ == "__main__":
    main()
