"""Proves: under a plan, the classes, methods and attributes of a model's modules are the very ones
that they were, whatever fate the plan chose; blocks that it checkpoints run twice.
"""

from __future__ import annotations

from collections import Counter

import pytest

import memopt
from memopt._checkpoint.wrapper import settings_of
from memopt._convert.swap import swap_of
from memopt.memory.sizes import BudgetTooSmall
from tests.plan.models import chain
from tests.support.looks import looks


def test_under_a_plan_modules_are_what_they_were() -> None:
    model, batch = chain()
    before = {module: looks(module) for module in model.modules()}
    with pytest.raises(BudgetTooSmall) as error:
        memopt.plan(model, batch, 1, chunks=False)
    memopt.plan(model, batch, error.value.floor, chunks=False).apply()
    regions = [path for path, m in model.named_modules() if settings_of(m) is not None]
    assert regions
    calls: Counter[str] = Counter()
    for path in regions:
        leaf = next(m for m in model.get_submodule(path).modules() if not list(m.children()))
        leaf.register_forward_pre_hook(lambda module, args, path=path: calls.update([path]))
    model(batch).backward()
    assert set(calls.values()) == {2}
    same = [module for module in model.modules() if swap_of(module) is None]
    assert len(same) > len(regions)
    for module in same:
        assert looks(module) == before[module]
