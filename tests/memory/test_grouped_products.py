"""Proves: the grouped product of a mixture of experts is predicted to the byte in float32, which
PyTorch's meta kernel refuses and its real kernel takes; results are laid out as PyTorch lays them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt.memory.predicted.outcome import outcome_of

WIDTH, EXPERTS, ROWS = 16, 3, 24
ENDS = torch.tensor([5, 11, ROWS], dtype=torch.int32)


class Experts(nn.Module):
    """Rows go to the experts by their number, each expert's together."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 4 * WIDTH))
        self.down = nn.Parameter(torch.randn(EXPERTS, 4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        ends = ENDS.to(x.device)
        inner = torch._grouped_mm(x, self.up, offs=ends).relu()
        return torch._grouped_mm(inner, self.down, offs=ends)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_is_predicted_to_the_byte(dtype: torch.dtype) -> None:
    model, x = Experts().to(dtype), torch.randn(ROWS, WIDTH, dtype=dtype)
    found = memopt.anatomy(
        model, x, loss=lambda y: y.float().square().sum(), measure=True, optimizer=torch.optim.SGD
    )
    assert found.predicted is not None
    assert found.measured is not None
    assert found.predicted.peak.total == found.measured.peak.total
    assert not any("not predicted" in note for note in found.notes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shapes",
    [
        ((ROWS, WIDTH), (EXPERTS, WIDTH, 32)),
        ((WIDTH, ROWS), (ROWS, 32)),
        ((EXPERTS, 8, WIDTH), (EXPERTS, WIDTH, 32)),
        ((EXPERTS, 8, WIDTH), (WIDTH, ROWS)),
    ],
    ids=["rows", "gradient of weights", "batched", "columns"],
)
def test_layouts_are_pytorchs(dtype: torch.dtype, shapes: Any) -> None:
    one, other = (torch.randn(shape, dtype=dtype) for shape in shapes)
    ends = None if one.dim() == other.dim() == 3 else ENDS
    real = torch._grouped_mm(one, other, offs=ends)
    (made,), *_ = outcome_of(torch.ops.aten._grouped_mm.default, (one, other, ends), {}, True)
    assert (made.shape, made.stride, made.dtype) == (tuple(real.shape), real.stride(), real.dtype)
