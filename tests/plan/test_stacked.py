"""Proves: a plan never goes on top of what is on a model, and takes off what it put there and
nothing else.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import memopt
from memopt._checkpoint.wrapper import settings_of
from memopt.assignment import Assignment, Choice
from memopt.memory.sizes import BudgetTooSmall
from tests.plan.models import Chain, chain
from tests.plan.support import looks

EVERYTHING = 1 << 30


def tight(model: nn.Module, batch: torch.Tensor) -> memopt.Plan:
    """A plan with regions in it, and no chunks, of which each is a forward."""
    plan = memopt.plan(model, batch, EVERYTHING, measure=False, chunks=False)
    with pytest.raises(BudgetTooSmall) as info:
        plan.within(1000)
    return plan.within(info.value.floor)


def another_plan(model: nn.Module, batch: torch.Tensor) -> None:
    tight(model, batch).apply()


def a_region(model: nn.Module, batch: torch.Tensor) -> None:
    memopt.checkpoint_wrapper(model.get_submodule("blocks.2"))


def conversion(model: nn.Module, batch: torch.Tensor) -> None:
    memopt.convert(model)


def conversion_without_recipes(model: nn.Module, batch: torch.Tensor) -> None:
    memopt.convert(model, recipes=False)


@pytest.mark.parametrize(
    "put",
    [another_plan, a_region, conversion, conversion_without_recipes],
    ids=lambda f: f.__name__,
)
def test_what_is_on_a_model_is_refused_by_name_and_kept(
    put: Callable[[nn.Module, torch.Tensor], None],
) -> None:
    """By `apply`, with and without watching, `within`, `largest_batch` and a new `plan`."""
    model, batch = chain()
    plan = tight(model, batch)
    put(model, batch)
    before = looks(model)
    calls = {
        "Plan.apply": plan.apply,
        "Plan.apply: model": lambda: plan.apply(watch=False),
        "Plan.within": lambda: plan.within(EVERYTHING),
        "Plan.largest_batch": plan.largest_batch,
        "plan": lambda: memopt.plan(model, batch, EVERYTHING, measure=False, chunks=False),
    }
    for who, call in calls.items():
        with pytest.raises(ValueError, match=f"{who}.*must be without regions and not converted"):
            call()
        assert looks(model) == before
    loaded = memopt.Plan(**{**plan.__dict__, "live": None})
    with pytest.raises(ValueError, match="must be without regions and not converted"):
        loaded.apply(model)
    assert looks(model) == before


def test_regions_that_a_user_makes_beside_a_plan_stay() -> None:
    """Around another module, and with other settings around a planned one."""
    model, batch = chain()
    before = looks(model)
    plan = tight(model, batch).apply()
    head = memopt.checkpoint_wrapper(model.get_submodule("head"))
    planned = plan.assignment.where(lambda choice: choice.checkpoint)[0]
    block = memopt.checkpoint_wrapper(model.get_submodule(planned), preserve_rng_state=False)
    mine = settings_of(head), settings_of(block)
    plan.undo()
    assert (settings_of(head), settings_of(block)) == mine
    assert all(setting is not None for setting in mine)
    memopt.unwrap(model)
    assert looks(model) == before


def test_a_region_that_a_user_unwraps_stays_off() -> None:
    model, batch = chain()
    before = looks(model)
    plan = tight(model, batch).apply()
    planned = plan.assignment.where(lambda choice: choice.checkpoint)[0]
    memopt.unwrap(model.get_submodule(planned))
    plan.undo()
    assert looks(model) == before


def test_a_conversion_behind_a_plan() -> None:
    """On a plan without recipes it stays when the plan goes; its own undoing brings nothing of the
    plan back. From a plan's recipes it cannot be told, and `undo` says so.
    """
    model, batch = chain()
    before = looks(model)
    plan = memopt.plan(model, batch, EVERYTHING, measure=False, chunks=False)
    plan.assignment = Assignment(dict.fromkeys(plan.profile.blocks, Choice(checkpoint=True)))
    plan.apply(watch=False)
    report = memopt.convert(model, checkpoint=True)
    plan.undo()
    assert report.swapped
    assert memopt.convert(model).swapped == ()
    memopt.revert(model)
    memopt.unwrap(model)
    assert looks(model) == before

    choices = {path: Choice(recipes=path == "blocks.0") for path in plan.profile.blocks}
    plan.assignment = Assignment(choices)
    plan.apply(watch=False)
    memopt.convert(model)
    after = looks(model)
    with pytest.raises(ValueError, match=r"Plan.undo: model must not be converted.*revert"):
        plan.undo()
    assert looks(model) == after


def test_undo_is_exact_after_hooks_and_forwards_of_the_user() -> None:
    model, batch = chain()
    block = model.get_submodule("blocks.1")
    seen: list[str] = []
    own = block.forward

    def mine(x: torch.Tensor) -> torch.Tensor:
        seen.append("mine")
        return own(x)

    block.forward = mine  # type: ignore[method-assign]
    handle = block.register_forward_hook(lambda *_: seen.append("hook"))
    before = looks(model)
    plan = tight(model, batch).apply()
    seen.clear()
    model(batch)
    assert seen == ["mine", "hook"]
    plan.undo()
    assert looks(model) == before
    assert block.forward is mine
    handle.remove()


def test_a_plan_on_another_model_leaves_the_first_alone() -> None:
    model, batch = chain()
    other = Chain([4] * 6)
    memopt.checkpoint_wrapper(model.get_submodule("head"))
    fresh, _ = chain()
    plan = tight(fresh, batch)
    before = looks(model)
    plan.apply(other)
    plan.undo()
    assert looks(model) == before
