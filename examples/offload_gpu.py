"""Offloading to host memory: activations leave the GPU in forward and come back in backward.

python examples/offload_gpu.py

A copy engine moves them beside the computation, through pinned memory. Without a GPU they wait in
a file instead, so that memory falls on a CPU too.
"""

import tempfile
from pathlib import Path

import torch
from torch import nn

import memopt
from memopt.memory.allocator import LiveBytes


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


def step(model: nn.Module, x: torch.Tensor, place: str | Path | None) -> tuple[float, float]:
    """The loss, and the peak in MB beyond what was there before."""
    model.zero_grad()
    on_gpu = x.device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    with LiveBytes() as live:
        if place is None:
            loss = model(x).square().mean()
        else:
            with memopt.offload(place):  # forward alone: backward fetches by itself
                loss = model(x).square().mean()
        loss.backward()
    peak = torch.cuda.max_memory_allocated() - before if on_gpu else live.most
    return loss.item(), peak / 1e6


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    scratch = tempfile.TemporaryDirectory()
    place = "cpu" if device == "cuda" else Path(scratch.name)
    model = nn.Sequential(*(Block(256) for _ in range(8))).to(device)
    x = torch.randn(1024, 256, device=device)
    for name, where in (("kept", None), ("offloaded", place)):
        loss, peak = step(model, x, where)
        print(f"{name}: loss {loss:.6f}, peak {peak:.1f} MB")
    print(memopt.offload.stats())

    # Regions keep their inputs alone, and these may wait elsewhere too: the least memory of all.
    memopt.apply_activation_checkpointing(model, offload=place)
    loss, peak = step(model, x, None)
    print(f"regions, their inputs offloaded: loss {loss:.6f}, peak {peak:.1f} MB")
    scratch.cleanup()


if __name__ == "__main__":
    main()
