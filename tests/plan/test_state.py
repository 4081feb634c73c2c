"""Proves: blocks whose state would move twice in a step are no planned regions; a plan names them,
its budget holds all the same, and state and gradients are those of a plain model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import memopt
from memopt._checkpoint.state import State
from memopt.memory.sizes import BudgetTooSmall
from tests.checkpoint.stateful import Row


def batch() -> Tensor:
    return torch.randn(64, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("measure", [False, True])
@pytest.mark.parametrize("kind", ["spectral norm", "average in place", "counter"])
def test_a_block_that_cannot_run_again_is_no_region(kind: str, measure: bool) -> None:
    torch.manual_seed(0)
    kinds = ("nothing", kind, "nothing", kind)
    model, plain = Row(*kinds), Row(*kinds)
    plain.load_state_dict(model.state_dict())
    plan = memopt.plan(model, batch(), 1 << 30, measure=measure, steps=1)
    with pytest.raises(BudgetTooSmall) as info:
        plan.within(1000)
    plan = plan.within(info.value.floor)
    note = next(note for note in plan.notes if note.startswith("no regions"))
    assert "blocks.1, blocks.3" in note
    assert not plan.assignment.of("blocks.1").checkpoint
    assert not plan.assignment.of("blocks.3").checkpoint
    assert plan.assignment.where(lambda choice: choice.checkpoint)
    plan.apply()
    assert plan.measured_peak is not None
    assert plan.measured_peak <= plan.budget
    for step in (model, plain):
        step(batch()).backward()
    plan.undo()
    assert State(model.blocks[1]).differing(State(plain.blocks[1])) == []
    if not plan.assignment.recipes:
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None)
            assert one.grad is None or torch.equal(one.grad, other.grad)


def test_where_no_block_can_be_a_region(tmp_path: Path) -> None:
    """There are plans all the same, also of what a plan was saved as, and with offloading."""
    model = Row("counter", "counter", "counter")
    plan = memopt.plan(model, batch(), 1 << 30, measure=False, offload=tmp_path)
    assert not any(choice.checkpoint for choice in plan.assignment.choices.values())
    assert plan.largest_batch(limit=128) == 128
    plan.save(tmp_path / "plan.json")
    loaded: Any = memopt.Plan.load(tmp_path / "plan.json")
    assert loaded.profile.no_regions == ("blocks.0", "blocks.1", "blocks.2")
    assert loaded.pareto().plans == plan.pareto().plans
    with pytest.raises(BudgetTooSmall) as info:
        plan.within(1000)
    assert "no regions, since these cannot be recomputed as they ran: blocks.0" in str(info.value)
    assert plan.within(info.value.floor).peak <= info.value.floor


def test_fit_keeps_such_blocks_out_too() -> None:
    model = Row("counter", "nothing")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fitted = memopt.fit(model, batch(), 1 << 30, optimizer=optimizer, steps=1)
    assert not fitted.plan.assignment.of("blocks.0").checkpoint
    count = model.blocks[0].count
    fitted(batch())
    assert model.blocks[0].count == count + fitted.micro_batches
