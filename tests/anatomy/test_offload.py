"""Proves that what is predicted of offloading is what is left when activations are on disk."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import memopt
from memopt.anatomy.ledger import Ledger
from memopt.anatomy.step import Step, traced
from memopt.anatomy.trace import trace_of
from tests.anatomy.models import Mlp


class Waiting(Ledger):
    """Waits for the copies before it looks what is left."""

    def end_of_forward(self, loss: Tensor) -> None:
        memopt.offload_stats(wait=True)
        super().end_of_forward(loss)


@pytest.mark.parametrize("checkpoint", [None, "all"])
def test_the_end_of_forward(checkpoint: str | None, tmp_path: Path) -> None:
    model, batch = Mlp(), torch.randn(1024, 32)
    options: Any = {"checkpoint": checkpoint, "optimizer": None}
    predicted = memopt.anatomy(model, batch, offload=True, **options)
    if checkpoint:
        memopt.apply_checkpointing(model)
        for block in model.blocks:
            memopt.checkpoint_wrapper(block, offload=tmp_path)
    step = Step(model, batch, None)
    if not checkpoint:
        step.context = partial(memopt.offload, "disk", directory=tmp_path)
    ledger = Waiting(model)
    traced(step, ledger)
    memopt.offload_stats(wait=True)
    left = trace_of(ledger, 0.0).moment("end of forward").by_category["activations"]
    wanted = predicted.moment_bytes("end of forward")["activations"]
    assert abs(left - wanted) <= 0.01 * wanted
