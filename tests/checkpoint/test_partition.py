"""Proves: with partition= each rank keeps its part of a region's inputs and has the gradients of
the whole ones to the last bit, whatever the tensors' dtypes and layouts; how many bytes are
gathered; and that it works with offloading, recipes, autocast, copies. The ranks are threads here
(virtual_ranks.py); tests/distributed has processes.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import memopt
from memopt._checkpoint import (
    checkpoint,
    checkpoint_wrapper,
    disable_checkpointing,
)
from memopt._checkpoint.wrapper import settings_of
from tests.checkpoint.partitions import (
    BYTES,
    MESSAGE,
    ROWS,
    SIZE,
    assert_nothing_is_left,
    body,
    contiguous,
    gradients,
    half,
    layer,
    part_bytes,
    recomputed_arguments,
    starts,
    values,
    wrapped,
)
from tests.checkpoint.virtual_ranks import Rank, VirtualRanks
from tests.support.bits import assert_same_bits


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("backwards", [1, 2])
def test_gradients_are_those_of_whole_inputs(count: int, backwards: int) -> None:
    expected = gradients(body(), values(ROWS, SIZE), backwards)
    ranks = VirtualRanks(count)
    for actual in ranks.run(lambda r: gradients(wrapped(r), values(ROWS, SIZE), backwards)):
        assert_same_bits(actual, expected)
    for rank in ranks.ranks:
        # One message of each module's first call, one gather of each region's every backward.
        assert rank.started == 3 * [MESSAGE] + backwards * 3 * [part_bytes(BYTES, count)]
    assert_nothing_is_left(ranks)


def storages_alive(storages: list[StorageWeakRef]) -> int:
    return sum(not storage.expired() for storage in storages)


def test_inputs_are_freed_after_forward() -> None:
    def run(rank: Rank) -> int:
        model = wrapped(rank)
        storages: list[StorageWeakRef] = []

        def remember(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            storages.append(StorageWeakRef(args[0].untyped_storage()))

        for module in model:
            module.register_forward_pre_hook(remember)
        loss = model(values(ROWS, SIZE).requires_grad_() * 1).square().sum()
        alive = storages_alive(storages)
        loss.backward()
        return alive

    assert VirtualRanks(2).run(run) == [0, 0]


# One region with one tensor of each kind: whether it is split.
def transposed() -> Tensor:
    return (values(SIZE, ROWS) * 1).t()


def channels_last() -> Tensor:
    return (
        (values(2, 8, 4, 1) * 1).to(memory_format=torch.channels_last).view_as(values(2, 8, 4, 1))
    )


def middle_of_a_storage() -> Tensor:
    return (values(3 * ROWS, SIZE) * 1)[ROWS : 2 * ROWS]


def odd_bytes() -> Tensor:
    return values(131) > 0


def integers() -> Tensor:
    return torch.arange(100)


def expanded() -> Tensor:
    return values(1, SIZE).expand(ROWS, SIZE)


def with_holes() -> Tensor:
    return (values(ROWS, 2 * SIZE) * 1)[:, ::2]


def small() -> Tensor:
    return values(7)


def leaf() -> Tensor:
    return values(ROWS, SIZE).requires_grad_()


def view_of_a_leaf() -> Tensor:
    return leaf()[: ROWS // 2]


def parameter() -> Tensor:
    return nn.Parameter(values(ROWS, SIZE))


def conjugate() -> Tensor:
    return values(ROWS, SIZE).to(torch.complex64).conj()


def empty() -> Tensor:
    return values(0, SIZE) * 1


SPLIT = [contiguous, transposed, channels_last, middle_of_a_storage, half, odd_bytes, integers]
WHOLE = [expanded, with_holes, small, leaf, view_of_a_leaf, parameter, conjugate, empty]


def geometry(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad, tensor.is_conj()


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("make", [*SPLIT, *WHOLE])
def test_tensor_comes_back_as_it_was(make: Callable[[], Tensor], count: int) -> None:
    expected = make()
    ranks = VirtualRanks(count)
    for (actual,) in ranks.run(lambda rank: recomputed_arguments(rank, [make()])):
        assert geometry(actual) == geometry(expected)
        assert torch.equal(actual, expected)
    expected_parts = [part_bytes(expected.nbytes, count)] if make in SPLIT else []
    assert ranks.ranks[0].started == [MESSAGE, *expected_parts]


@pytest.mark.parametrize("count", [2, 3])
def test_tensors_of_all_kinds_are_one_gather(count: int) -> None:
    makers = [*SPLIT, *WHOLE]
    ranks = VirtualRanks(count)
    for actual in ranks.run(lambda r: recomputed_arguments(r, [make() for make in makers])):
        for tensor, make in zip(actual, makers, strict=True):
            assert geometry(tensor) == geometry(make())
            assert torch.equal(tensor, make())
    parts = sum(part_bytes(make().nbytes, count) for make in SPLIT)
    assert ranks.ranks[-1].started == [MESSAGE, parts]


def test_the_same_tensor_twice_is_split_once() -> None:
    def run(rank: Rank) -> bool:
        x = contiguous()
        actual = recomputed_arguments(rank, [x, x])
        return actual[0] is actual[1]

    ranks = VirtualRanks(2)
    assert ranks.run(run) == [True, True]
    assert ranks.ranks[0].started == [MESSAGE, part_bytes(BYTES, 2)]


def test_single_tensor_is_the_gathered_memory() -> None:
    """No copy is made of it: what it lies in has the size of the gather."""

    def run(rank: Rank) -> list[int]:
        return [t.untyped_storage().nbytes() for t in recomputed_arguments(rank, [odd_bytes()])]

    assert VirtualRanks(2).run(run) == 2 * [[2 * part_bytes(131, 2)]]


def test_write_in_place_is_noticed() -> None:
    def run(rank: Rank) -> None:
        x = values(ROWS, SIZE).requires_grad_() * 1
        loss = checkpoint(layer(), x, partition=rank.partition).sum()
        x.add_(1)
        with pytest.raises(RuntimeError, match="must not be written in place before backward"):
            loss.backward()

    VirtualRanks(2).run(run)


def test_without_gradients_nothing_is_sent() -> None:
    def run(rank: Rank) -> None:
        model = wrapped(rank)
        with torch.no_grad():
            model(values(ROWS, SIZE))
        with disable_checkpointing():
            model(values(ROWS, SIZE)).sum().backward()

    ranks = VirtualRanks(2)
    ranks.run(run)
    assert ranks.ranks[0].started == []


def test_mask_of_all_layers_is_kept_whole_from_the_region_on_that_makes_it_cheaper() -> None:
    """As many parts as there are ranks are no less than the tensor. Later steps know."""

    def run(rank: Rank) -> None:
        modules = [checkpoint_wrapper(Masked(), partition=rank.partition) for _ in range(4)]
        for _ in range(2):
            x, mask = values(ROWS, SIZE).requires_grad_() * 1, contiguous()
            for module in modules:
                x = module(x, mask)
            x.sum().backward()

    one, two = part_bytes(BYTES, 3), 2 * part_bytes(BYTES, 3)
    ranks = VirtualRanks(3)
    ranks.run(run)
    expected = 4 * [MESSAGE] + [one, one, two, two] + 4 * [MESSAGE] + 4 * [one]
    assert [rank.started for rank in ranks.ranks] == 3 * [expected]


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = layer()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.layer(x) * mask


# With what else a region may have.


@pytest.mark.parametrize("count", [2, 3])
def test_parts_are_offloaded(count: int, tmp_path: Path) -> None:
    expected = gradients(body(), values(ROWS, SIZE))
    before = {place.directory: place.out.bytes for place in memopt.offload.stats().places}
    ranks = VirtualRanks(count)
    for actual in ranks.run(lambda r: gradients(wrapped(r, offload=tmp_path), values(ROWS, SIZE))):
        assert_same_bits(actual, expected)
    written = {place.directory: place.out.bytes for place in memopt.offload.stats().places}
    assert written[str(tmp_path)] - before.get(str(tmp_path), 0) == (
        count * 3 * part_bytes(BYTES, count)
    )
    assert starts(ranks) == 3 * [part_bytes(BYTES, count)]


def test_recipes_autocast_and_early_stop() -> None:
    def made() -> nn.Module:
        block = nn.Sequential(nn.LayerNorm(SIZE), nn.Linear(SIZE, SIZE), nn.GELU())
        generator = torch.Generator().manual_seed(0)
        for parameter in block.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
        model = nn.Sequential(block, nn.Linear(SIZE, SIZE))
        nn.init.eye_(model[1].weight)
        nn.init.zeros_(model[1].bias)
        return model

    def run(rank: Rank | None) -> list[Tensor]:
        model = made()
        memopt.convert(model)
        if rank is not None:
            checkpoint_wrapper(model[0], partition=rank.partition)
        with torch.autocast("cpu", torch.bfloat16):
            return gradients(model, values(ROWS, SIZE))

    expected = run(None)
    for actual in VirtualRanks(2).run(run):
        assert_same_bits(actual, expected)


@pytest.mark.slow
def test_no_effect_under_compile() -> None:
    (rank, _) = VirtualRanks(2).ranks
    expected = gradients(layer(), values(ROWS, SIZE))
    module = checkpoint_wrapper(layer(), partition=rank.partition)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    x = values(ROWS, SIZE).requires_grad_()
    compiled(x * 1).square().sum().backward()
    found = [x.grad, *(p.grad for p in module.parameters())]
    for actual, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, wanted)
    assert rank.started == []


def test_copies_and_settings() -> None:
    rank = VirtualRanks(2).ranks[0]
    module = checkpoint_wrapper(layer(), partition=rank.partition)
    twin = copy.deepcopy(module)
    assert settings_of(twin).partition is rank.partition
    with pytest.raises(TypeError, match="must be of a process group to be pickled"):
        pickle.dumps(module)
    assert settings_of(checkpoint_wrapper(module)).partition is None


def test_revert_gives_the_partition_back() -> None:
    """`convert` has wrapped anew a module that was wrapped."""
    rank = VirtualRanks(2).ranks[0]
    model = nn.Sequential(checkpoint_wrapper(layer(), partition=rank.partition))
    memopt.convert(model, checkpoint=lambda module: module is model[0])
    memopt.revert(model)
    assert settings_of(model[0]).partition is rank.partition


def test_without_a_process_group_is_an_error_that_leaves_the_module() -> None:
    module = layer()
    for call in (
        lambda: checkpoint_wrapper(module, partition=True),
        lambda: checkpoint(module, torch.ones(1), partition=True),
        lambda: memopt.apply_activation_checkpointing(
            nn.Sequential(module), check_fn=nn.Linear, partition=True
        ),
    ):
        with pytest.raises(ValueError, match=r"partition needs torch\.distributed's process group"):
            call()
    assert type(module) is nn.Sequential
