"""Proves: steps that look at the gradients of their own backward, which probing leaves out where it
can, are probed for what cannot be recomputed, and leave the model as it was.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from tests.checkpoint.stateful import Row


def scaled(model: nn.Module, x: Tensor) -> None:
    """Steps by a GradScaler, which refuses to where backward left no gradients."""
    scaler = torch.amp.GradScaler("cpu")  # type: ignore[attr-defined]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler.scale(model(x)).backward()
    scaler.step(optimizer)
    scaler.update()


def clipped(model: nn.Module, x: Tensor) -> None:
    model(x).backward()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad.clamp_(-1, 1)  # type: ignore[union-attr]


def noted(model: nn.Module, x: Tensor) -> None:
    """Steps in backward, and uses what hooks noted there."""
    norms: list[Tensor] = []

    def hook(parameter: Tensor) -> None:
        assert parameter.grad is not None
        norms.append(parameter.grad.norm())
        parameter.data.sub_(parameter.grad, alpha=0.1)

    hooks = [
        p.register_post_accumulate_grad_hook(hook) for p in model.parameters() if p.requires_grad
    ]
    model(x).backward()
    for handle in hooks:
        handle.remove()
    torch.stack(norms)


@pytest.mark.parametrize("step", [scaled, clipped, noted])
def test_a_step_that_looks_at_its_gradients(step: Any) -> None:
    model = Row("nothing", "counter", "nothing")
    weights = [parameter.clone() for parameter in model.parameters()]
    with pytest.warns(UserWarning, match=r"no regions.*blocks\.1"):
        names = memopt.apply_activation_checkpointing(model, batch=torch.randn(6, 8), step=step)
    assert names == ["blocks.0", "blocks.2"]
    for parameter, before in zip(model.parameters(), weights, strict=True):
        assert parameter.grad is None
        assert torch.equal(parameter, before)
