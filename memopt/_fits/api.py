"""`memopt.fits`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from memopt._checkpoint.blocks import find_blocks
from memopt._errors import in_the_name_of
from memopt._extension import HAS_NATIVE
from memopt._fits.report import Fits, Way
from memopt._progress import progress
from memopt.memory.asked import asked_step, check_count, target_of
from memopt.memory.batches import rows_of
from memopt.memory.ledger import Ledger
from memopt.memory.pieces import GRADIENTS, STATES, WEIGHTS, Entry
from memopt.memory.predicted.predict import Looks
from memopt.memory.sizes import as_bytes
from memopt.memory.step import LossLike, OptimizerLike, Step, StepFunction
from memopt.memory.trace import Trace, trace_of
from memopt.place import Place
from memopt.whatif.fates import Checkpoint, Fates, offloaded, predicted_trace
from memopt.whatif.quantized import Bits, quantized_weights, with_quantized_weights
from memopt.whatif.ranks import Parallel, log_of_rank

# What a CUDA context, the libraries' workspaces and the gaps between allocations take, roughly.
_RESERVE_ON_CUDA = 1 << 30
_MOST_RANKS = 1 << 14
_MOST_WAYS = 3


@in_the_name_of("memopt.fits", "memopt.anatomy", "anatomy")
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
    device: str | None = None,
) -> Fits:
    """Say whether a training step fits into a device's memory, by how much, and what would help.

        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        print(memopt.fits(model, batch, "80GB", autocast=torch.bfloat16, ranks=8))

    Nothing runs and no weights are needed: the step is predicted, as by `memopt.anatomy`. Where it
    does not fit, changes are predicted too, the cheapest first, until three that fit are found.

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
    if not isinstance(model, nn.Module):
        raise TypeError(f"memopt.fits: model must be an nn.Module, got {type(model).__name__}")
    check_count("memopt.fits", "ranks", ranks)
    if parallel not in ("fsdp", "ddp"):
        raise ValueError(f'memopt.fits: parallel must be "fsdp" or "ddp", got {parallel!r}')
    if weight_bits not in (None, 4, 8):
        raise ValueError(f"memopt.fits: weight_bits must be 4, 8 or None, got {weight_bits!r}")
    whole = as_bytes("memopt.fits: memory", memory)
    target = target_of("memopt.fits", model, device)
    kept = _reserved(reserve, target)
    if kept >= whole:
        raise ValueError(f"memopt.fits: memory must be above the reserve of {kept} B, got {whole}")
    asked = asked_step(
        "memopt.fits", model, batch, optimizer, loss, autocast, micro_batches, function=step
    )
    fates = Fates(recipes, checkpoint, head, chunks, offload=offload, who="memopt.fits")
    fates = fates.with_rows(asked)
    setting = _Setting(asked, fates, target, ranks, parallel, weight_bits)
    trace = setting.trace()
    peaks = trace.category_peaks()
    always = peaks[WEIGHTS] + peaks[GRADIENTS] + peaks[STATES]
    room = whole - kept
    ways = () if trace.peak.total <= room else tuple(_ways(setting, room, always))
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
        rows=rows_of("memopt.fits", batch),
        fates=str(fates),
        ways=ways,
    )


@dataclass(frozen=True)
class _Setting:
    """A step, and the devices that it runs on."""

    step: Step
    fates: Fates
    target: str
    ranks: int
    parallel: Parallel
    weight_bits: Bits | None
    known: dict[tuple[Fates, int], tuple[Trace, Ledger]] = field(default_factory=dict)
    """Predicted steps by their fates and micro-batches: devices change their logs alone."""
    looks: Looks = field(default_factory=Looks)

    def trace(self) -> Trace:
        """The memory of one rank, predicted."""
        key = self.fates, self.step.micro_batches
        if key not in self.known:
            self.known[key] = predicted_trace(self.step, self.fates, self.target, self.looks)
        trace, ledger = self.known[key]
        if self.ranks == 1 and self.weight_bits is None:
            return trace
        log: list[Entry] = offloaded(ledger, self.fates) if self.fates.offload else ledger.log
        model = self.step.model
        if self.weight_bits is not None:
            compute = self.step.autocast or next(model.parameters()).dtype
            log = with_quantized_weights(log, model, self.weight_bits, compute)
        return trace_of(ledger, 0.0, log_of_rank(log, ledger, model, self.ranks, self.parallel))

    def with_micro_batches(self, count: int) -> _Setting:
        return replace(self, step=replace(self.step, micro_batches=count))


_Change = tuple[str, _Setting]


def _ways(setting: _Setting, room: int, always: int) -> Iterator[Way]:
    """Changes that make it fit, at most three; where none does, the one that comes nearest.

    Args:
        room: bytes that the step may take.
        always: bytes that no fate of activations changes.
    """
    found = 0
    nearest: Way | None = None
    for group in _changes(setting, with_fates=always <= room):
        for how, changed in group:
            try:
                peak = changed.trace().peak.total
            except Exception:  # not with this model, whose own error it may be
                continue
            way = Way(how, peak, peak <= room)
            nearest = way if nearest is None or peak < nearest.peak else nearest
            if way.fits:
                yield way
                found += 1
                break
        if found == _MOST_WAYS:
            return
    if not found and nearest is not None:
        yield nearest


def _changes(setting: _Setting, with_fates: bool) -> Iterator[Iterable[_Change]]:
    """Groups of changes, of each of which the first that is enough is wanted; from what costs least
    time to what costs most, more devices last.
    """
    has_blocks = bool(find_blocks(setting.step.model).modules)
    wanted = [
        ("memopt.convert(model)", HAS_NATIVE, {"recipes": True}),
        ("memopt.apply_activation_checkpointing(model)", has_blocks, {"checkpoint": "all"}),
        (
            "memopt.convert(model, checkpoint=True)",
            HAS_NATIVE and has_blocks,
            {"recipes": True, "checkpoint": "all"},
        ),
    ]
    name, best = "", setting
    for how, is_there, options in wanted:
        fates = replace(setting.fates, **options)  # type: ignore[arg-type]
        if is_there and fates != setting.fates:
            name, best = f"{how}, ", replace(setting, fates=fates)
            if with_fates:
                yield [(how, best)]
    if with_fates and HAS_NATIVE and not best.fates.offload:
        away = replace(best, fates=replace(best.fates, offload="cpu"))
        yield [(f"{name}with activations offloaded", away)]
    if with_fates:
        yield _smaller(name, best)
    if setting.parallel == "fsdp":
        yield _more_ranks(name, best)


def _smaller(name: str, setting: _Setting) -> Iterator[_Change]:
    rows = rows_of(setting.step.who, setting.step.batch)
    count = setting.step.micro_batches
    while count < rows:
        count = min(2 * count, rows)
        how = f"{name}memopt.accumulate(model, batch, micro_batch={-(-rows // count)})"
        yield how, setting.with_micro_batches(count)


def _more_ranks(name: str, setting: _Setting) -> Iterator[_Change]:
    ranks = setting.ranks
    while ranks < _MOST_RANKS:
        ranks *= 2
        yield f"{name}FSDP2 over {ranks} ranks", replace(setting, ranks=ranks)


def _reserved(reserve: int | str | None, target: str) -> int:
    if reserve is None:
        return _RESERVE_ON_CUDA if target == "cuda" else 0
    if reserve == 0 and not isinstance(reserve, bool):
        return 0
    return int(as_bytes("memopt.fits: reserve", reserve))
