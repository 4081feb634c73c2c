"""Proves: options of torch.utils.checkpoint.checkpoint(use_reentrant=False) and the three scopes
of that module mean for memopt.checkpoint what they mean for PyTorch's: the debug log, early stop
(on, off, and mixed in nested regions), groups of backward calls.
"""

from __future__ import annotations

import collections
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import checkpoint as torch_checkpoint

from memopt._checkpoint import (
    apply_activation_checkpointing,
    checkpoint,
    checkpoint_sequential,
    checkpoint_wrapper,
    is_recomputing,
)
from tests.checkpoint.support import WAYS, CountCalls, every_way, torch_non_reentrant
from tests.support.bits import assert_same_bits


@pytest.fixture
def x() -> Tensor:
    return torch.randn(4, requires_grad=True)


def parts_from_its_forward(x: Tensor) -> Tensor:
    y = x.exp()
    if is_recomputing():
        return y.cos()[:2]  # the first line that differs
    return y.tanh().sin()


LINE_OF_COS = inspect.getsourcelines(parts_from_its_forward)[1] + 3
LINE_OF_TANH = LINE_OF_COS + 1


@pytest.mark.parametrize("scope", [True, False])
def test_debug_names_the_first_operator_that_differs_and_its_line(scope: bool, x: Tensor) -> None:
    with torch_checkpoint.set_checkpoint_debug_enabled(True) if scope else nullcontext():
        y = checkpoint(parts_from_its_forward, x, debug=not scope)
    with pytest.raises(RuntimeError) as error:
        y.sum().backward()
    message = str(error.value)
    assert "operator 1 is the first that differs" in message
    assert f"aten.tanh.default(float32[4]) at {__file__}:{LINE_OF_TANH}" in message
    assert f"aten.cos.default(float32[4]) at {__file__}:{LINE_OF_COS}" in message


def test_the_debug_scope_goes_before_the_argument(x: Tensor) -> None:
    with torch_checkpoint.set_checkpoint_debug_enabled(False):
        y = checkpoint(parts_from_its_forward, x, debug=True)
    with pytest.raises(RuntimeError) as error:
        y.sum().backward()
    assert "first that differs" not in str(error.value)


def test_debug_does_not_change_gradients(x: Tensor) -> None:
    gradients = [
        torch.autograd.grad(checkpoint(lambda x: x.exp().sin(), x, debug=debug).sum(), x)
        for debug in (False, True)
    ]
    assert_same_bits(gradients[1], gradients[0])


def chain(count: CountCalls) -> Callable[[Tensor], Tensor]:
    """Nothing after the sin is needed for backward."""
    return lambda x: count(x.exp().sin() + 1)


@every_way
@pytest.mark.parametrize("scope", [None, True, False])
@pytest.mark.parametrize("argument", [True, False])
def test_early_stop_by_argument_and_by_scope(
    way: Callable[..., Any], scope: bool | None, argument: bool, x: Tensor
) -> None:
    """The scope holds where forward runs and goes before the argument."""
    count = CountCalls()
    with nullcontext() if scope is None else torch_checkpoint.set_checkpoint_early_stop(scope):
        y = way(chain(count), x, early_stop=argument)
    y.sum().backward()
    stops = argument if scope is None else scope
    assert count.calls == (1 if stops else 2)


@pytest.mark.parametrize("scope", [None, True, False])
@pytest.mark.parametrize("argument", [True, False])
@pytest.mark.parametrize("way", ["checkpoint_wrapper", "apply_activation_checkpointing"])
def test_early_stop_of_wrapped_modules(
    way: str, argument: bool, scope: bool | None, x: Tensor
) -> None:
    count = CountCalls()

    class Chain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return count(x.exp().sin() + 1)

    model = nn.Sequential(Chain())
    if way == "checkpoint_wrapper":
        checkpoint_wrapper(model[0], early_stop=argument)
    else:
        apply_activation_checkpointing(model, check_fn=Chain, early_stop=argument)
    with nullcontext() if scope is None else torch_checkpoint.set_checkpoint_early_stop(scope):
        y = model(x)
    y.sum().backward()
    stops = argument if scope is None else scope
    assert count.calls == (1 if stops else 2)


@pytest.mark.parametrize("scope", [True, False])
def test_early_stop_of_a_sequence_by_scope(scope: bool, x: Tensor) -> None:
    count = CountCalls()
    with torch_checkpoint.set_checkpoint_early_stop(scope):
        y = checkpoint_sequential([chain(count), torch.neg], 2, x)
    y.sum().backward()
    assert count.calls == (1 if scope else 2)


def nested(
    way: Callable[..., Any], stops: list[bool], ran: list[str]
) -> Callable[[Tensor], Tensor]:
    """One region in another for each of `stops`, with a mark before and a mark after it."""
    if not stops:
        return lambda x: x.exp()

    def function(x: Tensor) -> Tensor:
        ran.append(f"before {len(stops)}")
        y = way(inner, x.sin(), early_stop=stops[0])
        ran.append(f"after {len(stops)}")
        return y.cos() + 1

    inner = nested(way, stops[1:], ran)
    return function


def plain_with_option(fn: Callable[..., Any], x: Tensor, *, early_stop: bool) -> Any:
    """No region, but its signature."""
    return fn(x)


@pytest.mark.parametrize("middle", [True, False])
@pytest.mark.parametrize("inner", [True, False])
@pytest.mark.parametrize("outer", [True, False])
@pytest.mark.parametrize("derivatives", [1, 2, 3])
def test_nested_regions_run_as_often_as_in_torch(
    outer: bool, middle: bool, inner: bool, derivatives: int, x: Tensor
) -> None:
    """PyTorch's own run is the oracle. In higher derivatives, where a part of the tensors is in use
    no more, memopt stops earlier and so may run less, but nothing twice that PyTorch runs once.
    """
    runs, gradients = [], []
    for way in (plain_with_option, *WAYS):
        ran: list[str] = []
        y = way(nested(way, [middle, inner], ran), x, early_stop=outer)
        for _ in range(derivatives - 1):
            (y,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        gradients.append(torch.autograd.grad(y.sum(), x))
        runs.append(collections.Counter(ran))
    assert_same_bits(gradients[1], gradients[0])
    assert runs[0] < runs[1] <= runs[2]
    if derivatives == 1:
        assert runs[1] == runs[2]


@every_way
@pytest.mark.parametrize("early_stop", [True, False])
def test_a_nested_region_that_saves_nothing_is_not_run_again(
    way: Callable[..., Any], early_stop: bool, x: Tensor
) -> None:
    count = CountCalls()
    with torch_checkpoint.set_checkpoint_early_stop(early_stop):
        way(lambda x: way(lambda x: count(x) + 1, x) * 2, x).sum().backward()
    assert count.calls == 1


@every_way
@pytest.mark.parametrize("grouped", [False, True])
def test_a_group_of_backward_calls_recomputes_once(
    way: Callable[..., Any], grouped: bool, x: Tensor
) -> None:
    """Two backward calls over parts that do not overlap, as a pipeline makes them."""
    count = CountCalls()

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        x = count(x)
        return x.exp(), x.sin()

    a, b = way(function, x)
    with torch_checkpoint.GraphExecGroup() if grouped else nullcontext():
        (first,) = torch.autograd.grad(a.sum(), x, retain_graph=True)
        (second,) = torch.autograd.grad(b.sum(), x)
    assert count.calls == (2 if grouped else 3)
    assert torch.equal(first, x.detach().exp())
    assert torch.equal(second, x.detach().cos())


def group_at(address: int) -> torch_checkpoint.GraphExecGroup:
    """A new group there, as comes about by chance; or anywhere, if nothing lets that memory go."""
    groups = []
    for _ in range(200):
        groups.append(torch_checkpoint.GraphExecGroup())
        if id(groups[-1]) == address:
            break
    return groups[-1]


@every_way
def test_each_group_recomputes_once(way: Callable[..., Any], x: Tensor) -> None:
    count = CountCalls()
    y = way(lambda x: count(x).exp().sin().tanh(), x).sum()
    gradients, calls = [], []
    address = 0
    for _ in range(3):
        group = group_at(address)
        with group:
            gradients.append(torch.autograd.grad(y, x, retain_graph=True))
        calls.append(count.calls)
        address = id(group)
        del group
    assert calls == [2, 3, 4]
    assert_same_bits(gradients[2], gradients[0])


def test_rebuilt_tensors_that_a_group_did_not_use_go_with_the_graph(x: Tensor) -> None:
    """Until then a later backward of the group may want them."""
    a, b = checkpoint(lambda x: (x.exp(), x.sin()), x)
    with torch_checkpoint.GraphExecGroup():
        torch.autograd.grad(a.sum(), x, retain_graph=True)
    (after,) = torch.autograd.grad(b.sum(), x)
    assert torch.equal(after, x.detach().cos())


@pytest.mark.parametrize("use_reentrant", [False, None])
def test_code_that_names_the_non_reentrant_kind_runs(use_reentrant: bool | None, x: Tensor) -> None:
    checkpoint(torch.exp, x, use_reentrant=use_reentrant).sum().backward()
    assert torch.equal(x.grad, x.detach().exp())


BAD_OPTIONS = {
    "use_reentrant must be False .*, got True": {"use_reentrant": True},
    "determinism_check must be one of .*, got 'all'": {"determinism_check": "all"},
    "debug must not be combined with .*context_fn, got ": {
        "debug": True,
        "context_fn": lambda: (nullcontext(), nullcontext()),
    },
}


@pytest.mark.parametrize("message", BAD_OPTIONS)
def test_options_that_are_refused(message: str, x: Tensor) -> None:
    with pytest.raises(ValueError, match=f"^checkpoint: {message}"):
        checkpoint(torch.exp, x, **BAD_OPTIONS[message])


@every_way
def test_the_debug_scope_refuses_contexts_as_the_argument_does(
    way: Callable[..., Any], x: Tensor
) -> None:
    """They would be dropped."""
    with (
        torch_checkpoint.set_checkpoint_debug_enabled(True),
        pytest.raises(ValueError, match="debug"),
    ):
        way(torch.exp, x, context_fn=lambda: (nullcontext(), nullcontext()))


def written_by_the_caller(way: Callable[..., Any], x: Tensor) -> Tensor:
    h = x.sin()
    y = way(lambda h: h.exp() * h, h)
    h.mul_(2)
    return y * h


def written_by_the_function(way: Callable[..., Any], x: Tensor) -> Tensor:
    def function(h: Tensor) -> Tensor:
        h.add_(1)
        return h.exp()

    return way(function, x.sin())


@pytest.mark.parametrize(
    ("step", "way"),
    [
        (written_by_the_caller, checkpoint),
        (written_by_the_caller, torch_non_reentrant),
        (written_by_the_function, checkpoint),  # where PyTorch's gives other gradients
    ],
)
def test_arguments_written_where_pytorch_copies_what_is_written(
    step: Callable[..., Tensor], way: Callable[..., Any], x: Tensor
) -> None:
    """In PyTorch's scope the hooks have the values of forward."""
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        (expected,) = torch.autograd.grad(step(lambda fn, h: fn(h), x).sum(), x)
        y = step(way, x)
        for _ in range(2):
            (got,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
            assert torch.equal(got, expected)


def test_an_argument_that_was_not_copied_is_noticed_there(x: Tensor) -> None:
    h = x.detach().sin()
    y = checkpoint(lambda x, h: (x * h).exp(), x, h)
    h.mul_(2)
    with (
        torch.autograd.graph.allow_mutation_on_saved_tensors(),
        pytest.raises(RuntimeError, match="positional argument 1 of region"),
    ):
        y.sum().backward()
