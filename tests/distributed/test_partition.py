"""Proves: with partition= over a process group, tensor parallel, sequence parallel and data x
tensor parallel models have the losses, gradients and parameters of the same models without it, to
the last bit; each rank keeps its part of the regions' inputs, as the allocator counts; what is
gathered is one all-gather of these parts for each region and backward; and what partition= refuses.

Order of gathers, prefetch and partial backwards: tests/checkpoint/test_partition_order.py, where
the ranks are threads. Faults: test_partition_faults.py.
"""

from __future__ import annotations

import contextlib
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

import memopt
from memopt._checkpoint import partition
from memopt._checkpoint.partition import PartitionChoice
from memopt._extension import _C
from memopt.memory.allocator import LiveBytes
from tests.checkpoint.partitions import MESSAGE, part_bytes
from tests.distributed.processes import World
from tests.distributed.support import CountingLinear, Results, train
from tests.distributed.test_tensor_parallel import STYLES
from tests.support.bits import assert_same_bits

pytestmark = pytest.mark.slow  # for whichever test starts the processes

ROWS, SIZE, BLOCKS = 12, 12, 3  # 2 and 3 ranks share columns and rows
BYTES = ROWS * SIZE * 4


@contextlib.contextmanager
def counted_gathers() -> Iterator[list[int]]:
    """The bytes that this rank gives to each gather of memopt's."""
    sizes: list[int] = []
    original = partition.all_gather_single

    def counting(whole: Tensor, part: Tensor, group: Any) -> Any:
        sizes.append(part.numel())
        return original(whole, part, group)

    with patch.object(partition, "all_gather_single", counting):
        yield sizes


def rows(step: int, seed: int = 0) -> Tensor:
    """The same on all ranks, for one seed."""
    generator = torch.Generator().manual_seed(100 * seed + step)
    return torch.randn(ROWS, SIZE, generator=generator)


def block(dropout: float = 0.0) -> nn.Sequential:
    first, last = CountingLinear(SIZE, 2 * SIZE), nn.Linear(2 * SIZE, SIZE)
    return nn.Sequential(first, nn.Tanh(), nn.Dropout(dropout), last)


def mesh_of(ranks: int) -> DeviceMesh:
    return DeviceMesh("cpu", torch.arange(ranks), mesh_dim_names=("tp",))


# How many blocks get plain tensors that are other ones on each rank.
DIFFERING = {
    "tensor parallel": 0,
    "sequence parallel": BLOCKS,
    "activations stay DTensors": 1,  # the first; the others get DTensors
}


def assert_equal(actual: Results, expected: Results) -> None:
    """To the last bit, in as many calls."""
    assert_same_bits(actual.tensors, expected.tensors)
    assert actual[1:] == expected[1:]


def parallel_body(
    style: str, mesh: DeviceMesh, choice: PartitionChoice, place: Path | None = None
) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(SIZE), *block()) for _ in range(BLOCKS)]
    for module in blocks:
        parallelize_module(module, mesh, STYLES[style])
        memopt.checkpoint_wrapper(module, partition=choice, offload=place)
    return nn.Sequential(*blocks)


def run_parallel(
    style: str, ranks: int, split: bool, place: Path | None = None
) -> tuple[Results, list[int]] | None:
    mesh = mesh_of(ranks)
    if mesh.get_coordinate() is None:
        return None
    model = parallel_body(style, mesh, mesh if split else None, place)
    regions_before = _C.live_regions()
    seed = 0 if style == "tensor parallel" else 1 + mesh.get_local_rank()

    def backward(step: int) -> Tensor:
        loss = model(rows(step, seed)).square().mean()
        loss.backward()
        return loss

    with counted_gathers() as sizes, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = train(model, backward, steps=2)
    differing = [str(w.message) for w in caught if "checkpoint: partition" in str(w.message)]
    assert len(differing) == (DIFFERING[style] if split else 0)
    assert _C.live_regions() <= regions_before
    return results, sizes


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("ranks", [2, 3])
def test_two_steps_equal_those_of_whole_inputs(four: World, style: str, ranks: int) -> None:
    split = [answer for answer in four.run(run_parallel, style, ranks, True) if answer]
    whole = [answer for answer in four.run(run_parallel, style, ranks, False) if answer]
    assert len(split) == ranks
    for (actual, _), (expected, _) in zip(split, whole, strict=True):
        assert_equal(actual, expected)
    # Ranks of sequence parallel models have inputs of their own; DTensors are as they were placed.
    part = [part_bytes(BYTES, ranks)] if style == "tensor parallel" else []
    for _, sizes in split:
        # A message of each module's first and second call, and each step's gathers.
        assert sizes == 2 * (BLOCKS * [MESSAGE] + BLOCKS * part)
    assert all(sizes == [] for _, sizes in whole)


def written(style: str, ranks: int, split: bool, place: Path) -> tuple[Results, int] | None:
    memopt.offload.stats(reset=True)
    answer = run_parallel(style, ranks, split, place)
    return answer and (answer[0], sum(p.out.bytes for p in memopt.offload.stats().places))


def test_parts_are_offloaded(four: World, tmp_path: Path) -> None:
    """And whole inputs, where they are results of collectives as well."""
    style = "tensor parallel"
    expected, _ = four.run(run_parallel, style, 2, False)[0]
    for split, nbytes in ((True, part_bytes(BYTES, 2)), (False, BYTES)):
        for results, out in four.run(written, style, 2, split, tmp_path)[:2]:
            assert_equal(results, expected)
            assert out == 2 * BLOCKS * nbytes


def bytes_after_forward(ranks: int, split: bool) -> int | None:
    mesh = mesh_of(ranks)
    if mesh.get_coordinate() is None:
        return None
    model = parallel_body("tensor parallel", mesh, mesh if split else None)
    compare = {0, 1, 3, 7}  # the numbers of calls that do
    left = []
    for step in range(15):
        with LiveBytes() as live:
            loss = model(rows(step) * 1).sum()
        loss.backward()
        if step not in compare:
            left.append(live.left)
    # A thread of gloo's may hold what it reduced a little longer, and its end is not counted then.
    return min(left)


@pytest.mark.parametrize("ranks", [2, 3])
def test_each_rank_keeps_its_part(four: World, ranks: int) -> None:
    """As PyTorch's allocator counts; nothing else differs."""
    split, whole = (four.run(bytes_after_forward, ranks, split)[:ranks] for split in (True, False))
    saved = BLOCKS * (BYTES - part_bytes(BYTES, ranks))
    assert saved > 0
    assert [w - s for w, s in zip(whole, split, strict=True)] == ranks * [saved]


# Data parallel or a pipeline over one dim of a mesh of two, partitioned over the other.


def run_fsdp(split: bool) -> Results:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallel_body("tensor parallel", mesh["tp"], mesh["tp"] if split else None)
    for module in model:
        fully_shard(module, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])

    def backward(step: int) -> Tensor:
        loss = model(rows(step, seed=1 + mesh.get_local_rank("dp"))).square().mean()
        loss.backward()
        return loss

    return train(model, backward, steps=2)


def run_ddp(split: bool) -> Results:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    blocks = nn.Sequential(*(block(dropout=0.5) for _ in range(BLOCKS)))
    for module in blocks:
        memopt.checkpoint_wrapper(module, partition=mesh["tp"].get_group() if split else None)
    model = DistributedDataParallel(blocks, process_group=mesh["dp"].get_group())

    def backward(step: int) -> Tensor:
        loss = model(rows(step, seed=1 + mesh.get_local_rank("dp"))).square().mean()
        loss.backward()
        return loss

    return train(model, backward, steps=2)


def run_pipeline(split: bool) -> Results:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    torch.manual_seed(mesh.get_local_rank("pp"))
    blocks = nn.Sequential(*(block(dropout=0.5) for _ in range(BLOCKS)))
    for module in blocks:
        memopt.checkpoint_wrapper(module, partition=mesh["tp"] if split else None)
    place, group = mesh.get_local_rank("pp"), mesh["pp"].get_group()
    stage = PipelineStage(blocks, place, 2, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=lambda out, to: (out - to).sum())

    def backward(step: int) -> Tensor:
        if place == 0:
            schedule.step(rows(step))
            return torch.zeros(())
        losses: list[Tensor] = []
        schedule.step(target=rows(step, seed=1), losses=losses)
        return torch.stack(losses)

    with counted_gathers() as sizes:
        results = train(blocks, backward, steps=2)
    assert (len(sizes) > 0) == split
    return results


@pytest.mark.parametrize("run", [run_fsdp, run_ddp, run_pipeline])
def test_steps_on_a_mesh_of_two_dims_equal_those_of_whole_inputs(four: World, run: Any) -> None:
    for actual, expected in zip(four.run(run, True), four.run(run, False), strict=True):
        assert_equal(actual, expected)


class Normed(nn.Module):
    """Batch statistics, a mask for all layers, a container with more than tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.body = nn.BatchNorm1d(SIZE), block(dropout=0.5)

    def forward(self, x: Tensor, rest: dict[str, Any], *, mask: Tensor) -> Tensor:
        return self.body(self.norm(x)) * mask + rest["bias"] * rest["scale"]


def run_kinds(split: bool) -> list[Tensor | None]:
    torch.manual_seed(0)
    modules = nn.ModuleList(Normed() for _ in range(3))
    for module in modules:
        memopt.checkpoint_wrapper(module, partition=split)
    found: list[Tensor | None] = []
    for step in range(2):
        torch.manual_seed(step)
        x, bias = (rows(step, seed).requires_grad_() for seed in (1, 2))
        mask, out = rows(step) > 0, x * 1
        for module in modules:
            out = module(out, {"bias": bias * 1, "scale": 0.5}, mask=mask)
        out.square().sum().backward()
        found += [x.grad, bias.grad, *(p.grad for p in modules.parameters())]
    return [*found, *(buffer.clone() for buffer in modules.buffers())]


def test_default_group_and_arguments_of_many_kinds(four: World) -> None:
    for split, whole in zip(four.run(run_kinds, True), four.run(run_kinds, False), strict=True):
        assert_same_bits(split, whole)


# What it refuses.


def refused() -> None:
    module = block()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    others = dist.new_group([1, 2])
    cases: list[tuple[Any, type[Exception], str]] = [
        (
            mesh,
            ValueError,
            r"must be a mesh of one dim, such as mesh\['tp'\], got one of",
        ),
        (7, TypeError, "must be a ProcessGroup, a DeviceMesh of one dim or True, got int"),
        ("tp", TypeError, "must be a ProcessGroup, a DeviceMesh of one dim or True, got str"),
    ]
    if dist.get_rank() in (0, 3):
        cases.append((others, ValueError, "must be a group that this rank is in"))
        elsewhere = DeviceMesh("cpu", torch.tensor([1, 2]), _init_backend=False)
        cases.append((elsewhere, ValueError, "must be a mesh that this rank"))
    for choice, error, text in cases:
        with pytest.raises(error, match="checkpoint_wrapper: partition " + text):
            memopt.checkpoint_wrapper(module, partition=choice)
        with pytest.raises(error, match="checkpoint: partition " + text):
            memopt.checkpoint(module, rows(0), partition=choice)
        assert type(module) is nn.Sequential


def test_no_group_of_this_rank_is_refused(four: World) -> None:
    four.run(refused)


def run_alone() -> int:
    alone = dist.new_subgroups(group_size=1)[0]
    with counted_gathers() as sizes:
        module = memopt.checkpoint_wrapper(block(), partition=alone)
        module(rows(0)).sum().backward()
    return len(sizes)


def test_group_of_one_rank_has_no_effect(four: World) -> None:
    assert four.run(run_alone) == [0, 0, 0, 0]


def run_pickled() -> list[int]:
    torch.manual_seed(0)
    module = memopt.checkpoint_wrapper(block(), partition=True)
    loaded = pickle.loads(pickle.dumps(module))
    with counted_gathers() as sizes:
        loaded((rows(0) * 1).requires_grad_() * 1).sum().backward()
    return sizes


def test_pickle_finds_its_group_again(four: World) -> None:
    assert four.run(run_pickled) == 4 * [[MESSAGE, part_bytes(BYTES, 4)]]


def run_without_all_gather_into_tensor() -> list[Tensor]:
    def unsupported(*args: Any) -> Any:
        raise RuntimeError("Backend old does not support _allgather_base")

    torch.manual_seed(0)
    module = memopt.checkpoint_wrapper(block(), partition=True)
    x = rows(0).requires_grad_()
    with patch.object(partition, "all_gather_single", unsupported):
        module(x * 1).sum().backward()
    again = rows(0).requires_grad_()
    memopt.unwrap(module)(again * 1).sum().backward()
    return [x.grad, again.grad]  # type: ignore[list-item]


def test_backend_without_the_collective_gathers_lists(four: World) -> None:
    for split, whole in four.run(run_without_all_gather_into_tensor):
        assert torch.equal(split, whole)
