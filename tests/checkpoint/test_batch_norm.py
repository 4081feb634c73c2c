"""Proves: running statistics move once, in forward, by what they move without checkpointing: batch
norm of every kind, SyncBatchNorm and instance norm, wrapped alone or inside, in nested regions,
through functions, with cumulative averages; modules keep their own buffers.
"""

from __future__ import annotations

import copy
import functools
import threading

import pytest
import torch
from torch import Tensor, nn

from memopt._checkpoint import checkpoint, checkpoint_wrapper, is_recomputing
from memopt._extension import _C
from tests.checkpoint.support import step_results
from tests.support.bits import assert_same_bits

# Layer and the shape of its input.
LAYERS = {
    "BatchNorm1d": (lambda: nn.BatchNorm1d(3), (4, 3)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(3), (4, 3, 5, 5)),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(3), (2, 3, 2, 2, 2)),
    "LazyBatchNorm1d": (lambda: nn.LazyBatchNorm1d(), (4, 3)),
    "SyncBatchNorm": (lambda: nn.SyncBatchNorm(3), (4, 3)),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(3, track_running_stats=True), (4, 3, 5)),
    "cumulative average": (lambda: nn.BatchNorm1d(3, momentum=None), (4, 3)),
    "cumulative synchronised": (lambda: nn.SyncBatchNorm(3, momentum=None), (4, 3)),
    "no statistics": (lambda: nn.BatchNorm1d(3, track_running_stats=False), (4, 3)),
    "float16": (lambda: nn.BatchNorm1d(3, dtype=torch.float16), (4, 3)),
    "eval": (lambda: nn.BatchNorm1d(3).eval(), (4, 3)),
}


def as_it_is(layer: nn.Module) -> nn.Module:
    return checkpoint_wrapper(layer)


def inside(layer: nn.Module) -> nn.Module:
    return checkpoint_wrapper(nn.Sequential(nn.Identity(), layer))


def wrapped_twice(layer: nn.Module) -> nn.Module:
    return checkpoint_wrapper(nn.Sequential(checkpoint_wrapper(layer), nn.Tanh()))


class Calls(nn.Module):
    """Calls a layer through a function region."""

    def __init__(self, layer: nn.Module, call) -> None:
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, x)


by_function = {
    "module": lambda self, x: checkpoint(self.layer, x),
    "method": lambda self, x: checkpoint(self.layer.forward, x),
    "closure": lambda self, x: checkpoint(lambda y: self.layer(y), x),
    "default": lambda self, x: checkpoint(lambda y, f=self.layer: f(y), x),
    "partial": lambda self, x: checkpoint(functools.partial(_apply, self.layer), x),
    "argument": lambda self, x: checkpoint(_apply, self.layer, x),
    "container": lambda self, x: checkpoint(lambda y, f: f["f"][0](y), x, {"f": [self.layer]}),
}


def _apply(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)


wrappings = {"as it is": as_it_is, "inside": inside, "wrapped twice": wrapped_twice} | {
    f"by {name}": functools.partial(Calls, call=call) for name, call in by_function.items()
}


@pytest.mark.parametrize("wrap", wrappings.values(), ids=wrappings.keys())
@pytest.mark.parametrize(("make", "size"), LAYERS.values(), ids=LAYERS.keys())
def test_statistics_after_two_steps(make, size, wrap, device: torch.device) -> None:
    expected_layer = make().to(device)
    expected_layer(torch.randn(size, device=device, dtype=_dtype(expected_layer)))
    layer = copy.deepcopy(expected_layer)
    own_buffers = list(layer.buffers())
    expected_model = nn.Sequential(nn.Identity(), expected_layer)
    if wrap is wrapped_twice:
        expected_model.append(nn.Tanh())
    model = wrap(layer)
    for seed in range(2):
        x = torch.randn(size, device=device, dtype=_dtype(layer), requires_grad=True)
        assert_same_bits(
            step_results(lambda x=x: model(x), [x, *layer.parameters()], seed),
            step_results(lambda x=x: expected_model(x), [x, *expected_layer.parameters()], seed),
        )
        assert_same_bits(layer.buffers(), expected_layer.buffers())
    assert all(a is b for a, b in zip(layer.buffers(), own_buffers, strict=True))


def _dtype(layer: nn.Module) -> torch.dtype:
    parameter = next(iter(layer.parameters()), None)
    if parameter is None or isinstance(parameter, nn.parameter.UninitializedParameter):
        return torch.float32
    return parameter.dtype


def test_statistics_move_in_forward_even_without_backward() -> None:
    layer = checkpoint_wrapper(nn.BatchNorm1d(3))
    layer(torch.randn(4, 3))
    assert layer.num_batches_tracked.item() == 1


def test_statistics_move_once_for_each_forward_with_retain_graph() -> None:
    layer = nn.BatchNorm1d(3)
    x = torch.randn(4, 3, requires_grad=True)
    loss = checkpoint(layer, x).exp().sum()
    statistics = [buffer.clone() for buffer in layer.buffers()]
    for _ in range(3):
        torch.autograd.grad(loss, x, retain_graph=True)
    assert layer.num_batches_tracked.item() == 1
    assert_same_bits(layer.buffers(), statistics)


def test_overlapping_recomputes_in_two_threads_give_the_buffers_back() -> None:
    """The second thread enters while the first is inside, and leaves after it."""
    layer = nn.BatchNorm1d(3)
    own_buffers = list(layer.buffers())
    first_is_in, second_is_in, first_is_out = (threading.Event() for _ in range(3))

    class Waits(nn.Module):
        def __init__(self, role: str) -> None:
            super().__init__()
            self.role, self.layer = role, layer

        def forward(self, x: Tensor) -> Tensor:
            if is_recomputing():
                if self.role == "first":
                    first_is_in.set()
                    assert second_is_in.wait(10)
                else:
                    assert first_is_in.wait(10)
                    second_is_in.set()
                    assert first_is_out.wait(10)
            return self.layer(x).exp()

    def backward(role: str, loss: Tensor) -> None:
        loss.backward()
        if role == "first":
            first_is_out.set()

    x = torch.randn(4, 3)
    losses = {role: checkpoint(Waits(role), x).sum() for role in ("first", "second")}
    statistics = [buffer.clone() for buffer in own_buffers]
    threads = [threading.Thread(target=backward, args=item) for item in losses.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(a is b for a, b in zip(layer.buffers(), own_buffers, strict=True))
    assert_same_bits(own_buffers, statistics)


batch_norm_in_a_global = nn.BatchNorm1d(3)


def test_module_in_a_global_variable() -> None:
    before = batch_norm_in_a_global.num_batches_tracked.item()
    x = torch.randn(4, 3, requires_grad=True)
    checkpoint(lambda x: batch_norm_in_a_global(x).exp(), x).sum().backward()
    assert batch_norm_in_a_global.num_batches_tracked.item() == before + 1


def test_callable_object_that_is_no_module() -> None:
    class Runner:
        def __init__(self) -> None:
            self.layer = nn.BatchNorm1d(3)

        def __call__(self, x: Tensor) -> Tensor:
            return self.layer(x).exp()

    runner = Runner()
    checkpoint(runner, torch.randn(4, 3, requires_grad=True)).sum().backward()
    assert runner.layer.num_batches_tracked.item() == 1


def test_search_for_modules_ends_in_cycles_and_empty_cells() -> None:
    layer = nn.BatchNorm1d(1)
    loop: list[object] = [layer]
    loop.append(loop)

    def function() -> object:
        return function, loop, unassigned

    assert _C.modules_reached(function) == [layer]
    unassigned = None
