"""Trains a small transformer with tensor parallelism and checkpointed blocks on two processes, with
each block's input kept whole by both and with half of it kept by each.

    python examples/tensor_parallel.py [--layers 4] [--steps 3]

Runs on two GPUs with NCCL where there are as many, else on the CPU with gloo, in seconds. Losses
and gradients are the same bits in both runs; what differs is what the blocks keep for backward.
"""

from __future__ import annotations

import argparse
import os
import socket
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from step_cost import step_cost
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import memopt
from memopt.memory.allocator import LiveBytes

RANKS = 2
BATCH, TOKENS, HIDDEN, HEADS, WORDS = 4, 64, 64, 4, 256


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        # Each rank has some of the heads.
        heads = [f(x).unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2) for f in self.qkv()]
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(2))

    def qkv(self) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
        return self.q, self.k, self.v


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attention = Attention()
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(HIDDEN, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


PLAN = {
    **{f"attention.{name}": ColwiseParallel() for name in ("q", "k", "v")},
    "attention.out": RowwiseParallel(),
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
}


class Forward:
    """Counts the bytes that a forward leaves allocated, as the allocator counts them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._live = LiveBytes()

    def __enter__(self) -> Forward:
        if self._device.type == "cpu":
            self._live.__enter__()
        else:
            self._before = torch.cuda.memory_allocated()
        return self

    def __exit__(self, *error: object) -> None:
        if self._device.type == "cpu":
            self._live.__exit__(*error)
            self.nbytes = self._live.left
        else:
            self.nbytes = torch.cuda.memory_allocated() - self._before


def train(
    mesh: DeviceMesh, device: torch.device, layers: int, steps: int, partition: bool
) -> tuple[list[Tensor], int, float]:
    """The losses and the last gradients, the bytes that this rank's last forward kept, and the
    seconds of a step.
    """
    torch.manual_seed(0)
    model = Model(layers).to(device)
    for block in model.blocks:
        parallelize_module(block, mesh, PLAN)
        memopt.checkpoint_wrapper(block, partition=mesh if partition else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    results, nbytes = [], 0
    for step in range(steps):
        torch.manual_seed(step)  # all ranks have the same batch
        tokens = torch.randint(WORDS, (BATCH, TOKENS + 1)).to(device)
        optimizer.zero_grad()
        is_last = step == steps - 1
        with Forward(device) if is_last else nullcontext() as forward:
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        if forward is not None:
            nbytes = forward.nbytes
        loss.backward()
        optimizer.step()
        results.append(loss.detach())
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    local = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
    results += [g.clone() for g in local]

    def step_again() -> None:
        F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()

    return results, nbytes, step_cost(model, step_again).seconds


def run(rank: int, port: int, layers: int, steps: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    on_gpus = torch.cuda.device_count() >= RANKS
    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("nccl" if on_gpus else "gloo", rank=rank, world_size=RANKS)
    mesh = init_device_mesh(device.type, (RANKS,), mesh_dim_names=("tp",))
    whole, whole_bytes, whole_seconds = train(mesh, device, layers, steps, partition=False)
    split, split_bytes, split_seconds = train(mesh, device, layers, steps, partition=True)
    assert all(torch.equal(a, b) for a, b in zip(whole, split, strict=True))
    inputs = layers * BATCH * TOKENS * HIDDEN * 4
    if rank == 0:
        print(
            f"{RANKS} ranks on {device.type}, {layers} blocks, loss {float(split[steps - 1]):.4f}"
        )
        print(f"kept by each rank after forward:     {whole_bytes:>10,} bytes")
        print(f"the same with partition=mesh:        {split_bytes:>10,} bytes")
        print(f"saved of the blocks' {inputs:,} bytes: {whole_bytes - split_bytes:>10,} bytes")
        print("losses and gradients: the same bits")
        print(f"time of a step: {split_seconds / whole_seconds:.2f}x")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(run, (port, options.layers, options.steps), nprocs=RANKS)


if __name__ == "__main__":
    main()
