"""dropout_add_layer_norm and dropout_add_rms_norm. Forward's state is the one that the table's
calls draw.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tests.support.cases import Call, Results
from tests.support.cases.dropout import DropoutAddNormCase, drawn_state
from tests.support.cases.op import Saved
from tests.support.tolerances import sums_dtype

from .add_norm import _parameter_dtype
from .layer_norm import backward_parts
from .run import Int, Run

TENSORS = (
    *("x", "residual", "y", "sum", "dy", "dsum", "dx", "dx_dropped", "gamma", "beta"),
    *("dgamma", "dbeta", "partials"),
)

FAMILIES = {"dropout_add_layer_norm": Int(0), "dropout_add_rms_norm": Int(1)}


def forward(
    run: Run, case: DropoutAddNormCase, call: Call, statistics: bool
) -> tuple[Results, Saved]:
    saved: Saved = {}
    if statistics:
        rows, dtype = call.input.shape[0], call.input.dtype
        saved = {name: run.memory.empty(rows, dtype=sums_dtype(dtype)) for name in case.norm.saved}
        saved["rng_state"] = run.memory.empty(2, dtype=torch.int64)
    numbers = (None, saved.get("rng_state"), *drawn_state("cpu").tolist())
    results = _forward(run, case, call, saved, numbers)
    return results, {**saved, "sum": results["sum"]}


def forward_with_state(
    run: Run, case: DropoutAddNormCase, call: Call, rng_state: Tensor
) -> Results:
    """With the numbers of a state that is in device memory already."""
    return _forward(run, case, call, {}, (run.memory.put(rng_state), None, 1, 4))


def _forward(
    run: Run, case: DropoutAddNormCase, call: Call, saved: Saved, numbers: tuple
) -> Results:
    gap = run.layout.row_gap
    x = run.put("x", call.input, row_gap=gap)
    residual = run.put("residual", call.residual, row_gap=gap)
    gamma, beta = run.put("gamma", call.weight), run.put("beta", call.tensors.get("bias"))
    y, total = run.empty("y", x.shape, x.dtype), run.empty("sum", x.shape, x.dtype)
    rows, cols = x.shape
    run.call(
        "simt_dropout_add_norm_forward",
        *(x, residual, gamma, beta, y, total, saved.get("mean"), saved.get("rstd")),
        *(*numbers, call.p),
        *(rows, cols, cols + gap, call.eps, x.dtype, _parameter_dtype(call)),
        *(call.options.get("zero_centered_weight", False), FAMILIES[case.family]),
    )
    return Results(output=y, sum=total)


def backward(
    run: Run,
    case: DropoutAddNormCase,
    call: Call,
    saved: Saved,
    output_mask: tuple[bool, ...] | None,
    recompute_output: bool,
    in_place: bool,
) -> Results:
    """in_place: the residual's gradient over dy."""
    if output_mask is None:
        given = (getattr(call, name) is not None for name in case.parameters)
        output_mask = (True, True, *given)
    wanted = dict(zip(case.masked, output_mask, strict=True))
    gap = run.layout.row_gap
    dy_gap = 0 if in_place else gap
    dy = run.put("dy", call.grad_output, row_gap=dy_gap, writable=in_place)
    dsum = run.put("dsum", call.grads["sum"], row_gap=gap)
    x = run.put("x", saved["sum"], row_gap=gap)
    gamma, beta = run.put("gamma", call.weight), run.put("beta", call.tensors.get("bias"))
    dx = dy if in_place else run.empty("dx", x.shape, x.dtype) if wanted["residual"] else None
    dx_dropped = run.empty("dx_dropped", x.shape, x.dtype) if wanted["input"] else None
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
        "simt_dropout_add_norm_backward",
        *(dy, dsum, x, gamma, beta, mean, rstd, run.memory.put(saved["rng_state"]), call.p),
        *(dx, dx_dropped, y, dgamma, dbeta, partials),
        *(parts, rows, cols, cols + dy_gap, cols + gap, x.dtype, _parameter_dtype(call)),
        *(call.options.get("zero_centered_weight", False), FAMILIES[case.family]),
    )
    results = Results(output=y, grad_input=dx_dropped, grad_residual=dx, grad_weight=dgamma)
    return results.updated(grad_bias=dbeta) if "bias" in call.tensors else results
