"""FSDP2 as in torchtitan: the function that applies activation checkpointing is memopt's.

python examples/torchtitan_like.py    # two processes, on two GPUs or on the CPU
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from step_cost import Cost, compared, step_cost
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import memopt

RANKS = 2


@dataclass
class ActivationCheckpointConfig:
    mode: Literal["none", "recipes", "full", "selective"] = "full"
    """recipes: no block runs again; full: each block does; selective: every second one."""


def apply_ac(model: nn.Module, batch: Tensor, config: ActivationCheckpointConfig) -> None:
    """Takes the place of torchtitan's: behind tensor parallelism, before FSDP."""
    if config.mode == "none":
        return
    report = memopt.convert(model, batch, checkpoint=True if config.mode == "full" else None)
    if config.mode == "selective":
        memopt.apply_activation_checkpointing(model, every=2)
    if dist.get_rank() == 0:
        print(f"{config.mode}: {report}")


def parallelize(model: nn.Module, batch: Tensor, config: ActivationCheckpointConfig) -> nn.Module:
    mesh = init_device_mesh(batch.device.type, (RANKS,), mesh_dim_names=("dp",))
    apply_ac(model, batch, config)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


class Block(nn.Module):
    def __init__(self, dim: int = 64) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.wqkv, self.wo = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.w1, self.w3 = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, 3 * dim, bias=False)
        self.w2 = nn.Linear(3 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.wqkv(self.attention_norm(x)).unflatten(-1, (3, 4, -1)).transpose(1, 3)
        y = F.scaled_dot_product_attention(*heads.unbind(2), is_causal=True)
        x = x + self.wo(y.transpose(1, 2).flatten(2))
        y = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class Transformer(nn.Module):
    def __init__(self, layers: int = 4, words: int = 512, dim: int = 64) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(words, dim)
        self.layers = nn.ModuleList(Block(dim) for _ in range(layers))
        self.norm, self.output = nn.RMSNorm(dim), nn.Linear(dim, words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def train(device: torch.device, config: ActivationCheckpointConfig) -> tuple[list[float], Cost]:
    """The losses, and the cost of a step on this rank."""
    torch.manual_seed(0)
    model = Transformer().to(device)
    tokens = torch.randint(512, (4, 129), device=device)
    model = parallelize(model, tokens[:, :-1], config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss_of() -> Tensor:
        pred = model(tokens[:, :-1])
        return F.cross_entropy(pred.flatten(0, 1).float(), tokens[:, 1:].flatten())

    losses = []
    for _ in range(3):
        loss = loss_of()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, step_cost(model, lambda: loss_of().backward())


def run(rank: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    on_gpus = torch.cuda.device_count() >= RANKS
    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    if not on_gpus:
        torch.set_num_threads(1)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("nccl" if on_gpus else "gloo", rank=rank, world_size=RANKS)
    plain, before = train(device, ActivationCheckpointConfig("none"))
    full, after = train(device, ActivationCheckpointConfig("full"))
    if rank == 0:
        print("losses", *(f"{loss:.4f}" for loss in full))
        print(compared(before, after))
    torch.testing.assert_close(full, plain, rtol=1e-4, atol=0)
    dist.destroy_process_group()


def main() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(run, (port,), nprocs=RANKS)


if __name__ == "__main__":
    main()
