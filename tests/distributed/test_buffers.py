"""Proves on two ranks that hold inputs alike: memopt.checkpoint.buffers keeps each rank's part in
its slab, which is half as large; and so does the face of DeepSpeed, with Megatron's model-parallel
unit, its seeds, and inputs whose sizes do not divide. The bits are those of the plain run.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import memopt
from memopt._extension import _C
from memopt.compat.deepspeed import checkpointing
from tests.checkpoint.support import plain, step_results
from tests.distributed.processes import Pair
from tests.support.bits import assert_same_bits
from tests.support.patience import once_it_is

ROWS, WIDTH, BLOCKS = 64, 32, 4


class Seen(NamedTuple):
    found: list[list[Tensor | None]]
    """Loss and gradients of each step."""
    expected: list[list[Tensor | None]]
    slab_bytes: int
    copied_bytes: int
    left: tuple[int, int]
    """Regions; and bytes in use, once gloo's thread has let go of the last gather's input: whoever
    waits for a gather goes on before that.
    """


class Mpu:
    """As Megatron's, of one group of all ranks."""

    def get_tensor_model_parallel_rank(self) -> int:
        return dist.get_rank()

    def get_tensor_model_parallel_group(self) -> Any:
        return dist.group.WORLD


def _blocks(size: int = WIDTH) -> nn.ModuleList:
    torch.manual_seed(0)
    make = [nn.Linear(size, 2 * size), nn.Tanh(), nn.Dropout(0.1), nn.Linear(2 * size, size)]
    return nn.ModuleList(nn.Sequential(*make) for _ in range(BLOCKS))


def _input(rows: int, size: int = WIDTH) -> Tensor:
    """The same on all ranks."""
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(rows))


def _run(blocks: nn.ModuleList, x: Tensor, call: Any = plain) -> Tensor:
    x = x * 1
    for block in blocks:
        x = call(block, x)
    return x


def _wrapped(rows: list[int]) -> Seen:
    blocks = _blocks()
    wanted = list(blocks.parameters())
    expected = [step_results(lambda r=r: _run(blocks, _input(r)), wanted) for r in rows]
    for block in blocks:
        memopt.checkpoint_wrapper(block, partition=True)
    found = []
    with memopt.checkpoint.buffers(blocks) as buffers:
        for r in rows:
            found.append(step_results(lambda r=r: _run(blocks, _input(r)), wanted))
            # What gloo's thread still reads is not lent to the next step's inputs.
            in_use = once_it_is(0, lambda: sum(row.in_use for row in buffers.stats()))
        left = _C.live_regions(), in_use
        (row,) = buffers.stats()
    return Seen(found, expected, row.slab_bytes, row.copied_bytes, left)


def _deepspeed(rows: list[int], size: int, options: dict[str, Any]) -> Seen:
    checkpointing._state = checkpointing._Checkpointing()
    checkpointing.configure(Mpu(), partition_activations=True, **options)
    tracker = checkpointing.get_cuda_rng_tracker()
    blocks = _blocks(size)
    wanted = list(blocks.parameters())

    def forked(block: nn.Module, x: Tensor) -> Tensor:
        y = block(x)
        with tracker.fork():  # drawn by each rank for itself, so that its output is not alike
            noise = torch.rand(1)
        return y * (1 + 0 * noise)

    def results(call: Any) -> list[list[Tensor | None]]:
        checkpointing.model_parallel_cuda_manual_seed(5)
        return [
            [
                *step_results(
                    lambda r=r: _run(
                        blocks, _input(r, size), lambda block, x: call(forked, block, x)
                    ),
                    wanted,
                ),
                *tracker.get_states().values(),
            ]
            for r in rows
        ]

    expected, found = results(plain), results(checkpointing.checkpoint)
    buffers = checkpointing._state.buffers

    def total(name: str) -> int:
        return sum(row[name] for row in ([] if buffers is None else buffers.stats()))

    left = _C.live_regions(), once_it_is(0, lambda: total("in_use"))
    slab_bytes, copied_bytes = total("slab_bytes"), total("copied_bytes")
    checkpointing.configure()
    return Seen(found, expected, slab_bytes, copied_bytes, left)


def _assert_bits(seen: Seen) -> None:
    for found, expected in zip(seen.found, seen.expected, strict=True):
        assert_same_bits(found, expected)
    assert seen.left == (0, 0)


@pytest.mark.slow
def test_the_slab_has_each_ranks_part(pair: Pair) -> None:
    for seen in pair.run(_wrapped, [ROWS] * 4):
        _assert_bits(seen)
        half = ROWS * WIDTH * 4 // 2
        assert seen.slab_bytes == BLOCKS * half
        assert seen.copied_bytes == 3 * BLOCKS * half


def test_other_batches(pair: Pair) -> None:
    for seen in pair.run(_wrapped, [8, 16, 16, 3, 16]):
        _assert_bits(seen)
        assert seen.slab_bytes == BLOCKS * 16 * WIDTH * 4 // 2


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"contiguous_checkpointing": True, "num_checkpoints": BLOCKS},
        {"checkpoint_in_cpu": True},
        {"contiguous_checkpointing": True, "synchronize": True, "profile": True},
    ],
    ids=lambda options: "-".join(options) or "none",
)
def test_deepspeeds_face(pair: Pair, options: dict[str, Any]) -> None:
    for seen in pair.run(_deepspeed, [ROWS] * 3, WIDTH, options):
        _assert_bits(seen)
        if "contiguous_checkpointing" in options:
            assert seen.slab_bytes == BLOCKS * ROWS * WIDTH * 4 // 2
        else:
            assert seen.slab_bytes == 0


def test_sizes_that_do_not_divide(pair: Pair) -> None:
    """DeepSpeed asserts that the number of elements is a multiple of the ranks'."""
    for seen in pair.run(_deepspeed, [7, 5, 7], 9, {"contiguous_checkpointing": True}):
        _assert_bits(seen)
