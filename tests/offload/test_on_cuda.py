"""Proves on a GPU that what is offloaded leaves the allocator's count and comes back in every bit,
on the current stream and on others.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import memopt


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        blocks = [
            nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Dropout(0.1), nn.Linear(2048, 512))
            for _ in range(4)
        ]
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x).square().mean()


def gradients(net: Net, x: Tensor, way: str, directory: Path) -> tuple[list[Tensor], int]:
    """And the bytes that forward holds when the copies are done."""
    net.zero_grad(set_to_none=True)
    torch.manual_seed(5)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    if way == "none":
        loss = net(x)
    else:
        with memopt.offload(way, directory=directory if way == "disk" else None):
            loss = net(x)
    memopt.offload.stats(wait=True)
    torch.cuda.synchronize()
    torch.empty(1, device=x.device)  # what other streams have used is free at the next allocation
    held = torch.cuda.memory_allocated() - before
    loss.backward()
    return [p.grad for p in net.parameters() if p.grad is not None], held


@pytest.mark.parametrize("way", ["cpu", "disk"])
@pytest.mark.parametrize("on_side_stream", [False, True], ids=["current", "another stream"])
def test_gradients_have_the_bits_and_the_memory_is_free(
    way: str, on_side_stream: bool, cuda: torch.device, tmp_path: Path
) -> None:
    net = Net().to(cuda)
    x = torch.randn(512, 512, device=cuda)
    expected, held = gradients(net, x, "none", tmp_path)
    stream = torch.cuda.Stream() if on_side_stream else torch.cuda.current_stream()
    with torch.cuda.stream(stream):
        gradients(net, x, "none", tmp_path)  # cuBLAS takes its workspace for the stream
    for _ in range(3):
        memopt.offload.stats(reset=True, wait=True)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found, held_now = gradients(net, x, way, tmp_path)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        assert all(map(torch.equal, found, expected))
        out = memopt.offload.stats(wait=True).bytes_out
        assert out > held // 2
        assert held - held_now >= 0.9 * out
    memopt.offload.empty_cache()


def test_regions_with_offloaded_inputs(cuda: torch.device, tmp_path: Path) -> None:
    net = Net().to(cuda)
    x = torch.randn(512, 512, device=cuda)
    expected, _ = gradients(net, x, "none", tmp_path)
    memopt.apply_activation_checkpointing(net, offload="cpu")
    for _ in range(3):
        found, _ = gradients(net, x, "none", tmp_path)
        assert all(map(torch.equal, found, expected))
    memopt.offload.empty_cache()
