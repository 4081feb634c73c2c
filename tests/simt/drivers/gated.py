"""Gated units, of two tensors and of one that holds both."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.support.cases import Call, Results
from tests.support.cases.gated import GatedCase, PackedCase
from tests.support.cases.op import Saved

from .run import Run, activation_spec

TENSORS = ("gate", "up", "y", "dy", "dgate", "dup")


def forward(run: Run, case: GatedCase, call: Call, statistics: bool) -> tuple[Results, Saved]:
    gate, up, stride = _inputs(run, case, call)
    rows, cols = call.grad_output.shape
    y = run.empty("y", (rows, cols), gate.dtype)
    run.launch(
        "gated_forward",
        gate=gate,
        up=up,
        y=y,
        rows=rows,
        cols=cols,
        gate_row_stride=stride,
        up_row_stride=stride,
        interleaved=_interleaved(case),
        dtype=gate.dtype,
        activation=activation_spec(case.activation),
    )
    return Results(output=y), {}


def backward(
    run: Run,
    case: GatedCase,
    call: Call,
    saved: Saved,
    output_mask: tuple[bool, ...] | None,
    recompute_output: bool,
    in_place: bool,
) -> Results:
    """in_place: dgate over dy, where they have one stride."""
    packed = isinstance(case, PackedCase)
    in_place = in_place and not packed
    wanted = output_mask or (True, True)
    gate, up, stride = _inputs(run, case, call)
    rows, cols = call.grad_output.shape
    dy_row_gap = 0 if in_place else run.layout.row_gap
    dy = run.put("dy", call.grad_output, row_gap=dy_row_gap, writable=in_place)
    y = run.empty("y", (rows, cols), gate.dtype) if recompute_output else None
    grad_cols = 2 * cols if packed else cols
    dgate = None
    if wanted[0]:
        dgate = dy if in_place else run.empty("dgate", (rows, grad_cols), gate.dtype)
    if packed:
        dup = _beside(dgate, case, cols)
    else:
        dup = run.empty("dup", (rows, cols), gate.dtype) if wanted[1] else None
    if not (packed or wanted[0] or recompute_output):
        up = None
    run.launch(
        "gated_backward",
        dy=dy,
        gate=gate,
        up=up,
        dgate=dgate,
        dup=dup,
        y=y,
        rows=rows,
        cols=cols,
        dy_row_stride=cols + dy_row_gap,
        gate_row_stride=stride,
        up_row_stride=stride,
        grad_row_stride=grad_cols,
        interleaved=_interleaved(case),
        dtype=gate.dtype,
        activation=activation_spec(case.activation),
    )
    if packed:
        return Results(output=y, grad_input=dgate)
    return Results(output=y, grad_gate=dgate, grad_up=dup)


def _interleaved(case: GatedCase) -> bool:
    return isinstance(case, PackedCase) and case.interleaved


def _inputs(run: Run, case: GatedCase, call: Call) -> tuple[Tensor, Tensor, int]:
    """gate, up, and the stride of their rows."""
    gap, cols = run.layout.row_gap, call.grad_output.shape[1]
    if isinstance(case, PackedCase):
        packed = run.put("gate", call.input, row_gap=gap)
        return packed, _beside(packed, case, cols), 2 * cols + gap
    gate, up = run.put("gate", call.gate, row_gap=gap), run.put("up", call.up, row_gap=gap)
    return gate, up, cols + gap


def _beside(packed: Tensor, case: PackedCase, cols: int) -> Tensor:
    """What begins where up does."""
    if packed.numel() == 0:
        return packed
    begin = packed.storage_offset() + (1 if case.interleaved else cols)
    return torch.as_strided(packed, (1,), (1,), begin)
