"""Proves on a GPU that the rules which stand for it in a prediction (attention kernels, autocast's
list, masks, rounded allocations) are PyTorch's: what is predicted is what is measured there.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import memopt
from tests.anatomy.models import NAMES, tiny

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "autocast": {"autocast": torch.bfloat16},
    "autocast to float16": {"autocast": torch.float16},
    "recipes": {"recipes": True},
    "recipes under autocast": {"recipes": True, "autocast": torch.bfloat16},
    "checkpointed": {"checkpoint": "all"},
}


SEEDS = 6 * 2 * 512
"""Bytes: some attention kernels keep a seed and an offset, a block of the allocator each, on the
device without dropout too."""


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("name", NAMES)
def test_the_prediction_is_what_is_measured(
    name: str, options: dict[str, Any], cuda: torch.device
) -> None:
    model, batch = tiny(name, length=32)
    model = model.to(cuda)
    batch = {key: value.to(cuda) for key, value in batch.items()}
    report = memopt.anatomy(model, batch, measure=True, **options)
    assert report.predicted is not None
    assert report.measured is not None
    for moment in ("end of forward", "first gradient", "most in backward", "peak"):
        predicted = report.predicted.moment(moment).by_category
        measured = report.measured.moment(moment).by_category
        for category, nbytes in measured.items():
            assert abs(predicted[category] - nbytes) <= SEEDS, (moment, category)


@pytest.mark.parametrize("heads", [2, 4], ids=["grouped", "all heads"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("masked", [False, True], ids=["no mask", "mask"])
def test_attention_is_the_kernel_that_pytorch_chooses(
    heads: int, dtype: torch.dtype, masked: bool, cuda: torch.device
) -> None:
    attend = Attention(heads, masked).to(cuda, dtype)
    x = torch.randn(2, 32, 64, device=cuda, dtype=dtype)
    report = memopt.anatomy(attend, x, measure=True, optimizer=None)
    assert report.predicted is not None
    assert report.measured is not None
    predicted, measured = (
        trace.moment("end of forward").by_category["activations"]
        for trace in (report.predicted, report.measured)
    )
    assert abs(predicted - measured) <= SEEDS


class Attention(torch.nn.Module):
    """4 query heads and `heads` of keys; its forward is the loss."""

    def __init__(self, heads: int, masked: bool) -> None:
        super().__init__()
        self.heads, self.masked = heads, masked
        self.query, self.rest = torch.nn.Linear(64, 64), torch.nn.Linear(64, 32 * heads)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = self.query(x).unflatten(-1, (4, 16)).transpose(1, 2)
        key, value = self.rest(x).unflatten(-1, (2, self.heads, 16)).permute(2, 0, 3, 1, 4)
        mask = torch.ones(32, 32, dtype=torch.bool, device=x.device).tril() if self.masked else None
        result = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, enable_gqa=self.heads != 4
        )
        return result.float().square().mean()
