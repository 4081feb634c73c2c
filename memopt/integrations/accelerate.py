"""memopt for training loops around an Accelerator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

try:
    from accelerate import Accelerator
except ImportError as missing:
    raise ImportError(
        "memopt.integrations.accelerate needs accelerate: pip install accelerate"
    ) from missing

from memopt.integrations.first_batch import first_batch
from memopt.integrations.wanted import Effect, Wanted, on_device, put_on
from memopt.memory.batches import repeated
from memopt.memory.leaves import as_dict
from memopt.place import Place


def apply_memopt(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    data: Any,
    budget: int | str | None = None,
    *,
    convert: bool = False,
    checkpoint: bool = False,
    offload: Place | None = None,
    plan: str | Path | None = None,
    measure: bool = True,
) -> Effect:
    """Plan or convert a model that was prepared, before the first step, on all ranks.

        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        print(apply_memopt(accelerator, model, optimizer, loader, budget="22GiB").text)

    Args:
        accelerator: the one that prepared them. Its mixed precision and its steps of gradient
            accumulation count.
        model, optimizer: as `prepare` returned them.
        data: a loader, of which the first batch is looked at and nothing is used up; or a batch,
            which data needs that can be read once and not copied.
        budget, convert, checkpoint, offload, plan, measure: see
            `memopt.integrations.transformers.MemoptCallback`.

    Returns:
        What was put on the model: `text`, `metrics` in bytes, `undo()`.

    Raises:
        TypeError, ValueError: nothing is asked for, a plan together with `convert`, a budget that
            is no size, or data that can be read once, and not copied.
        OSError: `plan` is not there and there is no budget to make it for, or cannot be saved.
        What `memopt.plan` and `memopt.convert` raise.
    """
    wanted = Wanted("apply_memopt", budget, convert, checkpoint, offload, plan, measure)
    batch = (
        first_batch("apply_memopt", data) if isinstance(data, torch.utils.data.DataLoader) else data
    )
    times = accelerator.gradient_accumulation_steps
    effect = put_on(
        wanted,
        model,
        repeated(on_device(as_dict(batch), accelerator.device), times),
        getattr(optimizer, "optimizer", optimizer),
        None,  # prepare() has put autocast around the model's forward
        times,
    )
    accelerator.log(effect.metrics, step=0)
    return effect
