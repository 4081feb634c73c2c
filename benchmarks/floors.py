"""The least peaks of a step, model by model: as it is, with torch.utils.checkpoint around each
block and around segments of sqrt(L) of them, with default regions, and by the plan that needs
least.

Models are those of by_model.py. Peaks are what the CPU's allocator gives out in forward and
backward beyond what was there before, gradients and kernels' own memory included. No times are
taken.

`python -m benchmarks.floors [--out FILE.json] [--docs FILE.md] [--only NAME ...] [--add]`
"""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memopt
from benchmarks.by_model import made, make_table
from benchmarks.memory import peak_bytes
from benchmarks.region_models.parts import InOrder, Made
from benchmarks.summary import table
from memopt._checkpoint.blocks import find_blocks
from memopt.memory.batches import as_dict, call
from memopt.memory.calls.measure import sum_of_outputs

OP = "floors"
PLAIN, BLOCKS, SEGMENTS, REGIONS, PLAN = "plain", "blocks", "segments", "regions", "plan"
_CHAIN = 4
"""Layers of a chain that has segments, at the least."""
_WARM = 2
"""Steps until the peak is taken: a first one makes what a model keeps."""


def measure(make: Made) -> dict[str, Any]:
    """The record of a model, as it stands in the JSON file. A way that changes nothing is left out,
    and what a model cannot do is said.
    """
    ways: dict[str, Callable[[nn.Module, Any], object]] = {
        PLAIN: lambda model, batch: True,
        BLOCKS: _around_blocks,
        SEGMENTS: _around_segments,
        REGIONS: lambda model, batch: memopt.apply_activation_checkpointing(model, batch=batch),
        PLAN: _planned,
    }
    case: dict[str, Any] = {}
    for name, put in ways.items():
        model, batch = made(make)
        try:
            if put(model, batch):
                case[f"{name}_bytes"] = _peak(model, batch)
        except Exception as error:
            case[f"{name}_error"] = f"{type(error).__name__}: {error}"[:300]
    return case


def _peak(model: nn.Module, batch: Any) -> int:
    def step() -> None:
        sum_of_outputs(call(model, as_dict(batch))).backward()

    for _ in range(_WARM):
        model.zero_grad(set_to_none=True)
        gc.collect()
        torch.manual_seed(1)
        peak = peak_bytes(step, torch.device("cpu"))
    return peak


def _around_blocks(model: nn.Module, batch: Any) -> bool:
    """torch.utils.checkpoint around each of the blocks that structure shows, if there are any."""
    blocks = find_blocks(model)
    for block in blocks:
        _set_forward(block, partial(checkpoint, block.forward, use_reentrant=False))
    return bool(blocks)


def _around_segments(model: nn.Module, batch: Any) -> bool:
    """torch.utils.checkpoint around some sqrt(L) layers at a time, if a chain of L has most of the
    model's parameters.
    """
    chain = next((m for m in model.modules() if type(m) in (nn.Sequential, InOrder)), None)
    if chain is None or len(chain) < _CHAIN or 2 * _size(chain) < _size(model):
        return False
    layers, size = list(chain), math.isqrt(len(chain))
    segments = [nn.Sequential(*layers[n : n + size]) for n in range(0, len(layers), size)]

    def forward(x: Any) -> Any:
        for segment in segments:
            x = checkpoint(segment, x, use_reentrant=False)
        return x

    _set_forward(chain, forward)
    return True


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _set_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    setattr(module, "forward", forward)  # noqa: B010 (mypy refuses to assign to a method)


def _planned(model: nn.Module, batch: Any) -> bool:
    """The plan at the floor."""
    plan = partial(memopt.plan, optimizer=None, loss=sum_of_outputs, measure=False)
    try:
        plan(model, batch, 1)
    except memopt.BudgetTooSmall as error:
        plan(model, batch, error.floor).apply()
    return True


def markdown(cases: Mapping[str, Any]) -> str:
    rows = []
    for name, case in cases.items():
        ratios = [
            f"{share:.3f}" if (share := _share(case, way)) is not None else "-"
            for way in (BLOCKS, SEGMENTS, REGIONS, PLAN)
        ]
        rows.append([name, f"{case['plain_bytes'] / 1e3:,.1f} kB", *ratios])
    columns = ["model", "plain peak", "blocks", "segments", "regions", "plan"]
    said = [
        f"- {name}: {case[f'{way}_error']}\n"
        for name, case in cases.items()
        for way in (REGIONS, PLAN)
        if f"{way}_error" in case
    ]
    errors = f"\n\n## What could not be done\n\n{''.join(said)}" if said else "\n"
    return f"{HEAD}\n\n{summary(cases)}\n\n{table(columns, rows)}{errors}"


def summary(cases: Mapping[str, Any]) -> str:
    planned = {name: share for name, case in cases.items() if (share := _share(case, PLAN))}
    best = {name: _best_of_torch(case) for name, case in cases.items()}
    above = [name for name, share in planned.items() if share > best[name]]
    regions = [
        name for name, share in planned.items() if share > (_share(cases[name], REGIONS) or 1)
    ]
    compared = sum(share < math.inf for share in best.values())
    return (
        f"{len(cases)} models, of which {len(planned)} can be planned. Of {compared} with blocks "
        f"the plan's peak is above the better of `torch.utils.checkpoint` in {_listed(above)}, and "
        f"of all above that of default regions in {_listed(regions)}."
    )


def _listed(names: Sequence[str]) -> str:
    return f"{len(names)} ({', '.join(names)})" if names else "none"


def _best_of_torch(case: Mapping[str, Any]) -> float:
    shares = (_share(case, BLOCKS), _share(case, SEGMENTS))
    return min((share for share in shares if share is not None), default=math.inf)


def _share(case: Mapping[str, Any], way: str) -> float | None:
    """A way's peak over the plain one; None where the model has no such way."""
    nbytes = case.get(f"{way}_bytes")
    return None if nbytes is None else nbytes / case["plain_bytes"]


HEAD = """# The least peaks, model by model

Peaks of one forward and backward in training mode (float32, CPU, small random configurations), as
the CPU's allocator gives memory out: beyond what was there before, with gradients and with what
kernels take and give back. As parts of the plain peak: *blocks* with `torch.utils.checkpoint`
around each of the blocks that `apply_activation_checkpointing(model)` finds, *segments* with it
around sqrt(L) layers at a time where a model is a chain of L, *regions* with
`apply_activation_checkpointing(model, batch=batch)`, and *plan* with the plan at its floor, the
least budget that `plan` accepts. "-" where a model has no blocks, or is no chain.

`python -m benchmarks.floors` makes this file and `benchmarks/results/cpu_floors.json`."""


def line(case: Mapping[str, Any]) -> str:
    shares = (_share(case, way) for way in (BLOCKS, SEGMENTS, REGIONS, PLAN))
    return " ".join("-" if share is None else f"{share:.3f}" for share in shares)


def main(argv: Sequence[str] | None = None) -> int:
    return make_table(OP, measure, markdown, line, argv)


if __name__ == "__main__":
    sys.exit(main())
