"""Proves: `memopt.check` says how much of the predicted peak is a bound of kernels' scratch, and
nothing where all of it is known.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt.memory.scratch import measured
from memopt.memory.sizes import as_text


def test_it_says_how_much_of_the_predicted_peak_is_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what would take too long to be measured."""
    monkeypatch.setattr(measured, "_QUICK", 0)

    class Run(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            found = self.inner(x)
            return (found[0] if isinstance(found, tuple) else found).sum()

    found = memopt.check(Run(nn.LSTM(24, 40)), torch.randn(15, 6, 24))
    assert found.plain_margin > 0
    margin = as_text(found.plain_margin)
    assert f"up to {margin} of the predicted peak may not be allocated: a bound" in str(found)
    assert found.peak is not None
    assert found.plain_peak is not None
    assert found.plain_peak - found.plain_margin <= 1.05 * found.peak
    assert found.peak <= 1.05 * found.plain_peak
    exact = memopt.check(Run(nn.Linear(24, 40)), torch.randn(15, 24))
    assert exact.plain_margin == 0
    assert "may not be allocated" not in str(exact)
