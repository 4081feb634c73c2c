"""add_layer_norm and add_rms_norm; rms_norm goes through the same two launchers."""

from __future__ import annotations

import torch

from tests.support.cases import Call, OpCase, Results
from tests.support.cases.op import Saved
from tests.support.tolerances import sums_dtype

from .layer_norm import backward_parts
from .run import Int, Run

TENSORS = (
    *("x", "residual", "y", "sum", "dy", "dsum", "dx", "gamma", "beta", "dgamma", "dbeta"),
    "partials",
)

FAMILIES = {"rms_norm": Int(0), "add_layer_norm": Int(1), "add_rms_norm": Int(2)}


def forward(run: Run, case: OpCase, call: Call, statistics: bool) -> tuple[Results, Saved]:
    gap = run.layout.row_gap
    x = run.put("x", call.input, row_gap=gap)
    residual = run.put("residual", call.tensors.get("residual"), row_gap=gap)
    gamma, beta = run.put("gamma", call.weight), run.put("beta", call.tensors.get("bias"))
    y = run.empty("y", x.shape, x.dtype)
    total = None if residual is None else run.empty("sum", x.shape, x.dtype)
    rows, cols = x.shape
    stats = {
        name: run.memory.empty(rows, dtype=sums_dtype(x.dtype)) if statistics else None
        for name in case.saved
    }
    run.call(
        "simt_norm_forward",
        *(x, residual, gamma, beta, y, total, stats.get("mean"), stats["rstd"]),
        *(rows, cols, cols + gap, call.eps, x.dtype, _parameter_dtype(call)),
        *(call.options.get("zero_centered_weight", False), FAMILIES[case.family]),
    )
    saved = {**stats, "sum": total} if statistics else {"sum": total}
    return Results(output=y, sum=total), saved


def backward(
    run: Run,
    case: OpCase,
    call: Call,
    saved: Saved,
    output_mask: tuple[bool, ...] | None,
    recompute_output: bool,
    in_place: bool,
) -> Results:
    if output_mask is None:
        output_mask = (True, *(getattr(call, name) is not None for name in case.parameters))
    wanted = dict(zip(case.masked, output_mask, strict=True))
    gap = run.layout.row_gap
    dy_gap = 0 if in_place else gap
    dy = run.put("dy", call.grad_output, row_gap=dy_gap, writable=in_place)
    dsum = run.put("dsum", call.grads.get("sum"), row_gap=gap)
    x = run.put("x", saved["sum"], row_gap=gap)
    gamma, beta = run.put("gamma", call.weight), run.put("beta", call.tensors.get("bias"))
    dx = dy if in_place else run.empty("dx", x.shape, x.dtype) if wanted["input"] else None
    y = run.empty("y", x.shape, x.dtype) if recompute_output else None
    mean, rstd = (
        run.memory.put(saved[name].flatten()) if name in saved else None
        for name in ("mean", "rstd")
    )
    rows, cols = x.shape
    parts = backward_parts(run.device, rows, cols, x.dtype)
    dgamma, dbeta = (
        run.empty(name, (cols,), _parameter_dtype(call)) if wanted.get(parameter) else None
        for name, parameter in (("dgamma", "weight"), ("dbeta", "bias"))
    )
    partials = None
    if dgamma is not None or dbeta is not None:
        size = parts * len(case.parameters) * cols
        partials = run.empty("partials", (size,), sums_dtype(x.dtype))
    run.call(
        "simt_norm_backward",
        *(dy, dsum, x, gamma, beta, mean, rstd, dx, y, dgamma, dbeta, partials),
        *(parts, rows, cols, cols + dy_gap, cols + gap, x.dtype, _parameter_dtype(call)),
        *(call.options.get("zero_centered_weight", False), FAMILIES[case.family]),
    )
    results = Results(output=y, grad_input=dx, grad_residual=dx, grad_weight=dgamma)
    return results.updated(grad_bias=dbeta) if "bias" in call.tensors else results


def _parameter_dtype(call: Call) -> torch.dtype:
    given = next(iter(call.weights.values()), None)
    return call.input.dtype if given is None else given.dtype
