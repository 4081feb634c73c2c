"""Proves: memopt.fit trains with whole batches within a budget that they do not fit in: the peak is
within it, and gradients are those of the whole batch but for rounding.
"""

from __future__ import annotations

import pytest
import torch

import memopt
from tests.plan.models import Chain, chain, tokens
from tests.plan.support import looks

EVERYTHING = 1 << 30


def test_the_whole_batch_fits() -> None:
    model, batch = chain()
    fitted = memopt.fit(
        model, batch, EVERYTHING, optimizer=torch.optim.AdamW(model.parameters()), steps=1
    )
    assert (fitted.micro_batch, fitted.micro_batches) == (4, 1)
    fitted.undo()


def test_in_micro_batches() -> None:
    """Twelve rows where five would fit: three micro-batches of four, and not two of five and one of
    two.
    """
    torch.manual_seed(0)
    model, batch = Chain([4] * 4), tokens(12, 64)
    before = looks(model)
    model(batch).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    optimizer = torch.optim.AdamW(model.parameters())
    whole = memopt.plan(model, batch, EVERYTHING, optimizer=optimizer, measure=False)
    budget = whole.profile.base + (whole.plain_peak - whole.profile.base) // 6
    fitted = memopt.fit(model, batch, budget, optimizer=optimizer, steps=1)
    assert 1 < fitted.micro_batches <= 12
    assert fitted.micro_batch == -(-12 // fitted.micro_batches)
    assert repr(fitted).startswith(f"Fitted(Chain, micro_batch={fitted.micro_batch}, ")
    assert fitted.plan.measured_peak is not None
    assert fitted.plan.measured_peak <= budget
    split = f"micro-batches of {fitted.micro_batch} rows, {fitted.micro_batches} for a batch"
    assert str(fitted).splitlines()[1] == split
    assert f"<p>{split}</p>" in fitted._repr_html_()
    assert "<th>Block</th>" in fitted._repr_html_()
    result = fitted(batch)
    assert result.micro_batches == fitted.micro_batches
    assert result.loss.item() == pytest.approx(whole.live.step.model(batch).item(), rel=1e-5)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-6)
    fitted.undo()
    assert looks(model) == before


@pytest.mark.slow
def test_not_even_one_row() -> None:
    """The planner's own words, with the floor."""
    model, batch = chain()
    before = looks(model)
    with pytest.raises(memopt.BudgetTooSmall, match="the floor, got"):
        memopt.fit(model, batch, "200KB", optimizer=torch.optim.AdamW(model.parameters()))
    assert looks(model) == before


def test_bad_input() -> None:
    model, batch = chain()
    with pytest.raises(ValueError, match=r"memopt.fit: budget must be bytes"):
        memopt.fit(model, batch, "plenty", optimizer=torch.optim.AdamW(model.parameters()))
    with pytest.raises(ValueError, match="batch must hold a tensor"):
        memopt.fit(model, {}, "1GB", optimizer=torch.optim.AdamW(model.parameters()))
