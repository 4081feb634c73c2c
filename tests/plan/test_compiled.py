"""Proves: a plan for a model that is compiled keeps its word too: a step of the compiled model is
within the budget by the allocator's count, and what cannot be is said.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import memopt
from tests.plan.models import Chain, tokens
from tests.plan.support import allocated_above

EVERYTHING = 1 << 30


def test_no_room_for_a_graph() -> None:
    """Before anything is compiled."""
    model, batch = Chain([4] * 2), tokens()
    with pytest.raises(memopt.BudgetTooSmall, match="which weights, gradients, optimizer states"):
        memopt.plan(model, batch, "100KB", compiled=True)


@pytest.mark.parametrize(
    "option",
    [{"measure": True}, {"blocks": ["0"]}, {"offload": "cpu"}, {"step": print}, {"chunks": False}],
)
def test_what_is_not_for_a_compiled_model(option: dict[str, Any]) -> None:
    model, batch = Chain([4] * 2), tokens()
    (name,) = option
    with pytest.raises(ValueError, match=rf"^plan: compiled=True must be without {name}, "):
        memopt.plan(model, batch, "1GB", compiled=True, **option)


@pytest.mark.slow
def test_a_compiled_model_within_a_budget() -> None:
    """A tenth less than a graph without a limit takes; and below the least that one can."""
    torch.manual_seed(0)
    model, batch = Chain([4] * 2), tokens(4, 128)
    free = memopt.plan(model, batch, EVERYTHING, compiled=True)
    unlimited = free.apply()
    assert free.measured_peak is not None
    assert free.measured_peak == free.base + allocated_above(unlimited, batch)
    above = free.measured_peak - free.base
    plan = memopt.plan(model, batch, free.base + above * 9 // 10, compiled=True)
    compiled = plan.apply()
    assert plan.measured_peak is not None
    assert plan.base + allocated_above(compiled, batch) <= plan.budget
    torch.testing.assert_close(compiled(batch), model(batch), rtol=1e-5, atol=1e-6)
    with pytest.raises(memopt.BudgetTooSmall, match="there are left for a compiled graph"):
        memopt.plan(model, batch, free.base + above // 8, compiled=True).apply()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.slow
def test_a_model_that_is_compiled_no_more_is_not_measured() -> None:
    """Beyond its limit PyTorch runs the model without a graph: another model than was planned."""
    model, batch = Chain([4] * 2), tokens()
    # Not monkeypatch: it deletes what its target has no entry of, and the setting is gone for all.
    with torch._dynamo.config.patch(recompile_limit=1):
        torch.compile(model, backend="eager")(batch)
        with pytest.raises(RuntimeError, match=r"compiles the model no more.*dynamo.reset\(\)"):
            memopt.plan(model, batch, EVERYTHING, compiled=True).apply()
    torch._dynamo.reset()
    memopt.plan(model, batch, EVERYTHING, compiled=True).apply()
