"""Proves on a GPU that a plan's measured peak, the allocator's own there, is within its budget, and
that the plan is taken off again.
"""

from __future__ import annotations

import pytest
import torch

import memopt
from tests.anatomy.models import tiny
from tests.plan.support import looks


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_the_measured_peak_is_within_the_budget(
    name: str, autocast: torch.dtype | None, cuda: torch.device
) -> None:
    model, batch = tiny(name, rows=16, length=64)
    model = model.to(cuda)
    batch = {key: value.to(cuda) for key, value in batch.items()}
    optimizer = torch.optim.AdamW(model.parameters())
    everything = memopt.plan(model, batch, optimizer=optimizer, autocast=autocast)
    before = looks(model)
    applied = 0
    for share in (0.95, 0.8, 0.6):
        budget = int(share * everything.plain_peak)
        try:
            plan = everything.within(budget)
        except memopt.BudgetTooSmall:
            continue
        plan.apply()
        assert plan.measured_peak is not None
        assert plan.measured_peak <= budget
        # Of so small a model autocast's copies of weights and blocks of 512 bytes are a share.
        assert abs(plan.measured_peak - plan.peak) <= 0.03 * plan.peak + (1 << 19)
        plan.undo()
        assert looks(model) == before
        applied += 1
    assert applied
