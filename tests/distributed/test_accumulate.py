"""Proves that memopt.accumulate gives in DistributedDataParallel and FSDP2 the gradients of the
whole batch, and reduces them once: the collectives are counted.
"""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import memopt
from memopt.accumulate import loop
from tests.distributed.processes import WORLD_SIZE, Pair
from tests.distributed.support import batch, block

pytestmark = pytest.mark.slow  # for whichever test starts the processes

ROWS = 10


class Collectives(TorchDispatchMode):
    """Counts what goes over the wire."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = str(func)
        if name.startswith("c10d."):
            self.calls[name.split(".")[1].strip("_")] += 1
        return func(*args, **(kwargs or {}))


def gradients(model: nn.Module) -> list[Tensor]:
    found = []
    for p in model.parameters():
        gradient = p.grad
        assert gradient is not None
        found.append(
            (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).clone()
        )
    return found


def square(output: Tensor) -> Tensor:
    return output.square().mean()


def models(kind: str) -> tuple[nn.Module, nn.Module]:
    """Two alike."""
    torch.manual_seed(0)
    plain = nn.Sequential(block(), block()).double()
    made = []
    for model in (plain, copy.deepcopy(plain)):
        if kind == "ddp":
            made.append(DistributedDataParallel(model))
        else:
            mesh = init_device_mesh("cpu", (WORLD_SIZE,))
            for layer in model:
                fully_shard(layer, mesh=mesh)
            made.append(fully_shard(model, mesh=mesh))
    return made[0], made[1]


def both(kind: str, micro_batch: int) -> tuple[list[Tensor], list[Tensor], dict[str, int]]:
    model, whole = models(kind)
    x = batch(0, ROWS).double()
    square(whole(x)).backward()
    with Collectives() as collectives:
        memopt.accumulate(model, x, micro_batch=micro_batch, loss=square)
    return gradients(model), gradients(whole), dict(collectives.calls)


def steps_down() -> tuple[list[Tensor], list[Tensor], int, int]:
    """In one process memory runs out, and it takes more micro-batches than the other."""
    model, whole = models("ddp")
    x = batch(0, ROWS).double()
    square(whole(x)).backward()
    rank = torch.distributed.get_rank()

    def fail(module: nn.Module, args: Any) -> None:
        if rank == 1 and len(args[0]) > 3:
            raise torch.OutOfMemoryError("for a test")

    model.module[1].register_forward_pre_hook(fail)
    before = loop.largest_micro_batch
    loop.largest_micro_batch = lambda *_: ROWS
    try:
        result = memopt.accumulate(model, x, loss=square, budget=1 << 30)
    finally:
        loop.largest_micro_batch = before
    return gradients(model), gradients(whole), result.micro_batches, result.out_of_memory


def refused() -> str:
    model, _ = models("fsdp")
    try:
        memopt.accumulate(model, batch(0, ROWS).double(), loss=square, budget=1 << 30)
    except ValueError as error:
        return str(error)
    return ""


def assert_close(found: list[Tensor], wanted: list[Tensor]) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert (a - b).abs().max() <= 64 * torch.finfo(a.dtype).eps * b.abs().max()


@pytest.mark.parametrize("micro_batch", [3, 5, ROWS])
def test_data_parallel_reduces_once(pair: Pair, micro_batch: int) -> None:
    for found, wanted, collectives in pair.run(both, "ddp", micro_batch):
        assert_close(found, wanted)
        assert collectives == {"allreduce": 1}


@pytest.mark.parametrize("micro_batch", [3, ROWS])
def test_sharded_models_reduce_once(pair: Pair, micro_batch: int) -> None:
    for found, wanted, collectives in pair.run(both, "fsdp", micro_batch):
        assert_close(found, wanted)
        scatters = sum(n for name, n in collectives.items() if "reduce_scatter" in name)
        assert scatters == 2  # once for each of the sharded modules that have parameters


def test_processes_may_take_different_numbers_of_micro_batches(pair: Pair) -> None:
    results = pair.run(steps_down)
    for found, wanted, _, _ in results:
        assert_close(found, wanted)
    assert [r[2:] for r in results] == [(1, 0), (4, 2)]


def test_auto_is_refused_where_every_forward_is_a_collective(pair: Pair) -> None:
    assert all("must be a number under FSDP" in message for message in pair.run(refused))
