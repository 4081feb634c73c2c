"""Proves: a call that works on each row alone for few rows, and mixes them from some number on, is
refused by name in chunks and chosen by nobody, however many rows the calls before it had.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt._checkpoint import checkpoint, checkpoint_wrapper
from memopt._checkpoint.chunks import CallRows
from memopt._checkpoint.row_operators import other_operators
from tests.checkpoint.test_rows import Function
from tests.support.bits import assert_same_bits

H = 8


def windows(x: Tensor) -> Tensor:
    """Adds the mean of a window of 32 rows, where there are so many."""
    return x.exp() + x[:32].mean(0) if len(x) >= 32 else x.exp()


@pytest.mark.parametrize(
    "way",
    [
        lambda module, x: checkpoint(module, x, chunks=4),
        lambda module, x: checkpoint_wrapper(module, chunks=4)(x),
    ],
    ids=["checkpoint", "checkpoint_wrapper"],
)
@pytest.mark.parametrize(
    ("function", "said"),
    [
        (windows, r"for rows of \[40\] it runs others \(add, mean\) than for \[6\]"),
        (lambda x: x if 6 < len(x) < 20 else x.exp(), r"of \[10\] it runs others \(exp\) than"),
    ],
)
def test_refused_by_name(way: Any, function: Any, said: str) -> None:
    module, x = Function(function), torch.randn(40, H)
    with pytest.raises(ValueError, match=said):
        way(module, x)


def test_a_call_that_was_fine_for_few_rows_is_looked_at_again_with_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not with fewer, nor with as many: sizes between those that were looked at are known."""
    looked: list[int] = []

    def counted(fn: Any, rows: CallRows, *rest: Any) -> str:
        looked.append(rows.count)
        return other_operators(fn, rows, *rest)

    monkeypatch.setattr("memopt._checkpoint.rows.other_operators", counted)
    module = checkpoint_wrapper(Function(windows), chunks=2)
    for count in (16, 16, 12, 31):
        assert torch.equal(module(x := torch.randn(count, H)), x.exp())
    assert set(looked) == {16, 31}
    with pytest.raises(ValueError, match=r"for rows of \[40\] it runs others \(add, mean\)"):
        module(torch.randn(40, H))
    assert torch.equal(module(x := torch.randn(20, H)), x.exp())


@pytest.mark.parametrize("chosen", ["convert", "apply", "plan"])
def test_a_module_that_mixes_many_rows_is_not_chosen(chosen: str) -> None:
    """The gradients of the step are the plain ones."""
    made = (nn.Linear(H, 64), Function(windows), nn.Linear(64, H))
    model = nn.Sequential(*(nn.Sequential(*copy.deepcopy(made)) for _ in range(3)))
    x = torch.randn(64, H)
    model(x).square().sum().backward()
    before = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    if chosen == "convert":
        report = memopt.convert(model, x, checkpoint=True, chunks=4, recipes=False)
        assert not report.in_chunks
    elif chosen == "apply":
        memopt.apply_activation_checkpointing(model, batch=x, chunks=4)
    else:
        plan = {"loss": lambda out: out.square().sum(), "optimizer": None, "measure": False}
        try:
            memopt.plan(model, x, "1kB", **plan).apply()
        except memopt.BudgetTooSmall as error:
            memopt.plan(model, x, error.floor, **plan).apply()
    model(x).square().sum().backward()
    assert_same_bits(before, [parameter.grad for parameter in model.parameters()])
