"""Proves: the states that an optimizer does not have yet are estimated by parameters of as many
dimensions.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memopt.memory.peak import of_optimizer
from memopt.memory.step import Step


@pytest.mark.parametrize(
    ("kind", "bias"),
    [(torch.optim.Muon, False), (torch.optim.Adafactor, True), (torch.optim.AdamW, True)],
)
def test_states_to_come(kind: type[torch.optim.Optimizer], bias: bool) -> None:
    """Muon takes matrices alone. Adafactor factors these, and keeps all of a vector's squares."""
    model = nn.Linear(64, 64, bias=bias)
    optimizer = kind(model.parameters())  # type: ignore[call-arg]
    x = torch.randn(3, 64)
    states, _ = of_optimizer(Step(model, x, optimizer, who="plan"))
    model(x).sum().backward()
    optimizer.step()
    made = [t for state in optimizer.state.values() for t in state.values()]
    assert states == sum(t.nbytes for t in made if isinstance(t, torch.Tensor) and t.dim())
    assert of_optimizer(Step(model, x, optimizer, who="plan"))[0] == 0
