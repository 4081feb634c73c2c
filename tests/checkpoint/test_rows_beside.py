"""Proves: chunks are refused for calls that write to what they are called with and for tensors of
classes of their own, and what is found out about rows does not depend on how the step is written.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt._checkpoint import checkpoint
from tests.checkpoint.test_rows import CrossGradient, Function, H
from tests.plan.support import floor_of


class Notes:
    """What a block is handed to write into."""

    def __init__(self) -> None:
        self.features: list[Tensor] = []


WRITES: dict[str, tuple[Callable[[Any, Any], Any], Callable[[], Any], str]] = {
    "a list": (lambda x, notes: (x, notes.append(x.exp()))[0], lambda: [], "a container"),
    "a stack of skips": (lambda x, notes: x + notes.pop(), lambda: [1.0], "a container"),
    "a dict": (lambda x, notes: (x, notes.update(y=x.exp()))[0], lambda: {"y": 0}, "a container"),
    "nothing returned": (lambda x, notes: notes.update(y=x.exp()), lambda: {"y": 0}, "a container"),
    "an object": (lambda x, notes: (x, notes.features.append(1))[0], Notes, r".*features\)"),
    "the rows": (lambda x, notes: x.relu_(), lambda: None, "a tensor, in place"),
}


@pytest.mark.parametrize("name", WRITES)
def test_what_writes_to_its_arguments_is_refused(name: str) -> None:
    """Each chunk has lists and dicts of its own: what it writes there the caller never sees."""
    function, make, what = WRITES[name]
    notes, x = make(), torch.randn(40, H)
    before = copy.deepcopy(vars(notes) if isinstance(notes, Notes) else notes)
    with pytest.raises(ValueError, match=rf"got .*: it writes to its arguments \({what}"):
        checkpoint(function, x, notes, chunks=4)
    assert (vars(notes) if isinstance(notes, Notes) else notes) == before


def test_gradients_across_rows_show_with_a_step_of_the_user_s() -> None:
    """Whose own backward does nothing while the modules are probed, unlike that of the probe."""

    def step(model: nn.Module, x: Tensor) -> None:
        model(x).square().mean().backward()

    blocks = (
        nn.Sequential(nn.Linear(H, 64), Function(CrossGradient.apply), nn.Linear(64, H))
        for _ in range(2)
    )
    model, x = nn.Sequential(*blocks), torch.randn(40, H)
    with pytest.warns(UserWarning, match="the gradient of one row depends on other rows"):
        names = memopt.apply_activation_checkpointing(
            model, check_fn=nn.Sequential, chunks=2, batch=x, step=step
        )
    assert names == []


class Doubled(Tensor):
    """A class of its own, as those with units or metadata, whose exp is another one."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result * 2 if func is torch.exp else result


@pytest.mark.parametrize(
    ("function", "other", "said"),
    [
        (lambda x, _: x.exp(), None, "an ordinary tensor of rows, got Doubled"),
        (lambda x, y: torch.exp(y), 40, "an ordinary tensor of rows, got Doubled"),
        (lambda x, y: torch.exp(x * y), 1, "it returns a tensor of Doubled"),
    ],
)
def test_tensors_of_a_class_are_refused(function: Any, other: int | None, said: str) -> None:
    """Chunks and what they are joined to have no class."""
    x = torch.randn(40, H)
    given = (x.as_subclass(Doubled), None) if other is None else (x, x[:other].as_subclass(Doubled))
    with pytest.raises(ValueError, match=said):
        checkpoint(function, *given, chunks=3)
    parameter = nn.Parameter(x)
    assert torch.equal(checkpoint(lambda x: torch.exp(x), parameter, chunks=3), x.exp())


@pytest.mark.parametrize("chosen", ["convert", "apply", "plan"])
def test_a_model_of_such_tensors_runs_whole(chosen: str) -> None:
    made = (nn.Linear(H, 32), Function(torch.exp), nn.Linear(32, H))
    model = nn.Sequential(*(nn.Sequential(*copy.deepcopy(made)) for _ in range(3)))
    x = torch.randn(40, H).as_subclass(Doubled)
    expected = model(x)
    if chosen == "convert":
        memopt.convert(model, x, checkpoint=True, chunks=3, recipes=False)
    elif chosen == "apply":
        memopt.apply_activation_checkpointing(model, batch=x, chunks=3)
    else:
        plan = memopt.plan(model, x, loss=lambda y: y.square().mean(), measure=False, steps=1)
        plan.within(floor_of(plan).floor).apply()
    assert isinstance(model(x), Doubled)
    assert torch.equal(model(x), expected)
