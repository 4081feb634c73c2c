"""The backward passes that a step's own function runs: each is told of once, from its beginning to
its end.
"""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

from memopt.memory.backwards import around_backward


def test_a_backward_inside_a_backward_is_a_part_of_it() -> None:
    told: list[str] = []
    x = torch.ones(2, requires_grad=True)
    layer = torch.nn.Linear(2, 2)
    with around_backward(lambda _: told.append("turn"), lambda: told.append("end")):
        for _ in range(2):
            hidden = checkpoint(layer, x, use_reentrant=True)  # its backward runs one of its own
            checkpoint(layer, hidden, use_reentrant=True).sum().backward()
            told.append("forward")
    assert told == ["turn", "end", "forward"] * 2
    assert x.grad is not None


def test_one_that_keeps_its_graph_is_a_part_of_forward() -> None:
    told: list[str] = []
    x = torch.ones(2, requires_grad=True)
    with around_backward(lambda _: told.append("turn"), lambda: told.append("end")):
        (slope,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
        assert told == []
        slope.square().sum().backward()
    assert told == ["turn", "end"]
