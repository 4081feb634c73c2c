"""Proves: a transform of torch.func inside a model, around which PyTorch allows no saved-tensor
hooks, is refused in words by whatever counts bytes, and leaves no mode behind; vmap inside one is
none of these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import memopt


class Slope(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        slope: Tensor = torch.func.grad(lambda y: self.inner(y).square().sum())(x)
        return slope


@pytest.mark.parametrize(
    "count",
    [
        lambda model, x: memopt.saved_bytes(model, x),
        lambda model, x: memopt.fits(model, x, "1GB", loss=torch.sum),
        lambda model, x: memopt.plan(model, x, loss=torch.sum, blocks=["inner"]),
        lambda model, x: memopt.anatomy(model, x, loss=torch.sum, measure=True),
        lambda model, x: memopt.anatomy(model, x, loss=torch.sum),
    ],
)
def test_a_transform_inside_is_refused_in_words(
    count: Callable[[nn.Module, Tensor], object],
) -> None:
    """PyTorch allows no hooks around it. The message says what is there for such a model."""
    words = r"memopt counts .* must not call torch.func.grad.* memopt.check\(model, batch\) counts"
    with pytest.raises(RuntimeError, match=words):
        count(Slope(), torch.randn(3, 4))
    assert _get_current_dispatch_mode_stack() == []  # all that ran later met the ledger


def test_convert_goes_on_without_bytes() -> None:
    model, x = nn.Sequential(nn.LayerNorm(4), Slope()), torch.randn(3, 4)
    expected = model(x)
    with pytest.raises(RuntimeError, match=r"must have memopt.convert\(model, recipes=False\)"):
        memopt.convert(model, x)
    report = memopt.convert(model, x, recipes=False)
    assert len(report.swapped) == 1
    assert report.bytes_before is report.bytes_after is None
    assert "bytes are not counted" in report.notes[-1]
    assert torch.allclose(model(x), expected)
    assert memopt.check(model, x, loss=torch.sum).peak


def test_hooks_that_are_refused_around_a_measurement() -> None:
    with (
        torch.autograd.graph.disable_saved_tensors_hooks("none for a test"),
        pytest.raises(RuntimeError, match="none for a test"),
    ):
        memopt.anatomy(nn.Linear(4, 4), torch.randn(3, 4), loss=torch.sum)
    assert _get_current_dispatch_mode_stack() == []


class Rows(nn.Module):
    """Runs its blocks for each row by itself."""

    def __init__(self) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)) for _ in "abc")
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        rows: Tensor = torch.func.vmap(self.blocks)(x)
        return rows.square().mean()


def test_blocks_inside_vmap() -> None:
    """Their arguments are wrapped, and have no memory of their own."""
    model, x = Rows(), torch.randn(5, 3, 4)
    plan = memopt.plan(model, x, "1GiB", measure=False)
    assert [block.path for block in plan.blocks] == ["blocks.0", "blocks.1", "blocks.2"]
    with pytest.warns(UserWarning, match="blocks.0.*runs inside a transform of torch.func"):
        memopt.apply_activation_checkpointing(model, batch=x)


class Ensemble(nn.Module):
    """Calls its members as one, on their stacked parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.members = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)) for _ in "ab"
        )

    def forward(self, x: Tensor) -> Tensor:
        parameters, buffers = torch.func.stack_module_state(list(self.members))

        def one(parameters: Any, buffers: Any) -> Tensor:
            output: Tensor = torch.func.functional_call(
                self.members[0], (parameters, buffers), (x,)
            )
            return output

        return torch.func.vmap(one)(parameters, buffers).square().mean()


def test_stacked_parameters_inside_vmap() -> None:
    """What a member holds meanwhile has no values of its own, which a probe could sum."""
    model, x = Ensemble(), torch.randn(5, 4)
    memopt.plan(model, x, "1GiB", measure=False)
    with pytest.warns(UserWarning, match="members.0.*runs inside a transform of torch.func"):
        memopt.apply_activation_checkpointing(
            model, check_fn=lambda module: module is model.members[0], batch=x
        )
