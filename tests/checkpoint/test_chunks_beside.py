"""Proves: chunks of rows go with dropout, autocast, regions inside and around, recipes, wrappers
and their copies, offloading, the options of regions, disabled regions, DDP and torch.compile;
errors in a chunk leave nothing behind, and wrong numbers of chunks are refused by name.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import memopt
from memopt._checkpoint import checkpoint, checkpoint_wrapper, disable_checkpointing, is_recomputing
from tests.checkpoint.partitions import SIZE, assert_nothing_is_left, body, values, wrapped
from tests.checkpoint.partitions import gradients as partitioned_gradients
from tests.checkpoint.row_chunks import GatedMLP, H, gradients, in_chunks, inputs
from tests.checkpoint.support import collector_disabled, live_tensors_and_regions, plain
from tests.checkpoint.virtual_ranks import VirtualRanks
from tests.support.bits import assert_same_bits


def test_dropout_draws_for_each_chunk_and_the_same_in_both_runs() -> None:
    """The gradient knows which elements the forward dropped."""
    x = torch.ones(64, H, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        return F.dropout(x, 0.5) * 3

    y = checkpoint(function, x, chunks=4)
    chunks = y.detach().view(4, -1)
    assert len({tuple(chunk.tolist()) for chunk in chunks}) == 4
    y.sum().backward()
    assert x.grad is not None
    assert_same_bits([x.grad], [y.detach()])


@pytest.mark.parametrize("enabled_cache", [True, False])
def test_autocast(enabled_cache: bool) -> None:
    """The gradients of float32 weights are summed in float32, whether or not casts are cached."""
    module = GatedMLP()
    x, grad = inputs((4, 32))

    def step(way: Callable[..., Any]) -> list[Tensor | None]:
        def call(module: nn.Module, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=enabled_cache):
                result: Tensor = way(module, x)
                assert torch.is_autocast_cache_enabled() == enabled_cache
                return result

        return gradients(call, module, x, grad)

    whole, ours = step(plain), step(in_chunks(4))
    assert_same_bits(ours[:2], whole[:2])
    exact = gradients(plain, copy.deepcopy(module).double(), x.double(), grad.double())
    for a, b, e in zip(ours, whole, exact, strict=True):
        assert a is not None
        assert b is not None
        assert e is not None
        assert (a - e).square().mean() <= 1.5 * (b - e).square().mean() + 1e-12


def test_inside_a_region_and_around_regions() -> None:
    module, outer = GatedMLP(), nn.Linear(H, H)
    x, grad = inputs()
    both = nn.ModuleList([module, outer])

    def block(way: Callable[..., Any], modules: nn.Module, x: Tensor) -> Tensor:
        return outer(way(module, outer(x).tanh()))

    def nested(modules: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(functools.partial(block, in_chunks(3)), modules, x)

    def around(modules: nn.Module, x: Tensor) -> Tensor:
        return block(in_chunks(3), modules, x)

    assert_same_bits(gradients(nested, both, x, grad), gradients(around, both, x, grad))
    whole = gradients(functools.partial(block, plain), both, x, grad)
    assert_same_bits(gradients(nested, both, x, grad)[:2], whole[:2])
    inside = functools.partial(checkpoint, lambda m, x: checkpoint(m, x), chunks=3)
    assert_same_bits(gradients(inside, module, x, grad), gradients(in_chunks(3), module, x, grad))


@pytest.mark.parametrize("when", ["forward", "recompute"])
def test_an_error_in_a_chunk_leaves_nothing(when: str) -> None:
    module = GatedMLP()
    x, grad = inputs()
    # Values that the function closes over would have it probed again; these are not looked into.
    calls, armed = Counter[str](), threading.Event()

    def function(x: Tensor) -> Tensor:
        run = "recompute" if is_recomputing() else "forward"
        calls[run] += 1
        if armed.is_set() and run == when and calls[run] == 2:
            raise ZeroDivisionError
        return module(x)

    def step() -> None:
        calls.clear()
        try:
            checkpoint(function, x, chunks=3).backward(grad)
        except ZeroDivisionError:
            assert armed.is_set()
        else:
            assert not armed.is_set()

    step()
    module.zero_grad()
    armed.set()
    step()
    assert module.up.weight.grad is None
    with collector_disabled():
        before = live_tensors_and_regions()
        for _ in range(3):
            step()
        assert live_tensors_and_regions() == before
    armed.clear()
    ours = gradients(in_chunks(3), module, x, grad)
    assert_same_bits(ours[:2], gradients(plain, module, x, grad)[:2])


def test_recipes_inside() -> None:
    model = nn.Sequential(nn.Linear(H, H), GatedMLP())
    x, grad = inputs()
    memopt.convert(model)
    whole = gradients(plain, model, x, grad)
    checkpoint_wrapper(model[1], chunks=3)
    assert_same_bits(gradients(plain, model, x, grad)[:2], whole[:2])


def test_without_gradients_too_and_not_where_regions_are_disabled() -> None:
    rows: list[int] = []

    def function(x: Tensor) -> Tensor:
        rows.append(len(x))
        return x.exp()

    x = torch.randn(6, H)
    checkpoint(function, x, chunks=2)
    rows.clear()
    with torch.no_grad():
        y = checkpoint(function, x, chunks=2)
    assert rows == [3, 3]
    assert_same_bits([y], [x.exp()])
    with disable_checkpointing():
        checkpoint(function, x, chunks=2)
    assert rows == [3, 3, 6]


def test_the_wrapper_keeps_its_chunks_in_copies() -> None:
    module = checkpoint_wrapper(GatedMLP(), chunks=3)
    rows: list[int] = []
    outside: list[int] = []
    module.gate.register_forward_hook(lambda m, args, out: rows.append(len(args[0])))
    module.register_forward_hook(lambda m, args, out: outside.append(args[0].shape[:2].numel()))
    x, grad = inputs()
    ours = gradients(plain, module, x, grad)
    assert outside == [24]
    assert rows[-6:] == [8] * 6
    twin = copy.deepcopy(module)
    assert_same_bits(gradients(plain, twin, x, grad), ours)
    memopt.unwrap(module)
    assert_same_bits(ours[:2], gradients(plain, module, x, grad)[:2])


@pytest.mark.parametrize("on_disk", [False, True])
def test_the_rows_may_be_offloaded(on_disk: bool, tmp_path: Path) -> None:
    module = GatedMLP()
    x, grad = inputs()
    place: Any = tmp_path if on_disk else "cpu"
    assert_same_bits(
        gradients(in_chunks(3, offload=place), module, x, grad),
        gradients(in_chunks(3), module, x, grad),
    )


def test_options_of_regions_hold_for_each_chunk() -> None:
    """A selective checkpoint's contexts are made for each."""
    aten = torch.ops.aten
    contexts = functools.partial(create_selective_checkpoint_contexts, [aten.addmm.default])
    module = GatedMLP()
    x, grad = inputs()
    assert_same_bits(
        gradients(in_chunks(3, context_fn=contexts), module, x, grad),
        gradients(in_chunks(3), module, x, grad),
    )
    gradients(in_chunks(3, debug=True), module, x, grad)


@pytest.mark.parametrize("chunks", [0, -1, True, 1.5, "2"])
def test_chunks_must_be_a_number(chunks: Any) -> None:
    error = ValueError if type(chunks) is int else TypeError
    for name, call in (
        ("checkpoint", lambda: checkpoint(torch.exp, torch.ones(2, 2), chunks=chunks)),
        ("checkpoint_wrapper", lambda: checkpoint_wrapper(nn.Linear(2, 2), chunks=chunks)),
        ("convert", lambda: memopt.convert(nn.Linear(2, 2), chunks=chunks)),
    ):
        with pytest.raises(error, match=f"{name}: chunks must be an int of at least 1, got"):
            call()


@pytest.mark.parametrize("arguments", [(), (3, "text"), (torch.tensor(1.0),)])
def test_there_must_be_rows(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match="checkpoint: chunks needs a tensor of rows among the arg"):
        checkpoint(lambda *args: args, *arguments, chunks=2)


def test_under_torch_compile_it_is_pytorchs_checkpoint_of_the_whole_call() -> None:
    module = nn.Sequential(nn.Linear(H, 4), nn.Tanh())
    x = torch.randn(6, H, requires_grad=True)

    @torch.compile(backend="eager", fullgraph=True)
    def function(x: Tensor) -> Tensor:
        return checkpoint(module, x, chunks=2)

    with pytest.warns(UserWarning, match="chunks has no effect under torch.compile"):
        y = function(x)
    assert_same_bits([y.detach()], [module(x).detach()])


def test_ddp_reduces_each_gradient_once(tmp_path: Path) -> None:
    module = checkpoint_wrapper(GatedMLP(), chunks=3)
    x, grad = inputs()
    alone = gradients(plain, module, x, grad)
    reduced: list[int] = []

    def hook(state, bucket):  # type: ignore[no-untyped-def]
        reduced.append(sum(t.numel() for t in bucket.gradients()))
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'ranks'}", rank=0, world_size=1
    )
    try:
        ddp = nn.parallel.DistributedDataParallel(module)
        ddp.register_comm_hook(None, hook)
        ours = gradients(lambda _, x: ddp(x), module, x, grad)
    finally:
        dist.destroy_process_group()
    assert_same_bits(ours, alone)
    assert sum(reduced) == sum(p.numel() for p in module.parameters())


def mlps_in_turn() -> nn.Sequential:
    """Three MLPs in chunks."""
    torch.manual_seed(0)
    made = nn.Sequential(
        *(nn.Sequential(nn.Linear(H, 16), nn.Tanh(), nn.Linear(16, H)) for _ in range(3))
    )
    for mlp in made:
        checkpoint_wrapper(mlp, chunks=2)
    return made


def test_in_buffers() -> None:
    model = mlps_in_turn()
    x, grad = torch.randn(6, H), torch.randn(6, H)
    expected = gradients(plain, model, x, grad)
    buffers = memopt.checkpoint.buffers(model)
    for _ in range(3):
        assert_same_bits(gradients(plain, model, x, grad), expected)
    assert sum(device.high_water for device in buffers.stats()) > 0
    buffers.remove()


def test_partitioned_over_ranks() -> None:
    """Of each chunk a rank keeps its part."""
    x = values(6, SIZE)
    whole = body()
    for mlp in whole:
        checkpoint_wrapper(mlp, chunks=2)
    expected = partitioned_gradients(whole, x.clone(), 1)
    ranks = VirtualRanks(2)
    for actual in ranks.run(lambda r: partitioned_gradients(wrapped(r, chunks=2), x.clone(), 1)):
        assert_same_bits(actual, expected)
    assert_nothing_is_left(ranks)
