"""The norms: LayerNorm or RMSNorm, an activation behind it, a residual and dropout in front of it.

Dropout's state in forward is the one that the table's calls draw.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.simt.device import Device
from tests.support.cases import Call, OpCase, Results
from tests.support.cases.dropout import DropoutAddNormCase, drawn_state
from tests.support.cases.op import Saved
from tests.support.tolerances import sums_dtype

from .run import DTYPES, Run, activation_spec

ACTIVATIONS = {"none": "gelu", "tanh": "gelu_tanh"}  # by GELU's argument `approximate`


def forward(run: Run, case: OpCase, call: Call, statistics: bool) -> tuple[Results, Saved]:
    rows, dtype = call.input.shape[0], call.input.dtype
    saved: Saved = {}
    if statistics:
        names = [name for name in ("mean", "rstd") if name in _norm(case).saved]
        saved = {name: run.memory.empty(rows, dtype=sums_dtype(dtype)) for name in names}
    dropout: dict[str, Any] = {}
    if _drops(case):
        seed, offset = drawn_state("cpu").tolist()
        if statistics:
            saved["rng_state"] = run.memory.empty(2, dtype=torch.int64)
        rule = run.rule(call.p, seed=seed, offset=offset)
        dropout = {"drops": True, "rule": rule, "state": saved.get("rng_state")}
    results = _forward(run, case, call, saved, dropout)
    return results, {**saved, "sum": results["sum"]} if "sum" in results else saved


def forward_with_state(
    run: Run, case: DropoutAddNormCase, call: Call, rng_state: Tensor
) -> Results:
    """With the numbers of a state that is in device memory already."""
    rule = run.rule(call.p, run.memory.put(rng_state))
    return _forward(run, case, call, {}, {"drops": True, "rule": rule})


def _forward(run: Run, case: OpCase, call: Call, saved: Saved, dropout: dict[str, Any]) -> Results:
    gap = run.layout.row_gap
    x = run.put("x", call.input, row_gap=gap)
    residual = run.put("residual", call.tensors.get("residual"), row_gap=gap)
    y = run.empty("y", x.shape, x.dtype)
    total = None if residual is None else run.empty("sum", x.shape, x.dtype)
    rows, cols = x.shape
    run.launch(
        "norm_forward",
        **_common(run, case, call),
        **dropout,
        x=x,
        residual=residual,
        y=y,
        sum=total,
        mean=saved.get("mean"),
        rstd=saved.get("rstd"),
        rows=rows,
        cols=cols,
        x_row_stride=cols + gap,
        residual_row_stride=cols + gap,
        eps=call.eps,
    )
    return Results(output=y) if residual is None else Results(output=y, sum=total)


def backward(
    run: Run,
    case: OpCase,
    call: Call,
    saved: Saved,
    output_mask: tuple[bool, ...] | None,
    recompute_output: bool,
    in_place: bool,
) -> Results:
    """in_place: with a residual, its gradient over dy."""
    if output_mask is None:
        given = [getattr(call, name) is not None for name in case.parameters]
        output_mask = (True,) * (len(case.masked) - len(given)) + tuple(given)
    wanted = dict(zip(case.masked, output_mask, strict=True))
    adds = "residual" in call.tensors
    gap = run.layout.row_gap
    dy_gap = 0 if in_place else gap
    dy = run.put("dy", call.grad_output, row_gap=dy_gap, writable=in_place)
    dsum = run.put("dsum", call.grads.get("sum"), row_gap=gap)
    x = run.put("x", saved["sum"] if adds else call.input, row_gap=gap)
    rows, cols = x.shape
    dx = None
    if in_place:
        dx = dy
    elif wanted["residual" if _drops(case) else "input"]:
        dx = run.empty("dx", x.shape, x.dtype)
    y = run.empty("y", x.shape, x.dtype) if recompute_output else None
    dropout: dict[str, Any] = {}
    if _drops(case):
        dropped = run.empty("dx_dropped", x.shape, x.dtype) if wanted["input"] else None
        rule = run.rule(call.p, run.memory.put(saved["rng_state"]))
        dropout = {"dx_dropped": dropped, "rule": rule}
    mean, rstd = (
        run.memory.put(saved[name].flatten()) if name in saved else None
        for name in ("mean", "rstd")
    )
    dgamma, dbeta = (
        run.empty(name, (cols,), _parameter_dtype(call)) if wanted.get(parameter) else None
        for name, parameter in (("dgamma", "weight"), ("dbeta", "bias"))
    )
    parts = backward_parts(run.device, rows, cols, x.dtype)
    partials = None
    if dgamma is not None or dbeta is not None:
        size = parts * len(case.parameters) * cols
        partials = run.empty("partials", (size,), sums_dtype(x.dtype))
    run.launch(
        "norm_backward",
        **_common(run, case, call),
        **dropout,
        dy=dy,
        dsum=dsum,
        x=x,
        mean=mean,
        rstd=rstd,
        dx=dx,
        y=y,
        dgamma=dgamma,
        dbeta=dbeta,
        partials=partials,
        parts=parts,
        rows=rows,
        cols=cols,
        dy_row_stride=cols + dy_gap,
        dsum_row_stride=cols + gap,
        x_row_stride=cols + gap,
    )
    results = Results(output=y, grad_input=dropout.get("dx_dropped", dx))
    if adds:
        results = results.updated(grad_residual=dx)
    results = results.updated(grad_weight=dgamma)
    return results.updated(grad_bias=dbeta) if "bias" in case.parameters else results


def backward_parts(device: Device, rows: int, cols: int, dtype: torch.dtype) -> int:
    """How many parts the weight gradients of this shape are summed in."""
    return device.backward_parts(rows, cols, DTYPES[dtype])


def _drops(case: OpCase) -> bool:
    return isinstance(case, DropoutAddNormCase)


def _norm(case: OpCase) -> OpCase:
    """The case of the norm behind dropout."""
    return case.norm if isinstance(case, DropoutAddNormCase) else case


def _common(run: Run, case: OpCase, call: Call) -> dict[str, Any]:
    """What forward's and backward's Params share."""
    common: dict[str, Any] = {
        "gamma": run.put("gamma", call.weight),
        "beta": run.put("beta", call.tensors.get("bias")),
        "kind": 1 if "rms_norm" in case.family else 0,  # memopt::kernels::NormKind
        "zero_centered": call.options.get("zero_centered_weight", False),
        "dtype": call.input.dtype,
        "param_dtype": _parameter_dtype(call),
    }
    approximate = getattr(case, "approximate", None)
    if approximate is not None:
        common["activation"] = activation_spec(ACTIVATIONS[approximate])
    return common


def _parameter_dtype(call: Call) -> torch.dtype:
    given = next(iter(call.weights.values()), None)
    return call.input.dtype if given is None else given.dtype
