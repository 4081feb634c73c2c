"""Proves: every way to run backward works through regions: backward and autograd.grad, inputs=,
retain_graph and a second backward, double backward, several forwards before one backward, nested
regions, saved tensors read from outside or twice, backward inside the region, several threads; and
how often the function runs in each.
"""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import Tensor, nn

from memopt._checkpoint import checkpoint, is_recomputing
from tests.checkpoint.support import (
    CountCalls,
    mlp,
    plain,
    step_results,
    torch_non_reentrant,
    torch_reentrant,
)
from tests.support.bits import assert_same_bits


@pytest.fixture
def x(device: torch.device) -> Tensor:
    return torch.randn(4, 8, device=device, requires_grad=True)


@pytest.fixture
def model(device: torch.device) -> nn.Sequential:
    return mlp(dropout=0.2).to(device)


def test_grad_gives_what_backward_gives(x: Tensor, model: nn.Sequential) -> None:
    results = []
    for way in (plain, checkpoint):
        torch.manual_seed(0)
        results.append(torch.autograd.grad(way(model, x).sum(), [x, *model.parameters()]))
    assert_same_bits(results[1], results[0])


def test_backward_with_inputs(x: Tensor, model: nn.Sequential) -> None:
    checkpoint(model, x).sum().backward(inputs=[model[0].weight])
    assert model[0].weight.grad is not None
    assert x.grad is None
    assert model[3].weight.grad is None


def test_second_backward_runs_the_function_again(x: Tensor) -> None:
    count = CountCalls()
    y = checkpoint(lambda x: count(x).exp().sin(), x).sum()
    first = torch.autograd.grad(y, x, retain_graph=True)
    second = torch.autograd.grad(y, x)
    assert_same_bits(second, first)
    assert count.calls == 3
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, x)


def test_several_forwards_before_one_backward(x: Tensor, model: nn.Sequential) -> None:
    def losses(way) -> Tensor:
        return sum(way(model, x * i).square().sum() for i in range(1, 4))

    tensors = [x, *model.parameters()]
    assert_same_bits(
        step_results(lambda: losses(checkpoint), tensors),
        step_results(lambda: losses(plain), tensors),
    )


@pytest.mark.parametrize("depth", [1, 2])
def test_higher_derivatives(x: Tensor, depth: int) -> None:
    def derivative(way) -> list[Tensor]:
        y = way(lambda x: x.sin() * x.exp(), x)
        for _ in range(depth):
            (y,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return [y, *torch.autograd.grad(y.sum(), x)]

    assert_same_bits(derivative(checkpoint), derivative(plain))


def nested(depth: int, count: CountCalls, way=checkpoint):
    """Regions inside regions, each with work before and after the inner one."""
    if depth == 0:
        return lambda x: count(x).tanh()
    inner = nested(depth - 1, count, way)
    return lambda x: way(inner, x.sin()).exp().cos()


@pytest.mark.parametrize("depth", [1, 2, 5, 20])
def test_nested_regions(x: Tensor, depth: int) -> None:
    ours, theirs = CountCalls(), CountCalls()
    expected = step_results(lambda: nested(depth, CountCalls(), plain)(x), [x])
    assert_same_bits(step_results(lambda: checkpoint(nested(depth, ours), x), [x]), expected)
    step_results(lambda: torch_non_reentrant(nested(depth, theirs, torch_non_reentrant), x), [x])
    assert ours.calls == theirs.calls


def test_nested_regions_have_higher_derivatives(x: Tensor) -> None:
    def second(way) -> tuple[Tensor, ...]:
        y = way(nested(2, CountCalls(), way), x)
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return torch.autograd.grad(first.sum(), x)

    assert_same_bits(second(checkpoint), second(plain))


@pytest.mark.parametrize("inner", [torch_non_reentrant, torch_reentrant])
@pytest.mark.parametrize("ours_is_outside", [True, False])
def test_nesting_with_torch_checkpoint(
    x: Tensor, model: nn.Sequential, inner, ours_is_outside: bool
) -> None:
    outer, inner = (checkpoint, inner) if ours_is_outside else (inner, checkpoint)
    tensors = [x, *model.parameters()]

    def call(outer, inner) -> Tensor:
        return outer(lambda x: inner(model, x.sin()).exp(), x)

    assert_same_bits(
        step_results(lambda: call(outer, inner), tensors),
        step_results(lambda: call(plain, plain), tensors),
    )


def test_recompute_stops_when_everything_is_rebuilt(x: Tensor) -> None:
    before, after = CountCalls(), CountCalls()
    # The last tensor saved is the output of exp; nothing after it is needed.
    checkpoint(lambda x: after(before(x).exp() + 1), x).sum().backward()
    assert (before.calls, after.calls) == (2, 1)


def test_recompute_stops_where_nobody_needs_the_rest(x: Tensor) -> None:
    count = CountCalls()
    used, dropped = checkpoint(lambda x: (x.exp(), count(x.sin()).exp()), x)
    del dropped
    used.sum().backward()
    assert count.calls == 1
    assert torch.equal(x.grad, x.detach().exp())


def test_early_stop_passes_exception_handlers_of_the_function(x: Tensor) -> None:
    """The function may catch Exception without noticing, and clean up in finally."""
    log: list[str] = []

    def function(x: Tensor) -> Tensor:
        try:
            return x.exp()
        except Exception:
            log.append("caught")
            raise
        finally:
            log.append("cleaned up")

    checkpoint(function, x).sum().backward()
    assert log == ["cleaned up"] * 2


def test_function_that_catches_everything_still_gets_its_gradient(x: Tensor) -> None:
    def function(x: Tensor) -> Tensor:
        try:
            y = x.exp()
        except BaseException:
            y = x.sin()
        return y

    checkpoint(function, x).sum().backward()
    assert torch.equal(x.grad, x.detach().exp())


def test_partial_backward_leaves_later_backward_right(x: Tensor) -> None:
    """Only one of two outputs is used first; the other's saved tensors are rebuilt for both."""
    count = CountCalls()
    a, b = checkpoint(lambda x: (count(x).exp(), x.sin()), x)
    (first,) = torch.autograd.grad(a.sum(), x, retain_graph=True)
    (second,) = torch.autograd.grad(b.sum(), x)
    assert torch.equal(first, x.detach().exp())
    assert torch.equal(second, x.detach().cos())
    assert count.calls == 3


def test_saved_tensors_can_be_read_outside_of_backward(x: Tensor) -> None:
    count = CountCalls()
    y = checkpoint(lambda x: count(x).exp(), x)
    for calls in (2, 3):
        assert torch.equal(y.grad_fn._saved_result, x.exp())
        assert count.calls == calls
    y.sum().backward()
    assert torch.equal(x.grad, x.detach().exp())


def test_saved_tensors_can_be_read_by_several_threads(x: Tensor) -> None:
    def function(x: Tensor) -> Tensor:
        y = x.exp()
        if is_recomputing():
            time.sleep(0.01)  # lets the other threads in
        return y.sin()

    node = checkpoint(function, x).grad_fn
    read: list[bool] = []
    expected = x.detach().exp()

    def read_saved() -> None:
        read.append(torch.equal(node._saved_self, expected))

    threads = [threading.Thread(target=read_saved) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read == [True] * 4


def test_node_may_read_its_saved_tensors_twice(x: Tensor) -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, grad: Tensor) -> Tensor:
            (first,), (second,) = ctx.saved_tensors, ctx.saved_tensors
            return grad * (first + second)

    count = CountCalls()
    y = checkpoint(lambda x: Square.apply(x.sin()) + count(x).exp(), x).sum()
    y.backward(retain_graph=True)
    assert torch.allclose(x.grad, ((2 * x).sin() + x.exp()).detach(), atol=1e-6)
    # Once in forward, once in the first recompute; the second stops where it has what was asked.
    assert count.calls == 2


def test_derivative_taken_inside_the_region(x: Tensor) -> None:
    """Energy in, force out: the region differentiates its own graph in forward."""

    def force(x: Tensor) -> Tensor:
        energy = (x.sin() * x.exp()).sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0]

    assert_same_bits(
        step_results(lambda: checkpoint(force, x), [x]), step_results(lambda: force(x), [x])
    )


def test_derivative_of_one_argument_by_another_inside_the_region(x: Tensor) -> None:
    """The recompute gets the caller's tensors with their graph, not detached copies."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        return torch.autograd.grad(y.exp().sum(), x, create_graph=True)[0] * x

    assert_same_bits(
        step_results(lambda: checkpoint(function, x, x.sin()), [x]),
        step_results(lambda: function(x, x.sin()), [x]),
    )


def test_hooks_of_shared_parameters_fire_once(x: Tensor) -> None:
    linear = nn.Linear(8, 8).to(x.device)
    fired = []
    linear.weight.register_post_accumulate_grad_hook(lambda p: fired.append(p))
    y = checkpoint(linear, x)
    (checkpoint(linear, y) + linear(x)).sum().backward()
    assert len(fired) == 1


def test_tensor_hooks_inside_the_region_fire_once(x: Tensor) -> None:
    fired = []

    def function(x: Tensor) -> Tensor:
        y = x.sin()
        if y.requires_grad:
            y.register_hook(lambda grad: fired.append(grad.shape))
        return y.exp()

    checkpoint(function, x).sum().backward()
    assert fired == [x.shape]


def test_saved_tensor_hooks_around_and_inside(x: Tensor, model: nn.Sequential) -> None:
    tensors = [x, *model.parameters()]

    def around() -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return checkpoint(model, x.sin())

    def inside() -> Tensor:
        def function(x: Tensor) -> Tensor:
            with torch.autograd.graph.save_on_cpu():
                y = model(x)
            return y.exp()

        return checkpoint(function, x)

    assert_same_bits(step_results(around, tensors), step_results(lambda: model(x.sin()), tensors))
    assert_same_bits(step_results(inside, tensors), step_results(lambda: model(x).exp(), tensors))


def test_inputs_are_saved_where_hooks_around_see_them(x: Tensor) -> None:
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (seen.append(t), t)[1], lambda t: t):
        y = checkpoint(
            lambda a, *, b: (a * b["c"]).exp(), x, b={"c": torch.ones(8, device=x.device)}
        )
    assert [t.shape for t in seen] == [x.shape, (8,)]
    y.sum().backward()


def test_backward_in_several_threads_over_one_graph() -> None:
    """Each thread is a backward of its own through the same regions, dropout included."""
    model = nn.Sequential(*(mlp(dropout=0.5) for _ in range(3)))
    x = torch.randn(64, 8, requires_grad=True)
    torch.manual_seed(0)
    y = x
    for layer in model:
        y = checkpoint(layer, y)
    loss = y.sum()
    expected = torch.autograd.grad(loss, x, retain_graph=True)
    results: dict[int, list[tuple[Tensor, ...]]] = {i: [] for i in range(4)}

    def differentiate(i: int) -> None:
        for _ in range(10):
            results[i].append(torch.autograd.grad(loss, x, retain_graph=True))

    threads = [threading.Thread(target=differentiate, args=(i,)) for i in results]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(r) for r in results.values()] == [10] * 4
    for result in (r for rs in results.values() for r in rs):
        assert_same_bits(result, expected)
