"""What tests of plans share: peaks by the allocator's own count, gradients, and what a model is."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memopt._plan.plan import Plan
from memopt._plan.solver import Problem, Solution, floor, solve
from memopt.assignment import Assignment, Choice
from memopt.memory.allocator import LiveBytes
from memopt.memory.batches import call, loss_in
from memopt.memory.sizes import BudgetTooSmall
from memopt.memory.step import tensor_attributes


def allocated_above(model: nn.Module, batch: Any) -> int:
    """The most bytes of a forward and a backward beyond what was there, as the allocator counts."""
    model.zero_grad()
    loss_in("test", call(model, batch)).backward()  # what is made once: threads' memory, caches
    model.zero_grad()
    gc.collect()
    # The allocator's log does not see the end of what began before it: of results of autograd that
    # torch.nn.utils.weight_norm leaves for the next forward to replace.
    replaced = sum(t.nbytes for _, t in tensor_attributes(model) if not t.is_leaf)
    with LiveBytes() as live:
        loss_in("test", call(model, batch)).backward()
    model.zero_grad()
    return live.most_with_scratch - replaced


def gradients(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    torch.manual_seed(3)
    model.zero_grad()
    loss_in("test", call(model, batch)).backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def without_regions(plan: Plan) -> Assignment:
    """The plan's ops, in its chunks, and all else that they save is kept."""
    choices = plan.assignment.choices.items()
    return Assignment({(path,): _without_region(choice) for at, choice in choices for path in at})


def _without_region(choice: Choice) -> Choice:
    if choice.head:
        return choice
    if choice.chunks is None:
        return Choice(choice.recipes)
    if choice.in_chunks == ("",):
        return Choice(choice.recipes, checkpoint=True, chunks=choice.chunks)
    return Choice(
        choice.recipes, parts=choice.in_chunks, chunks=choice.chunks, in_chunks=choice.in_chunks
    )


def looks(model: nn.Module) -> list[tuple[Any, ...]]:
    """Everything that a plan might leave on a model."""
    return [
        (path, id(module), type(module), sorted(module.__dict__), len(module._forward_hooks))
        for path, module in model.named_modules()
    ]


def planned_or_refused(plan: Plan, budget: int) -> tuple[Plan, BudgetTooSmall | None]:
    """The plan for another budget; where there is none, the same plan and what was said."""
    try:
        return plan.within(budget), None
    except BudgetTooSmall as error:
        return plan, error


def floor_of(plan: Plan) -> BudgetTooSmall:
    """What is said of a budget below the floor."""
    with pytest.raises(BudgetTooSmall) as info:
        plan.within(1000)
    return info.value


def plans_of(problem: Problem, count: int) -> tuple[Solution, ...]:
    """The solver's for so many budgets, evenly from the least to the fastest plan's peak."""
    least, fastest = floor(problem), solve(problem, 1 << 60)
    step = (fastest.peak - least.peak) / (count - 1)
    between = (solve(problem, least.peak + int(step * n)) for n in range(1, count - 1))
    return tuple(dict.fromkeys((least, *between, fastest)))
