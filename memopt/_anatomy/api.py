"""`memopt.anatomy`."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import ExitStack, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from memopt._anatomy.findings import AllocatorRow
from memopt._anatomy.formulas import formulas, shape_of
from memopt._anatomy.report import Anatomy
from memopt._arguments import check_flags
from memopt._checkpoint.blocks import find_blocks
from memopt._checkpoint.caches import note_on_caches
from memopt._progress import doing, progress
from memopt.memory.allocator import DeviceBytes
from memopt.memory.asked import (
    asked_step,
    check_measure,
    check_module,
    has_values,
    home_of,
    target_of,
)
from memopt.memory.batches import rows_in
from memopt.memory.copies import copied
from memopt.memory.histories import with_gradient_as
from memopt.memory.ledger import Ledger
from memopt.memory.messages import note_on_mode
from memopt.memory.optimizers import OptimizerLike
from memopt.memory.pieces import Piece
from memopt.memory.predicted.outcome import DependsOnValues
from memopt.memory.predicted.predict import Looks
from memopt.memory.saved import let_go_of_graphs
from memopt.memory.step import LossLike, Step, StepFunction, traced
from memopt.memory.storages import tensors_in
from memopt.memory.trace import Trace, trace_of
from memopt.memory.unchanged import Written, unchanged
from memopt.place import Place
from memopt.whatif.advice import advise
from memopt.whatif.away import OffloadLedger, apply_fates, check_place
from memopt.whatif.fates import Checkpoint, Fates, predicted_trace


@progress("memopt.anatomy")
def anatomy(
    model: nn.Module,
    batch: Any,
    *,
    loss: LossLike = None,
    step: StepFunction = None,
    optimizer: OptimizerLike = torch.optim.AdamW,
    measure: bool | Literal["auto"] = "auto",
    device: str | torch.device | None = None,
    autocast: torch.dtype | None = None,
    micro_batches: int = 1,
    set_to_none: bool = True,
    recipes: bool = False,
    head: bool = False,
    chunks: int | None = None,
    checkpoint: Checkpoint = None,
    offload: Place | None = None,
    advice: bool = False,
) -> Anatomy:
    """Show where the memory of a training step is: every category, at every instant.

        print(memopt.anatomy(model, batch, optimizer=optimizer))
        memopt.anatomy(model, batch, checkpoint="all", measure=False).peak.total

    One step (forward, loss, backward, optimizer; the second one, since the first makes the
    optimizer's state) is predicted and may be measured. Nothing of the model, the batch and the
    optimizer changes: both happen on copies, and what functions close over (a loss, hooks) is put
    back. A prediction runs the very step, but its tensors have no values, and no kernel runs; it
    takes seconds and next to no memory for models of any size, also for one on the meta device.

    Six categories add up to all bytes, each storage counted once: weights; gradients; optimizer
    states; activations, which are saved for backward; temporary buffers; and functionality-specific
    memory: inputs, buffers and other tensors that modules hold, and weights in autocast's dtype. A
    storage is in one category for all of its life. Scratch that a CPU kernel allocates and frees
    inside itself is a temporary buffer; where oneDNN chooses how much, it is a bound, and the peak
    names it as its margin. Of CUDA's kernels scratch is not counted.

    Args:
        model: on any device, also meta.
        batch: on the model's device: a mapping of keyword arguments, a tuple or list of
            positional ones, or the only one. May be meta tensors, where nothing is measured.
        loss: makes the loss of what the model returns. Default: the output's `loss`, its first
            element or the output.
        step: `step(model, batch)` runs forward and backward itself, see `memopt.plan`.
        optimizer: one of the model's, or a class or function that makes one of parameters, or None.
            What it trains beside the model (a loss's weights) counts too; a class gets the
            parameters of the model, and those of a `loss` that is a module.
        measure: True: run a step on a copy as well, on the model's device. That takes the memory of
            another model and its optimizer's states. "auto": only if the step cannot be predicted.
        device: predict for "cpu" or "cuda": there PyTorch saves other masks of dropout, chooses
            other kernels for attention and optimizers, and rounds allocations up to 512 bytes.
            Default: the model's; of a model on meta, "cuda".
        autocast: run forward under torch.autocast with this dtype.
        micro_batches: split the batch for gradient accumulation.
        set_to_none: whether zero_grad, behind the step, drops gradients.
        recipes: what if memopt.convert had converted the model.
        head: what if the head ran in chunks of rows with its loss; as with `recipes`.
        chunks: what if modules that work on each row alone (the MLPs of blocks) ran in so many
            chunks, as by `memopt.convert(..., chunks=n)`.
        checkpoint: what if blocks were regions: "all"; a number k, every k-th; for models whose
            blocks are an nn.Sequential also "sqrt" and "optimal".
        offload: "cpu", "disk" or a directory (a `pathlib.Path`): what if activations (with
            `checkpoint`: the regions' inputs) waited there between forward and backward. A
            prediction counts copies as done at once. Measured on a CPU, from whose memory "cpu"
            moves nothing, it must be one of the others.
        advice: also predict what would help. Takes a prediction for each remedy.

    Returns:
        An `Anatomy`.

    Raises:
        TypeError: `model` is no module, there is no loss, or `optimizer` is no such thing.
        ValueError: the loss is no scalar, the batch is on another device, an option is out of its
            range, or a model without values is to be measured.
        DependsOnValues: the step looks at values, and measure=False.

    Source: the categories are those of torch.profiler's memory timeline; the prediction is the
    ledger's own. Overhead: see `Anatomy.overhead`.
    """
    check_module("anatomy", model)
    check_flags("anatomy", set_to_none=set_to_none, advice=advice)
    target = target_of("anatomy", model, device)
    check_measure("anatomy", measure)
    asked = asked_step(
        "anatomy", model, batch, optimizer, loss, autocast, micro_batches, set_to_none, step
    )
    batch, home = asked.batch, home_of(model).type
    without_values = not has_values(model, batch)
    fates = Fates(recipes, checkpoint, head, chunks, offload=offload, who="anatomy")
    notes: list[str] = []
    predicted, ledger, problem = None, None, None
    looks = Looks()
    try:
        predicted, ledger = predicted_trace(asked, fates, target, looks)
    except DependsOnValues as error:
        if measure is False or without_values:
            raise
        problem = error
        notes.append(f"not predicted, but measured: {error}")
    measured, overhead, allocator = None, None, None
    pieces = () if ledger is None else tuple(ledger.pieces)
    if measure is True or problem is not None:
        if without_values:
            raise ValueError(
                "anatomy: a step that is measured must have a model and a batch with values, got "
                "meta tensors; measure=False predicts it"
            )
        if offload:
            check_place(fates, home)
        measured, overhead, allocator, real = looks.depth.run(
            lambda: _measured(asked, fates, home), lambda found: found[0].instants
        )
        pieces = pieces or real
    regions = () if fates.checkpoint is None else find_blocks(model)
    notes += filter(None, (note_on_caches(model, regions), note_on_mode(model)))
    is_cuda = target == "cuda"
    found = formulas(
        model,
        batch,
        asked.optimizer,
        fates,
        autocast=autocast,
        micro_batches=micro_batches,
        cuda=is_cuda,
    )
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return Anatomy(
        model=type(model).__name__,
        device=target if predicted is not None else home,
        parameters=sum(p.numel() for p in model.parameters()),
        trained=trained,
        rows=rows_in("anatomy", batch),
        options=_words(asked, fates),
        predicted=predicted,
        measured=measured,
        formula=found,
        flops_6nd=_six_n_d(model, batch, autocast),
        advice=()
        if not advice or predicted is None or ledger is None
        else advise(asked, fates, target, predicted, ledger, looks),
        overhead=overhead,
        allocator=allocator,
        notes=tuple(notes),
        pieces=pieces,
    )


def _measured(
    step: Step, fates: Fates, device: str
) -> tuple[Trace, float | None, AllocatorRow | None, tuple[Piece, ...]]:
    doing("measuring step")
    is_cuda = device == "cuda"
    with ExitStack() as stack:
        # Functions are not copied.
        before = stack.enter_context(unchanged(*step.roots, written=Written()))
        with before.watching():
            real = _copy_of(step, before.computed())
            stack.callback(let_go_of_graphs, real.model, step.model.modules())
            apply_fates(real, fates)
            kind = OffloadLedger if fates.offload else Ledger
            ledger = kind(real.model, device)
            put_back = real.with_new_inputs()
            real.run()
        put_back()
        _synchronize(is_cuda)
        start = time.perf_counter()
        real.run()
        _synchronize(is_cuda)
        plain = time.perf_counter() - start
        put_back()
        found = DeviceBytes(device) if is_cuda else None
        with nullcontext() if found is None else found:
            _, seconds = traced(real, ledger)
    row = None
    trace = trace_of(ledger, seconds)
    if found is not None:
        known = sum(entry.piece.nbytes for entry in ledger.log if entry.instant == 0)
        row = AllocatorRow(found.most, found.reserved, found.before, known)
    return trace, seconds / plain, row, tuple(ledger.pieces)


def _copy_of(step: Step, computed: Iterable[Tensor]) -> Step:
    # PyTorch copies no results of autograd deeply, and loses the sizes of nested tensors.
    nested = (tensor for tensor in tensors_in(step.batch) if tensor.is_nested)
    memo = {id(t): with_gradient_as(t, t.detach().clone()) for t in (*computed, *nested)}
    return step.with_copies(lambda objects, shared: copied(objects, {**memo, **shared})[0])


def _synchronize(is_cuda: bool) -> None:
    if is_cuda:
        torch.cuda.synchronize()


def _words(step: Step, fates: Fates) -> str:
    words = [str(fates)]
    if step.autocast is not None:
        words.append(f"autocast {str(step.autocast).removeprefix('torch.')}")
    if step.micro_batches > 1:
        words.append(f"{step.micro_batches} micro-batches")
    words.append(type(step.optimizer).__name__ if step.optimizer is not None else "no optimizer")
    return ", ".join(words)


def _six_n_d(model: nn.Module, batch: Any, autocast: torch.dtype | None) -> int | None:
    """6 operations for each token and each parameter of a matrix product."""
    shape = shape_of(model, batch, autocast)
    if shape is None:
        return None
    used = {
        p: None
        for m in model.modules()
        if not isinstance(m, nn.Embedding)
        for p in m.parameters(recurse=False)
        if p.dim() > 1
    }
    return 6 * sum(p.numel() for p in used) * shape.tokens
