"""Proves: what runs for a measurement, a sample, a prediction or a plan leaves nothing behind. All
that is reachable from the model, the batch, the loss and the optimizer has the same bits, is the
same objects and has the same version counters, also after an error in the middle.
"""

from __future__ import annotations

import contextvars
import gc
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import memopt
from memopt._compat import is_in_backward
from memopt.memory.allocator import LiveBytes
from memopt.memory.attribution import attribute
from memopt.memory.reach import reached
from memopt.memory.unchanged import unchanged
from tests.memory.modules import HABITS, WIDTH, Habit, Model, weighted_loss
from tests.support.fingerprint import Fingerprint

Run = Callable[[nn.Module, Any, Any, Any], object]
ROOM = 1 << 30


def saves(model: nn.Module, batch: Any, loss: Any, optimizer: Any) -> None:
    memopt.saved_bytes(lambda: loss(model(**batch)))


def converts(model: nn.Module, batch: Any, loss: Any, optimizer: Any) -> None:
    memopt.convert(model, batch)
    memopt.revert(model)


def attributes(model: nn.Module, batch: Any, loss: Any, optimizer: Any) -> None:
    attribute(model, (), batch)


def predicts(model: nn.Module, batch: Any, loss: Any, optimizer: Any) -> None:
    memopt.anatomy(model, batch, loss=loss, optimizer=optimizer, measure=False)


def measures(model: nn.Module, batch: Any, loss: Any, optimizer: Any) -> None:
    memopt.anatomy(model, batch, loss=loss, optimizer=optimizer, measure=True)


def plans(model: nn.Module, batch: Any, loss: Any, optimizer: Any) -> None:
    plan = memopt.plan(model, batch, ROOM, loss=loss, optimizer=optimizer, steps=1)
    plan.apply()
    plan.run_step()
    plan.undo()


def fits(model: nn.Module, batch: Any, loss: Any, optimizer: Any) -> None:
    memopt.fit(model, batch, ROOM, optimizer=optimizer, loss=loss, steps=1).undo()


def searches(model: nn.Module, batch: Any, loss: Any, optimizer: Any) -> None:
    memopt.largest_batch(model, batch, ROOM, loss=loss, optimizer=optimizer, limit=2)


RUNS: tuple[Run, ...] = (*(saves, converts, attributes, predicts, measures, plans, fits, searches),)


def made(
    habits: list[list[type[Habit]]], primed: bool = False, **options: Any
) -> tuple[nn.Module, dict[str, Any], Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Model(habits, **options)
    batch = {"x": torch.randn(4, WIDTH), "notes": []}
    loss = weighted_loss()
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    if primed:
        loss(model(**batch)).backward()
        optimizer.step()  # states, and gradients that are there
    return model, batch, loss, optimizer


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
@pytest.mark.parametrize("habit", HABITS, ids=lambda habit: habit.__name__)
def test_nothing_changes(run: Run, habit: type[Habit]) -> None:
    model, batch, loss, optimizer = made([[habit], [habit]])
    before = Fingerprint(model, batch, loss, optimizer)
    run(model, batch, loss, optimizer)
    assert Fingerprint(model, batch, loss, optimizer).differences(before) == []


@settings(max_examples=6, phases=(Phase.explicit, Phase.generate))
@given(
    habits=st.lists(st.lists(st.sampled_from(HABITS), max_size=3), min_size=2, max_size=3),
    primed=st.booleans(),
    runs=st.lists(st.sampled_from(RUNS), min_size=1, max_size=2, unique=True),
)
def test_nothing_changes_in_random_models(
    habits: list[list[type[Habit]]], primed: bool, runs: list[Run]
) -> None:
    things = made(habits, primed)
    gc.collect()  # copies of an earlier model in a cycle of its own, which still shared the classes
    before = Fingerprint(*things)
    for run in runs:
        run(*things)
    assert Fingerprint(*things).differences(before) == []


def test_what_comes_back_from_a_file_is_not_held(tmp_path: Path) -> None:
    """No operator makes it, and it was not there before: while the step is still looked at, each
    offloaded input of a region that has run again is gone.
    """
    blocks = [nn.Sequential(nn.Linear(64, 64)) for _ in range(8)]
    model = nn.Sequential(*(memopt.checkpoint_wrapper(b, offload=tmp_path) for b in blocks))
    x = torch.randn(64, 64)
    seen: list[weakref.ref[torch.UntypedStorage]] = []

    def note(module: nn.Module, args: Any) -> None:
        if is_in_backward():
            assert args[0].is_leaf
            seen.append(weakref.ref(args[0].untyped_storage()))

    for block in blocks[1:]:  # the first one's is x, which has an owner
        block[0].register_forward_pre_hook(note)
    with unchanged(model, x):
        model(x).sum().backward()
        assert len(seen) == 7
        assert [ref() for ref in seen] == [None] * len(seen)


hidden = types.ModuleType("hidden")  # the walk looks into no module of Python's


class Global(nn.Module):
    """Reads a tensor that nobody can see it hold."""

    def forward(self, x: Tensor) -> Tensor:
        return x * hidden.factor


def test_a_leaf_that_only_an_operator_meets_is_put_back() -> None:
    """Something else holds it all the time."""
    hidden.factor = torch.ones(3, requires_grad=True)
    hidden.factor.grad = before = torch.full((3,), 2.0)
    with unchanged(Global()):
        Global()(torch.ones(3)).sum().backward()
        assert torch.equal(hidden.factor.grad, torch.full((3,), 3.0))
    assert hidden.factor.grad is before
    assert torch.equal(before, torch.full((3,), 2.0))


def doubled(x: Tensor) -> Tensor:
    return x + x


as_written = torch.compiler.disable(doubled)
compiled = torch.compile(doubled, backend="eager")


def noted(forward: Any) -> Any:
    """A decorator that leaves an attribute, as functools.wraps does."""
    forward.note = []
    return forward


def test_functions_with_attributes_have_their_code_again() -> None:
    """What is around a forward goes with the models that asked for it, also where these are the
    copies of a prediction and the function has attributes, which are put back.
    """

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(4), nn.Linear(4, 4)

        @noted
        def forward(self, x: Tensor) -> Tensor:
            return self.linear(self.norm(x))

    code = Block.forward.__code__
    model, x = nn.Sequential(*(Block() for _ in range(3))), torch.ones(2, 4)
    memopt.convert(model, x, checkpoint=True)
    memopt.revert(model)
    gc.collect()
    assert Block.forward.__code__ is code
    assert vars(Block.forward) == {"note": []}
    memopt.checkpoint_wrapper(model[0])
    with unchanged(model):
        Block.forward.note.append(1)
        Block.forward.other = 2
    assert Block.forward.__code__ is not code
    del model
    gc.collect()
    assert Block.forward.__code__ is code
    assert vars(Block.forward) == {"note": []}


CALLS: contextvars.ContextVar[int] = contextvars.ContextVar("calls", default=0)


class CountsInContext(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        CALLS.set(CALLS.get() + 1)
        return super().forward(x)


class Spikes(nn.Module):
    """Keeps results, which have a history, until its next call."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.potential = self.linear(self.norm(x))
        self.mean = self.potential.mean(0)
        self.seen = {"last": [self.potential]}
        return self.potential.sigmoid()


@pytest.mark.parametrize("measure", [False, True])
def test_copies_with_regions_end_whose_modules_keep_results(measure: bool) -> None:
    """A result holds its history, a region in it its module, and that the result."""
    model = nn.Sequential(nn.Sequential(Spikes(), Spikes()), nn.Linear(WIDTH, 1))
    blocks, x = list(model[0]), torch.ones(2, WIDTH)
    code = Spikes.forward.__code__
    memopt.anatomy(model, x, checkpoint="all", loss=Tensor.sum, measure=measure)
    with pytest.raises(memopt.BudgetTooSmall):
        memopt.plan(model, x, 100, loss=Tensor.sum, measure=measure, steps=1)
    gc.collect()
    gc.collect()  # of what the first one freed
    copies = [one for one in gc.get_objects() if type(one) is Spikes and one not in blocks]
    assert not copies
    assert Spikes.forward.__code__ is code


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
def test_context_variables_have_their_values_again(run: Run) -> None:
    CALLS.set(5)
    blocks = (nn.Sequential(nn.LayerNorm(4), CountsInContext(4, 4), nn.GELU()) for _ in range(3))
    model = nn.Sequential(*blocks)
    optimizer = torch.optim.SGD(model.parameters())
    run(model, {"input": torch.ones(2, 4)}, torch.sum, optimizer)
    assert CALLS.get() == 5


def test_modules_of_python_are_not_entered_whatever_their_class() -> None:
    """transformers' load their parts when these are asked for, and hold all that was loaded of it:
    in a process with sixty kinds of models the walk of one of them took three times as long.
    """

    class Lazy(types.ModuleType):
        pass

    model, lazy, beside = nn.Linear(2, 2), Lazy("lazy"), torch.ones(2)
    lazy.inside = torch.ones(2)  # type: ignore[attr-defined]
    model.parts = {"lazy": lazy, "beside": beside}  # type: ignore[assignment]
    found = {id(tensor) for tensor in reached([model]).tensors}
    assert id(beside) in found
    assert id(lazy.inside) not in found


class Calls(nn.Module):
    """Weights, and a function of a file that it calls."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(512, 512)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x))


@pytest.mark.parametrize(
    ("function", "copies"), [(as_written, False), (compiled, True)], ids=["disabled", "compiled"]
)
def test_weights_are_copied_where_something_is_compiled_and_not_where_that_is_disabled(
    function: Callable[[Tensor], Tensor], copies: bool
) -> None:
    """A compiled graph writes unseen, so all weights are copied before it runs. What
    torch.compiler.disable wraps looks alike, and runs as it is written: transformers has such.
    """
    model, x = Calls(function), torch.randn(4, 512)
    before = Fingerprint(model, x)
    with LiveBytes() as live, unchanged(model, x):
        live.mark()
        with torch.no_grad():
            model.linear.weight.zero_()
        model(x).sum().backward()
    assert (live.marks[0].nbytes >= 512 * 512 * 4) == copies
    assert Fingerprint(model, x).differences(before) == []
