"""Proves: where a model draws which of its layers run, looks are at the step with all that it may
call; a plan holds for every later step, or the model is refused by name; and no generator, nor
Python's class of them, is other than before.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt.memory.allocator import LiveBytes
from memopt.memory.depth import Depth
from tests.plan.models import Block

OWN = random.Random(3)
SOME: dict[str, Callable[[int], Sequence[int]]] = {
    "sample": lambda n: sorted(random.sample(range(n), n - 2)),
    "own generator": lambda n: sorted(OWN.sample(range(n), n - 2)),
    "own numbers": lambda n: [k for k in range(n) if OWN.random() > 0.3],
    "numpy": lambda n: sorted(np.random.choice(n, n - 2, replace=False)),
    "first ones": lambda n: range(random.randrange(1, n + 1)),
}
ORDERS: dict[str, Callable[[int], Sequence[int]]] = {
    "sample": lambda n: random.sample(range(n), n - 2),
    "choice": lambda n: [random.choice(range(n))],
    "permutation": lambda n: np.random.permutation(n).tolist(),
    "torch": lambda n: torch.randperm(n).tolist(),
    "torch, some": lambda n: sorted(torch.randperm(n)[: n - 2].tolist()),
}


class Some(nn.Module):
    """Calls those of its blocks that are drawn."""

    def __init__(self, draw: Callable[[int], Sequence[int]], blocks: int = 5) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(16) for _ in range(blocks))
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        for number in self.draw(len(self.blocks)):
            x = self.blocks[number](x)
        return x.square().mean()


@pytest.mark.parametrize("name", SOME)
def test_a_plan_holds_whichever_blocks_are_drawn(name: str) -> None:
    model, x = Some(SOME[name]), torch.randn(4, 32, 16)
    states = random.getstate(), OWN.getstate(), str(np.random.get_state()), {**vars(random.Random)}
    plan = memopt.plan(model, x, 1 << 30, measure=False, optimizer=None, chunks=False)
    base = plan.profile.base
    assert base is not None
    assert plan.profile.blocks == tuple(f"blocks.{n}" for n in range(5))
    found = plan.within(base + (plan.plain_peak - base) // 2).apply()
    assert states == (
        *(random.getstate(), OWN.getstate(), str(np.random.get_state())),
        {**vars(random.Random)},
    )
    model(x).backward()
    for _ in range(4):
        model.zero_grad()
        gc.collect()
        with LiveBytes() as live:
            model(x).backward()
        assert live.most_with_scratch <= found.budget - base
    found.undo()


@pytest.mark.parametrize("name", ORDERS)
def test_other_blocks_or_another_order_in_each_step_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="must call the same blocks in every step"):
        memopt.plan(Some(ORDERS[name]), torch.randn(4, 32, 16), 1 << 30, measure=False)


def test_samples_of_rows_are_no_larger_than_they_are() -> None:
    """All of them would run no more operators."""
    sizes = []

    def look() -> int:
        sizes.append(len(random.sample(range(100), 7)))
        return sizes[-1]

    depth = Depth()
    assert depth.run(look, lambda _: 1) == 7
    assert depth.run(look, lambda _: 1) == 7
    assert max(sizes) == 100
