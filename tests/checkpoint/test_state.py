"""Proves: what a result depends on besides arguments is in the recompute what it was in forward
(random generators, autocast, default device, the thread's flags), and afterwards as it was before,
also when forward or recompute raises; the exception that comes out is the function's own.
"""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

from memopt._checkpoint import (
    checkpoint,
    checkpoint_wrapper,
    disable_checkpointing,
    is_checkpointing,
    is_recomputing,
)
from tests.checkpoint.support import CountCalls, mlp, plain, step_results
from tests.support.bits import assert_same_bits


class Failure(Exception):
    """Raised by a function under test."""


def context_state(device: torch.device) -> list[object]:
    """Everything that a region may change while it runs, in a form that compares."""
    return [
        torch.get_rng_state().tolist(),
        torch.cuda.get_rng_state(device).tolist() if device.type == "cuda" else None,
        torch.is_autocast_enabled(device.type),
        torch.get_autocast_dtype(device.type),
        torch.is_autocast_cache_enabled(),
        torch.get_default_device(),
        torch.is_grad_enabled(),
        is_checkpointing(),
        is_recomputing(),
    ]


def in_each_place(x: Tensor) -> dict[str, tuple[tuple, dict]]:
    return {
        "positional": ((x,), {}),
        "keyword": ((), {"x": x}),
        "nested": ((), {"x": {"a": [x]}}),
    }


@pytest.mark.parametrize("place", ["positional", "keyword", "nested"])
def test_random_numbers_of_the_arguments_device(device: torch.device, place: str) -> None:
    x = torch.randn(1000, device=device, requires_grad=True)

    def function(x) -> Tensor:
        while not isinstance(x, Tensor):
            x = next(iter(x.values())) if isinstance(x, dict) else x[0]
        return nn.functional.dropout(x, 0.5).exp() * torch.rand_like(x)

    args, kwargs = in_each_place(x)[place]
    assert_same_bits(
        step_results(lambda: checkpoint(function, *args, **kwargs), [x]),
        step_results(lambda: function(*args, **kwargs), [x]),
    )


def test_random_numbers_after_backward_go_on_as_in_the_plain_run(device: torch.device) -> None:
    """Whether anything was recomputed cannot be seen from the numbers drawn later."""
    model = mlp(dropout=0.5).to(device)
    x = torch.randn(4, 8, device=device, requires_grad=True)
    states = []
    for way in (plain, checkpoint):
        torch.manual_seed(0)
        loss = way(model, x).sum()
        torch.randn(3, device=device)  # so that backward does not end where forward did
        loss.backward()
        states.append(context_state(device))
    assert states[0] == states[1]


def test_generators_that_forward_did_not_use_are_left_alone(device: torch.device) -> None:
    """Backward of a region without random numbers may run beside code that draws some."""
    drawn: list[float] = []

    def function(x: Tensor) -> Tensor:
        if is_recomputing():
            thread = threading.Thread(target=lambda: drawn.append(torch.rand(1).item()))
            thread.start()
            thread.join()
        return x.exp()

    checkpoint(function, torch.randn(3, device=device, requires_grad=True)).sum().backward()
    assert torch.rand(1).item() != drawn[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("cache", [True, False])
def test_autocast_is_replayed(device: torch.device, dtype: torch.dtype, cache: bool) -> None:
    seen = []

    def function(x: Tensor) -> Tensor:
        seen.append(context_state(device)[2:5])
        return (x @ x).exp()

    x = torch.randn(4, 4, device=device, requires_grad=True)
    with torch.autocast(device.type, dtype, cache_enabled=cache):
        y = checkpoint(function, x)
    y.sum().backward()
    assert seen == [[True, dtype, cache]] * 2


def test_autocast_switched_off_inside_autocast(device: torch.device) -> None:
    seen = []

    def function(x: Tensor) -> Tensor:
        seen.append((x @ x).dtype)
        return x.exp()

    x = torch.randn(4, 4, device=device, requires_grad=True)
    with torch.autocast(device.type, torch.bfloat16):
        with torch.autocast(device.type, enabled=False):
            y = checkpoint(function, x)
        y.sum().backward()
    assert seen == [torch.float32] * 2


def test_default_device_is_replayed() -> None:
    seen = []

    def function(x: Tensor) -> Tensor:
        seen.append(torch.empty(1).device.type)
        return x.exp()

    x = torch.randn(3, requires_grad=True)
    with torch.device("meta"):
        y = checkpoint(function, x)
    y.sum().backward()
    with torch.device("meta"):
        torch.ones(1)
    z = checkpoint(function, x)
    with torch.device("meta"):
        z.backward(torch.ones(3, device="cpu"))
    assert seen == ["meta", "meta", "cpu", "cpu"]


def test_default_dtype_is_replayed_and_put_back() -> None:
    seen = []

    def function(x: Tensor) -> Tensor:
        seen.append(torch.empty(1).dtype)
        return x.exp()

    x = torch.randn(3, requires_grad=True)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        y = checkpoint(function, x)
        torch.set_default_dtype(torch.float32)
        y.sum().backward()
        assert torch.get_default_dtype() == torch.float32
    finally:
        torch.set_default_dtype(before)
    assert seen == [torch.float64] * 2


def flags() -> tuple[bool, bool]:
    return is_checkpointing(), is_recomputing()


def test_flags_tell_forward_from_recompute() -> None:
    seen = []
    x = torch.randn(3, requires_grad=True)
    y = checkpoint(lambda x: (seen.append(flags()), x.exp())[1], x)
    assert flags() == (False, False)
    y.sum().backward()
    assert flags() == (False, False)
    assert seen == [(True, False), (False, True)]


def test_flags_in_nested_regions() -> None:
    """A nested region that is called by a recompute is part of that recompute."""
    outer, inner = [], []
    x = torch.randn(3, requires_grad=True)

    def inner_function(x: Tensor) -> Tensor:
        inner.append(flags())
        return x.exp()

    def outer_function(x: Tensor) -> Tensor:
        outer.append(flags())
        return checkpoint(inner_function, x.sin()).cos()

    checkpoint(outer_function, x).sum().backward()
    assert outer == [(True, False), (False, True)]
    assert inner == [(True, False), (False, True), (False, True)]


def test_flags_belong_to_the_thread() -> None:
    seen = []

    def function(x: Tensor) -> Tensor:
        thread = threading.Thread(target=lambda: seen.append(flags()))
        thread.start()
        thread.join()
        return x.exp()

    checkpoint(function, torch.randn(3, requires_grad=True)).sum().backward()
    assert seen == [(False, False)] * 2


def test_flags_without_gradients() -> None:
    seen = []
    with torch.no_grad():
        checkpoint(lambda: seen.append(flags()))
    assert seen == [(False, False)]


def test_disable_checkpointing_makes_calls_plain() -> None:
    count = CountCalls()
    module = checkpoint_wrapper(nn.Sequential(count, nn.Linear(3, 3), nn.Tanh()))
    with disable_checkpointing():
        module(torch.randn(2, 3)).sum().backward()
        assert count.calls == 1
        checkpoint(module, torch.randn(2, 3)).sum().backward()
        assert count.calls == 2
    module(torch.randn(2, 3)).sum().backward()
    assert count.calls == 4


def test_disable_checkpointing_around_backward_changes_nothing() -> None:
    """Nested regions are called in the recompute as in forward, or other tensors would be saved."""
    x = torch.randn(3, requires_grad=True)

    def call() -> Tensor:
        return checkpoint(lambda x: checkpoint(lambda x: x.sin().exp().sum(), x.exp()).cos(), x)

    expected = step_results(call, [x])
    y = call()
    with disable_checkpointing():
        y.double().square().mean().backward()
    assert torch.equal(x.grad, expected[1])


def test_disable_checkpointing_ends_when_its_scope_raises() -> None:
    with pytest.raises(Failure), disable_checkpointing():
        raise Failure
    count = CountCalls()
    checkpoint(lambda x: count(x).exp(), torch.randn(3, requires_grad=True)).sum().backward()
    assert count.calls == 2


class FailsIn(nn.Module):
    """Draws a number, saves a tensor, and raises in forward or in the recompute."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.in_recompute = recompute
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            x = self.norm(nn.functional.dropout(x.exp())).exp()
            if is_recomputing() == self.in_recompute:
                raise Failure("the original")
        return x.exp()


def test_exception_in_forward(device: torch.device) -> None:
    """The state is what the plain call would have left, flags and hooks included."""
    module = FailsIn(recompute=False).to(device)
    x = torch.randn(3, 4, device=device, requires_grad=True)
    states, buffers = [], []
    for way in (plain, checkpoint):
        torch.manual_seed(0)
        module.norm.reset_running_stats()
        with pytest.raises(Failure, match="the original"):
            way(module, x)
        states.append(context_state(device))
        buffers.append([buffer.clone() for buffer in module.norm.buffers()])
    assert states[1] == states[0]
    assert_same_bits(buffers[1], buffers[0])
    assert isinstance(x.exp().grad_fn._saved_result, Tensor)  # no hook is left behind


def test_exception_in_the_recompute(device: torch.device) -> None:
    module = FailsIn(recompute=True).to(device)
    x = torch.randn(3, 4, device=device, requires_grad=True)
    y = checkpoint(module, x).sum()
    torch.randn(3, device=device)  # so that the recompute does not raise where forward ended
    before = context_state(device), [buffer.clone() for buffer in module.norm.buffers()]
    own_buffers = list(module.norm.buffers())
    with pytest.raises(Failure, match="the original"):
        y.backward(retain_graph=True)
    assert context_state(device) == before[0]
    assert all(a is b for a, b in zip(module.norm.buffers(), own_buffers, strict=True))
    assert_same_bits(module.norm.buffers(), before[1])
    module.in_recompute = False  # the region is still of use
    with pytest.raises(Failure):
        checkpoint(module, x)
    module.in_recompute = None
    y.backward()
    assert x.grad is not None
