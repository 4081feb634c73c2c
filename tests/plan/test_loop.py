"""Proves: the loop of solving, predicting and measuring ends, with a plan whose measured peak is
within the budget or with an error that says what is; on chains of any blocks, and when predictions
are wrong.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import memopt
from memopt._plan.curve import curve_of
from memopt._plan.live import Live
from tests.plan.models import Chain, chain, tokens
from tests.plan.support import looks, planned_or_refused

EVERYTHING = 1 << 30


@pytest.mark.slow
@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    widths=st.lists(st.sampled_from([1, 2, 3, 5, 8]), min_size=2, max_size=5),
    rows=st.integers(1, 4),
    share=st.floats(0, 1),
)
def test_random_chains(widths: list[int], rows: int, share: float) -> None:
    """What is planned fits; and only what is below every plan's need is refused: the least of all
    plans is found by trying the floor that the error names.
    """
    torch.manual_seed(0)
    model, batch = Chain(widths, features=16), tokens(rows, 32)
    plan = memopt.plan(model, batch, EVERYTHING, measure=False)
    least = curve_of(plan.profile, plan.terms, 2).plans[0].peak
    budget = int(least + share * (plan.plain_peak - least))
    chosen, refused = planned_or_refused(plan, budget)
    if refused is not None:
        assert refused.floor > budget
        budget = refused.floor
        chosen = plan.within(budget)
    chosen.apply()
    assert chosen.measured_peak is not None
    assert chosen.measured_peak <= budget
    chosen.undo()


def wrong(monkeypatch: pytest.MonkeyPatch, more: int) -> None:
    """Real steps take `more` bytes than predicted ones, as a library's workspace might."""
    original = Live.watch
    monkeypatch.setattr(Live, "watch", lambda self: original(self) + more)


def test_more_than_was_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan is made again for so much less, and then fits."""
    model, batch = chain()
    plan = memopt.plan(model, batch, EVERYTHING, measure=False, chunks=False)
    budget = (plan.peak + curve_of(plan.profile, plan.terms, 2).plans[0].peak) // 2
    first = plan.within(budget)
    more = budget - first.peak + 1000
    wrong(monkeypatch, more)
    peak = first.peak
    first.apply()
    assert first.peak < peak
    assert first.measured_peak is not None
    assert first.measured_peak <= budget


def test_more_than_can_be_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """After three tries at most it is said, with what was measured; the model is as before."""
    model, batch = chain()
    plan = memopt.plan(model, batch, EVERYTHING, measure=False)
    plan = plan.within(int(0.6 * plan.plain_peak))
    before = looks(model)
    wrong(monkeypatch, plan.budget)
    with pytest.raises(memopt.BudgetTooSmall, match="were measured with the last plan"):
        plan.apply()
    assert looks(model) == before


def test_costs_that_are_too_low_are_corrected() -> None:
    """A profile that knows less than the truth of some blocks: each prediction of a whole plan
    teaches it more, until the plan fits.
    """
    model, batch = chain()
    plan = memopt.plan(model, batch, EVERYTHING, measure=False)
    budget = int(0.55 * plan.plain_peak)
    honest = plan.within(budget)
    profile = plan.profile
    profile.exact.clear()
    for key, cost in profile.nbytes.items():
        profile.nbytes[key] = replace(
            cost, resident=cost.resident // 2, backward=cost.backward // 2
        )
    found = plan.within(budget)
    assert found.peak <= budget
    assert found.seconds <= 1.2 * honest.seconds


def test_a_step_that_asks_for_values_is_watched() -> None:
    """It has no prediction; plans are made of real steps, and are as exact."""

    class Asks(Chain):
        def forward(self, ids: Any) -> Any:
            loss = super().forward(ids)
            return loss * 2 if loss.item() > 1e9 else loss

    torch.manual_seed(0)
    model, batch = Asks([4] * 4), tokens()
    before = looks(model)
    plan = memopt.plan(model, batch, EVERYTHING, optimizer=None, measure=False)
    assert any("asks for values" in note for note in plan.notes)
    plan = plan.within(int(0.7 * plan.plain_peak)).apply()
    assert plan.measured_peak == plan.peak
    plan.undo()
    assert looks(model) == before
