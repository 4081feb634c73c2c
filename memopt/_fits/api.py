"""`memopt.fits`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from memopt._arguments import check_count
from memopt._errors import in_the_name_of
from memopt._fits.report import Fits
from memopt._fits.ways import Setting, ways_of
from memopt._progress import progress
from memopt.memory.asked import asked_step, check_module, target_of
from memopt.memory.batches import rows_in
from memopt.memory.optimizers import OptimizerLike
from memopt.memory.pieces import GRADIENTS, STATES, WEIGHTS
from memopt.memory.sizes import as_bytes, as_text
from memopt.memory.step import LossLike, StepFunction
from memopt.place import Place
from memopt.whatif.fates import Checkpoint, Fates
from memopt.whatif.quantized import Bits, quantized_weights
from memopt.whatif.ranks import Parallel

# What a CUDA context, the libraries' workspaces and the gaps between allocations take, roughly.
_RESERVE_ON_CUDA = 1 << 30


@in_the_name_of("fits", "anatomy")
@progress("memopt.fits")
def fits(
    model: nn.Module,
    batch: Any,
    memory: int | str,
    *,
    optimizer: OptimizerLike = torch.optim.AdamW,
    loss: LossLike = None,
    step: StepFunction = None,
    autocast: torch.dtype | None = None,
    micro_batches: int = 1,
    recipes: bool = False,
    head: bool = False,
    chunks: int | None = None,
    checkpoint: Checkpoint = None,
    offload: Place | None = None,
    ranks: int = 1,
    parallel: Parallel = "fsdp",
    weight_bits: Bits | None = None,
    reserve: int | str | None = None,
    device: str | torch.device | None = None,
) -> Fits:
    """Say whether a training step fits into a device's memory, by how much, and what would help.

        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        print(memopt.fits(model, batch, "80GB", autocast=torch.bfloat16, ranks=8))

    Nothing runs and no weights are needed: the step is predicted, as by `memopt.anatomy`. Where it
    does not fit, changes are predicted too, the cheapest first, until three that fit are found:
    `convert` (with the head in chunks of rows, and MLPs), regions, the plan that needs least,
    offloading, smaller micro-batches, more ranks.

    Args:
        model: on any device, also meta.
        batch: of one rank: a mapping of keyword arguments, a tuple or list of positional ones, or
            the only one; also of meta tensors.
        memory: of one device: bytes, or a string: "80GB" (10^9), "24GiB" (2^30).
        optimizer, loss, step, autocast, micro_batches, recipes, head, chunks, checkpoint, offload:
            as of `memopt.anatomy`.
        ranks: how many devices train the model together.
        parallel: "fsdp" (default): weights, gradients and optimizer states are sharded over the
            ranks by FSDP2, each block a unit. "ddp": every rank has all of them, and buckets.
        weight_bits: 4 or 8: frozen linear weights are stored so, as QLoRA's. None: as they are.
        reserve: bytes of the device that the step cannot have. Default: on CUDA 1 GiB, for the
            context, libraries' workspaces and gaps between allocations, none of which is predicted;
            on the CPU 0.
        device: predict for "cpu" or "cuda". Default: the model's; of a model on meta, "cuda".

    Returns:
        A `Fits` (memopt.types), true where it fits: `peak`, `memory`, `spare`, `by_category`,
        `ways`. `print` it; `to_dict()`.

    Raises:
        TypeError, ValueError: an argument is of another kind or out of its range.
        DependsOnValues: the step looks at values, and cannot be predicted.

    Source: see memopt/whatif/ranks.py and quantized.py for what a rank holds. A test holds both
    kinds of ranks to the peak of processes that train.
    """
    check_module("fits", model)
    check_count("fits", "ranks", ranks)
    if parallel not in ("fsdp", "ddp"):
        raise ValueError(f'fits: parallel must be "fsdp" or "ddp", got {parallel!r}')
    if weight_bits not in (None, 4, 8):
        raise ValueError(f"fits: weight_bits must be 4, 8 or None, got {weight_bits!r}")
    whole = as_bytes("fits: memory", memory)
    target = target_of("fits", model, device)
    kept = _reserved(reserve, target)
    if kept >= whole:
        raise ValueError(
            f"fits: memory must be above the reserve of {as_text(kept)}, got "
            f"{as_text(whole)}; reserve= chooses another"
        )
    asked = asked_step(
        "fits", model, batch, optimizer, loss, autocast, micro_batches, function=step
    )
    fates = Fates(recipes, checkpoint, head, chunks, offload=offload, who="fits")
    fates = fates.with_rows(asked)
    setting = Setting(asked, fates, target, ranks, parallel, weight_bits)
    trace = setting.trace()
    peaks = trace.category_peaks()
    always = peaks[WEIGHTS] + peaks[GRADIENTS] + peaks[STATES]
    room = whole - kept
    ways = () if trace.peak.total <= room else tuple(ways_of(setting, room, always))
    return Fits(
        model=type(model).__name__,
        device=target,
        memory=whole,
        reserve=kept,
        peak=trace.peak.total,
        phase=trace.peak.phase,
        module=trace.peak.module,
        by_category=dict(trace.peak.by_category),
        always=always,
        ranks=ranks,
        parallel=parallel if ranks > 1 else "",
        weight_bits=weight_bits,
        quantized=len(quantized_weights(model)) if weight_bits else 0,
        rows=rows_in("fits", batch),
        fates=str(fates),
        ways=ways,
    )


def _reserved(reserve: int | str | None, target: str) -> int:
    if reserve is None:
        return _RESERVE_ON_CUDA if target == "cuda" else 0
    return int(as_bytes("fits: reserve", reserve, least=0))
