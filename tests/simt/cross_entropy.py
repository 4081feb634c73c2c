"""The launchers of cross_entropy and split_sum on CPU tensors, by way of the interpreter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.support.tolerances import sums_dtype

from .device import Device
from .drivers.run import DENSE, Layout, Run


def run(
    device: Device,
    logits: Tensor,
    target: Tensor | None,
    *,
    class_weight: Tensor | None = None,
    dloss: Tensor | None = None,
    dentropy: Tensor | None = None,
    log_sum: Tensor | None = None,
    entropy: Tensor | None = None,
    with_entropy: bool = False,
    gradient: bool = True,
    in_place: bool = False,
    layout: Layout = DENSE,
    **settings: Any,
) -> dict[str, Tensor | None]:
    """loss, log_sum, entropy and gradient of rows. log_sum given: that of a call before, and then
    only the gradient is there. target: classes, probabilities of the type of sums, or none.
    """
    run = Run(device, layout)
    rows, cols = logits.shape
    sums = sums_dtype(logits.dtype)
    gap = layout.row_gap
    again = log_sum is not None
    x = run.put("x", logits, row_gap=gap, writable=in_place)
    dx = None
    if gradient:
        dx = x if in_place else run.empty("dx", (rows, cols), logits.dtype)
    statistics = {
        "loss": None if again else run.memory.empty(rows, dtype=sums),
        "log_sum": run.memory.put(log_sum) if again else run.memory.empty(rows, dtype=sums),
        "entropy": run.memory.empty(rows, dtype=sums) if with_entropy else None,
    }
    if again and entropy is not None:
        statistics["entropy"] = run.memory.put(entropy)
    is_probabilities = target is not None and target.dim() == 2
    given = {
        "probabilities" if is_probabilities else "target": target,
        "class_weight": class_weight,
        "dloss": dloss,
        "dentropy": dentropy,
    }
    put = {name: None if t is None else run.memory.put(t) for name, t in given.items()}
    run.launch(
        "cross_entropy",
        x=x,
        dx=dx,
        **put,
        **statistics,
        dloss_stride=int(dloss is not None and dloss.dim() == 1),
        rows=rows,
        cols=cols,
        x_row_stride=cols + gap,
        dx_row_stride=cols + (gap if in_place else 0),
        probabilities_row_stride=cols,
        again=again,
        dtype=logits.dtype,
        **{"ignore_index": -100, "logit_scale": 1.0, **settings},
    )
    return {**statistics, "gradient": dx}


def run_split_sum(device: Device, parts: list[Tensor], offset: int = 0) -> Tensor:
    """The sum of bfloat16 vectors."""
    run = Run(device, Layout(offset=offset))
    upper = run.put("upper", parts[0].view(torch.int16), writable=True)
    lower = run.put("lower", torch.zeros(parts[0].numel(), dtype=torch.uint8), writable=True)
    for part in [*parts[1:], None]:
        x = None if part is None else run.put("x", part.view(torch.int16))
        run.launch("split_sum", upper=upper, lower=lower, x=x, size=parts[0].numel())
    assert upper is not None
    return upper.view(torch.bfloat16)
