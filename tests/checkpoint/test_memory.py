"""Proves: a region holds nothing but its arguments until backward, gives each rebuilt tensor back
as soon as it is used, and dies with its graph by reference counting: no garbage, no growth over
ten thousand regions, whatever ends forward or backward.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import memopt
from memopt._checkpoint import checkpoint, checkpoint_wrapper, is_recomputing
from tests.checkpoint.support import (
    collector_disabled,
    live_objects,
    live_tensors_and_regions,
    mlp,
    taken_for_an_accelerator,
    torch_reentrant,
)


class Recorder:
    """Remembers weakly the memory of the tensors that pass through it."""

    def __init__(self) -> None:
        self.storages: list[StorageWeakRef] = []

    def __call__(self, tensor: Tensor) -> Tensor:
        self.storages.append(StorageWeakRef(tensor.untyped_storage()))
        return tensor

    def live(self) -> int:
        return sum(not storage.expired() for storage in self.storages)


def test_forward_keeps_the_arguments_and_nothing_else(device: torch.device) -> None:
    inside, arguments = Recorder(), Recorder()

    def function(x: Tensor, y: Tensor) -> Tensor:
        for _ in range(5):
            x = inside((x * y).tanh())
        return x.sum()

    weight = torch.randn(3, device=device, requires_grad=True)
    loss = checkpoint(function, arguments(weight * 1), arguments(weight * 2))
    assert inside.live() == 0
    assert arguments.live() == 2
    loss.backward()
    del loss
    assert arguments.live() == 0


@pytest.mark.parametrize("retain_graph", [False, True])
def test_rebuilt_tensors_go_as_backward_uses_them(device: torch.device, retain_graph: bool) -> None:
    """Counted from inside backward, before each of ten nodes runs."""
    live_tensors: list[int] = []
    recorder = Recorder()

    def function(x: Tensor) -> Tensor:
        for _ in range(10):
            x = x.exp()
            if is_recomputing():
                recorder(x)
            else:
                x.register_hook(lambda _: live_tensors.append(recorder.live()))
        return x

    x = torch.zeros(3, device=device, requires_grad=True)
    y = checkpoint(function, x * 0).sum()
    y.backward(retain_graph=retain_graph)
    # The hook of the last output runs before anything is rebuilt, the next ones after one use each.
    # The last exp of the recompute is stopped in its pack hook, so its output was never recorded.
    assert live_tensors == [0, *range(9, 0, -1)]
    assert recorder.live() == 0


@pytest.mark.parametrize("failing", [False, True])
def test_rebuilt_tensors_that_backward_did_not_use_go_at_its_end(failing: bool) -> None:
    recorder = Recorder()

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        outputs = recorder(x.exp()), recorder(y.exp())
        if failing and is_recomputing():
            raise ZeroDivisionError
        return *outputs, x.sin()

    x, y = (torch.randn(3, requires_grad=True) for _ in range(2))
    a, b, c = checkpoint(function, x, y)
    with pytest.raises(ZeroDivisionError) if failing else contextlib.nullcontext():
        a.sum().backward(retain_graph=True, inputs=[x])
    assert len(recorder.storages) == 4
    assert recorder.live() == len((a, b))
    failing = False
    c.sum().backward()


OUTCOMES = [
    "backward",
    "no backward",
    "retain_graph",
    "double backward",
    "forward raises",
    "recompute raises",
    "recompute differs",
    "nested",
    "offload",
]


def one_region(outcome: str, module: nn.Module, x: Tensor) -> None:
    def function(x: Tensor) -> Tensor:
        y = module(x)
        if outcome == "nested":
            y = checkpoint(module, y)
        if outcome == "forward raises" or (outcome == "recompute raises" and is_recomputing()):
            raise ZeroDivisionError
        if outcome == "recompute differs" and is_recomputing():
            return y
        return y.exp()

    try:
        y = checkpoint(function, x).sum()
        if outcome == "retain_graph":
            y.backward(retain_graph=True)
        if outcome == "double backward":
            (y,) = torch.autograd.grad(y, x, create_graph=True)
        if outcome != "no backward":
            y.sum().backward()
    except (ZeroDivisionError, RuntimeError):
        assert "raises" in outcome or "differs" in outcome


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_regions_die_with_their_graph(device: torch.device, outcome: str) -> None:
    module = mlp(dropout=0.1).to(device)
    if outcome == "offload":
        module = checkpoint_wrapper(module, offload_to_cpu=True)
    x = torch.randn(2, 8, device=device, requires_grad=True)
    with taken_for_an_accelerator(device), collector_disabled():
        one_region(outcome, module, x)
        before = live_tensors_and_regions()
        for _ in range(20):
            one_region(outcome, module, x)
        # Fewer, where a device's thread had kept an error of the first.
        for now, then in zip(live_tensors_and_regions(), before, strict=True):
            assert now <= then


@pytest.mark.slow
def test_a_thousand_regions_leave_nothing(device: torch.device) -> None:
    module = checkpoint_wrapper(mlp(dropout=0.1)).to(device)
    x = torch.randn(2, 8, device=device, requires_grad=True)

    def step() -> None:
        y = x
        for _ in range(10):
            y = module(y)
        y.sum().backward()
        module.zero_grad()
        x.grad = None

    step()
    with collector_disabled():
        before = live_objects(object)
        for _ in range(100):
            step()
        assert live_objects(object) - before < 10


def resident_bytes() -> int:
    """Of this process, from the kernel."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def step_of_ten_regions() -> Callable[[], None]:
    """A training step, whose regions end in turn in a view, an op of memopt and a region."""
    layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.1))
    norm = memopt.nn.LayerNormGELU(8)
    x = torch.randn(4, 8, requires_grad=True)
    weights = [x, *layers.parameters(), *norm.parameters()]
    endings = (
        lambda y: y.view(8, 4).t(),
        norm,
        lambda y: checkpoint(norm, y).exp(),
    )

    def region(y: Tensor, number: int) -> Tensor:
        return endings[number % 3](layers(y))

    def step() -> None:
        y = x
        for number in range(10):
            y = checkpoint(region, y, number).reshape(4, 8)
        y.sin().sum().backward()
        for weight in weights:
            weight.grad = None

    return step


@pytest.mark.slow
def test_ten_thousand_regions_need_no_more_memory_than_ten() -> None:
    """Also memory that no Python object owns; 2 MiB are 0.2 KiB for each region."""
    step = step_of_ten_regions()
    with collector_disabled():
        for _ in range(100):
            step()  # what allocators and caches keep
        before, resident = live_tensors_and_regions(), resident_bytes()
        for _ in range(1000):
            step()
        assert live_tensors_and_regions() == before
        assert resident_bytes() - resident < 2 * 2**20


def test_argument_dies_with_the_graph(device: torch.device) -> None:
    module = mlp().to(device)
    with collector_disabled():
        x = torch.randn(2, 8, device=device)
        storage = StorageWeakRef(x.untyped_storage())
        y = checkpoint(module, x)
        del x
        assert not storage.expired()
        del y
        assert storage.expired()


def test_wrapped_module_dies_by_reference_counting() -> None:
    with collector_disabled():
        module = checkpoint_wrapper(mlp(), maintain_forward_counter=True)
        module(torch.randn(2, 8)).sum().backward()
        ref = weakref.ref(module)
        del module
        assert ref() is None


def test_module_lives_as_long_as_a_graph_needs_it() -> None:
    """A model that is deleted before backward still recomputes."""
    module = checkpoint_wrapper(mlp())
    ref = weakref.ref(module)
    weight = module[0].weight
    y = module(torch.randn(2, 8))
    del module
    y.sum().backward()
    assert weight.grad is not None
    del y
    assert ref() is None


def test_region_in_torch_reentrant_checkpoint_leaves_nothing() -> None:
    module = mlp()
    x = torch.randn(2, 8, requires_grad=True)

    def step() -> None:
        torch_reentrant(lambda x: checkpoint(module, x).exp(), x).sum().backward()

    step()
    with collector_disabled():
        before = live_tensors_and_regions()
        for _ in range(10):
            step()
        assert live_tensors_and_regions() == before
