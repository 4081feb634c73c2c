"""Proves: a plan without a budget has the memory that is free, beside what its step has already."""

from __future__ import annotations

import pytest
import torch

import memopt
from memopt._plan import api
from memopt.memory.storages import tensors_in
from tests.plan.models import chain


def test_the_memory_that_is_free_is_beside_what_the_step_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the middle of a training optimizer states and gradients are on the device already."""
    free = 1 << 30
    monkeypatch.setattr(api, "free_bytes", lambda _: free)
    model, batch = chain()
    optimizer = torch.optim.AdamW(model.parameters())
    weights = 4 * sum(p.numel() for p in model.parameters())
    there = sum(t.nbytes for t in (*model.buffers(), *tensors_in(batch)))
    plan = memopt.plan(model, batch, optimizer=optimizer, measure=False)
    assert plan.budget - free - weights - there in range(-64, 64)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    plan = memopt.plan(model, batch, optimizer=optimizer, measure=False)
    counts = 4 * len(list(model.parameters()))
    assert plan.budget - free - 4 * weights - there - counts in range(-64, 64)
