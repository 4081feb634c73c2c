"""Proves: what was found of one call says nothing of another one. A call that does not work on each
row alone is refused by name though an earlier one, of other rows, arguments, attributes, closures
or in another mode, ran in chunks; a call like an earlier one is not probed again. What is known
keeps nothing alive, and has an end; what inference mode made runs whole.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import memopt
from memopt._checkpoint import known_rows, rows
from memopt._checkpoint.rows import why_not_rows
from tests.checkpoint.support import mlp

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))

DIM = -1

run = partial(memopt.checkpoint, chunks=3)


def softmax(x: Tensor, dim: int) -> Tensor:
    return x.softmax(dim)


def calling(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: function(x)


class Mixing(nn.Module):
    """Mixes rows if it is asked to, by an argument or an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.dim = -1
        self.after: Callable[[Tensor], Tensor] = F.relu

    def forward(self, x: Tensor, mix: bool = False, mask: Tensor | None = None) -> Tensor:
        y = self.after(self.linear(x)).softmax(self.dim)
        return y.softmax(0) if mix or mask is not None else y


def module() -> Mixing:
    return memopt.checkpoint_wrapper(Mixing(), chunks=3)


def one_row_first() -> None:
    over_rows = partial(softmax, dim=0)
    run(over_rows, X[0])
    run(over_rows, X)


def no_rows_first() -> None:
    over_rows = partial(softmax, dim=0)
    run(over_rows, X[:0])
    run(over_rows, X)


def other_argument() -> None:
    run(softmax, X, -1)
    run(softmax, X, 0)


def other_argument_of_a_partial() -> None:
    run(partial(softmax, dim=-1), X)
    run(partial(softmax, dim=0), X)


def other_closure() -> None:
    run(calling(F.gelu), X)
    run(calling(lambda x: x.softmax(0)), X)


def other_closure_of_a_closure() -> None:
    run(calling(calling(calling(F.gelu))), X)
    run(calling(calling(calling(lambda x: x.softmax(0)))), X)


def other_value_in_a_list() -> None:
    dims = [-1]

    def listed(x: Tensor) -> Tensor:
        return x.softmax(dims[0])

    run(listed, X)
    dims[0] = 0
    run(listed, X)


def other_global() -> None:
    def over_rows(x: Tensor) -> Tensor:
        return x.softmax(DIM)

    with pytest.MonkeyPatch.context() as patch:
        run(over_rows, X)
        patch.setitem(globals(), "DIM", 0)
        run(over_rows, X)


def other_number_of_dims() -> None:
    run(partial(softmax, dim=1), X)
    run(partial(softmax, dim=1), X.reshape(2, 3, 8))


def other_keyword() -> None:
    mixing = module()
    mixing(X)
    mixing(X, mix=True)


def a_tensor_in_place_of_none() -> None:
    mixing = module()
    mixing(X)
    mixing(X, mask=torch.ones(3))


def other_attribute() -> None:
    mixing = module()
    mixing(X)
    mixing.dim = 0
    mixing(X)


def other_function_as_an_attribute() -> None:
    mixing = module()
    mixing.after = F.gelu
    mixing(X)
    mixing.after = lambda x: x.softmax(0)
    mixing(X)


def in_inference_mode() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0).eval()
    memopt.checkpoint_wrapper(layer, chunks=3)
    with torch.inference_mode():
        layer(X.reshape(2, 3, 8) * 1)


def under_a_dispatch_mode() -> None:
    with FlopCounterMode(display=False):
        run(lambda x: x.softmax(0), X)


def in_a_region_that_keeps_decisions() -> None:
    def over_rows(x: Tensor) -> Tensor:
        return run(lambda x: x.softmax(0), x)

    memopt.checkpoint(over_rows, X.clone().requires_grad_(), keep_decisions=True)


@pytest.mark.parametrize(
    "calls",
    [
        one_row_first,
        no_rows_first,
        other_argument,
        other_argument_of_a_partial,
        other_closure,
        other_closure_of_a_closure,
        other_value_in_a_list,
        other_global,
        other_number_of_dims,
        other_keyword,
        a_tensor_in_place_of_none,
        other_attribute,
        other_function_as_an_attribute,
        in_inference_mode,
        under_a_dispatch_mode,
        in_a_region_that_keeps_decisions,
    ],
)
def test_the_last_call_is_refused(calls: Callable[[], None]) -> None:
    with pytest.raises(ValueError, match="needs a call that works on each row alone"):
        calls()


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls that are probed from now on."""
    probed: list[Any] = []

    def counted(fn: Any, *rest: Any) -> str:
        probed.append(fn)
        return why_not_rows(fn, *rest)

    monkeypatch.setattr(rows, "why_not_rows", counted)
    return probed


def test_a_call_like_an_earlier_one_is_not_probed_again(probes: list[Any]) -> None:
    model = memopt.checkpoint_wrapper(mlp(), chunks=3)
    width = model[0].in_features

    def function(x: Tensor, dim: int) -> Tensor:
        return x.softmax(dim)

    for count in (6, 7, 6):
        model(torch.randn(count, width))
        run(function, X * count, -1)
    assert len(probes) == 2
    model.eval()
    model(torch.randn(6, width))
    assert len(probes) == 3


def test_functions_that_are_made_anew_are_known_by_what_they_close_over(probes: list[Any]) -> None:
    def made(scale: float) -> Callable[[Tensor], Tensor]:
        return lambda x: (x * scale).tanh()

    for scale in (2.0, 2.0, 3.0, 2.0):
        run(made(scale), X)
    assert len(probes) == 2


def test_what_a_call_used_dies_with_it() -> None:
    """Its objects and modules, be they made anew in each step."""

    class Trainer:
        def __init__(self) -> None:
            self.linear = nn.Linear(8, 8)

        def __call__(self, x: Tensor) -> Tensor:
            return self.linear(x)

    used: list[weakref.ref[Any]] = []

    def step() -> None:
        trainer, hidden = Trainer(), [torch.randn(8)]
        linear = trainer.linear
        run(lambda x: trainer(linear(x)) + hidden[0], X)
        run(lambda x: trainer(x), X)
        used.extend(map(weakref.ref, (trainer, linear, hidden[0])))

    for _ in range(3):
        step()
    gc.collect()
    assert [ref() for ref in used] == [None] * 9


def test_an_object_at_the_address_of_a_dead_one_is_another_one() -> None:
    class Softmax:
        def __init__(self, dim: int) -> None:
            self.dim = dim

        def __call__(self, x: Tensor) -> Tensor:
            return x.softmax(self.dim)

    for _ in range(3):
        run(Softmax(-1), X)
        with pytest.raises(ValueError, match="depends on other rows"):
            run(Softmax(0), X)


def test_what_inference_mode_made_runs_whole() -> None:
    """Be it a module, or a tensor that a function closes over: no probe can run backward."""
    module = nn.Linear(8, 8)
    with torch.inference_mode():
        made, scale = nn.Linear(8, 8), torch.rand(8)
        for function in (made, lambda x: module(x) * scale, lambda x: (x * scale).softmax(0)):
            assert torch.equal(run(function, X), function(X))


def test_memopt_s_own_counter_has_nothing_probed_again(probes: list[Any]) -> None:
    model = memopt.checkpoint_wrapper(nn.Linear(8, 8), chunks=3, maintain_forward_counter=True)
    for _ in range(3):
        model(X.clone().requires_grad_()).sum().backward()
    assert len(probes) == 1


def test_who_is_probed_in_each_call_is_told() -> None:
    def steps() -> None:
        for step in range(40):
            run(lambda x, step: x * step, X, step)

    with pytest.warns(UserWarning, match="was probed 32 times, since something") as told:
        steps()
    assert len(told) == 1


def test_the_oldest_of_many_calls_is_forgotten(
    monkeypatch: pytest.MonkeyPatch, probes: list[Any]
) -> None:
    monkeypatch.setattr(known_rows, "_known", {})
    monkeypatch.setattr(known_rows, "_MOST", 4)
    for factor in (*range(6), 5, 0):
        run(lambda x, factor: x * factor, X, factor)
    assert len(known_rows._known) == 4
    assert len(probes) == 7
