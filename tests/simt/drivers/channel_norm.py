"""group_norm, instance_norm and batch_norm.

The kernels read contiguous tensors as planes and channels-last ones as pixels, as
csrc/ops/channel_norm.cpp lays them out; parameters have the type of sums.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from tests.support.cases import Call, Results
from tests.support.cases.channel_norm import ChannelNormCase
from tests.support.cases.op import Saved
from tests.support.tolerances import sums_dtype

from .run import Run, activation_spec

__all__ = ["TENSORS", "backward", "forward"]

TENSORS = ("x", "y", "dy", "dz", "dx", "weight", "bias", "mean", "rstd", "dweight", "dbias")

# kPartElements of csrc/kernels/channel_norm.h.
PART_ELEMENTS = 8192


def forward(run: Run, case: ChannelNormCase, call: Call, statistics: bool) -> tuple[Results, Saved]:
    """Without `statistics` by those that the call has, or of batch norm in evaluation; these are
    then not among what is saved.
    """
    shape, sums = _shape(case, call), sums_dtype(call.input.dtype)
    given = dict(zip(case.saved, case._given(call), strict=True)) if not case.training else {}
    batch, channels = call.input.shape[:2]
    sets = (channels,) if case.over_batch else (batch, call.num_groups)
    saved = given or {name: run.memory.empty(*sets, dtype=sums) for name in case.saved}
    on_device = {name: run.memory.put(t) if given else t for name, t in saved.items()}
    parts = None if given else _moment_parts(run, case, call, shape, sets)
    y = _launch_forward(run, case, call, shape, on_device, parts)
    return Results(output=y), saved


def moments(run: Run, case: ChannelNormCase, call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, what it lacks of the mean, and variance of each channel: no output."""
    shape, sets = _shape(case, call), (call.input.shape[1],)
    dtype = sums_dtype(call.input.dtype)
    mean, shift, variance = (run.memory.empty(*sets, dtype=dtype) for _ in range(3))
    run.launch(
        "channel_norm_forward",
        x=run.put("x", _in_memory(call.input, shape)),
        mean=mean,
        shift=shift,
        variance=variance,
        unbias=1.0,
        parts=_moment_parts(run, case, call, shape, sets),
        shape=shape,
        dtype=call.input.dtype,
    )
    return mean, shift, variance


def input_gradient(
    run: Run, case: ChannelNormCase, call: Call, saved: Saved, means: Tensor
) -> Tensor:
    """By means that are given, as those over several ranks are."""
    shape = _shape(case, call)
    x = run.put("x", _in_memory(call.input, shape))
    dx = run.empty("dx", x.shape, x.dtype)
    run.launch(
        "channel_norm_backward",
        **_common(run, call, shape),
        dy=run.put("dy", _in_memory(call.grad_output, shape)),
        x=x,
        mean=run.memory.put(saved["mean"]),
        rstd=run.memory.put(saved["rstd"]),
        dx=dx,
        means=run.memory.put(means),
    )
    return _as_tensor(dx, call, shape)


def _moment_parts(
    run: Run, case: ChannelNormCase, call: Call, shape: dict[str, Any], sets: tuple[int, ...]
) -> Tensor:
    runs = shape["batch"] if case.over_batch else 1
    elements = math.prod(call.input.shape) // (math.prod(sets) * runs)
    number = math.prod(sets) * runs * math.ceil(elements / PART_ELEMENTS)
    dtype = sums_dtype(call.input.dtype)
    return run.memory.empty(_pixel_parts(shape) or number, 3, dtype=dtype)


def again(run: Run, case: ChannelNormCase, call: Call, saved: Saved) -> Tensor:
    """The output from the statistics, as a recipe writes it."""
    on_device = {name: run.memory.put(t) for name, t in saved.items()}
    return _launch_forward(run, case, call, _shape(case, call), on_device, None)


def gradient_of_output(run: Run, case: ChannelNormCase, call: Call, saved: Saved) -> Tensor:
    """That of the norm's output, from the gradient of what the activation makes of it."""
    shape = _shape(case, call)
    on_device = {name: run.memory.put(t) for name, t in saved.items()}
    dz = run.put("dz", _in_memory(call.grad_output, shape))
    return _launch_forward(run, case, call, shape, on_device, None, dz=dz)


def _behind(case: ChannelNormCase) -> dict[str, Any]:
    return {} if case.activation is None else {"activation": activation_spec(case.activation)}


def _launch_forward(
    run: Run,
    case: ChannelNormCase,
    call: Call,
    shape: dict[str, Any],
    statistics: Saved,
    parts: Tensor | None,
    **more: Tensor,
) -> Tensor:
    x = run.put("x", _in_memory(call.input, shape))
    y = run.empty("y", x.shape, x.dtype)
    run.launch(
        "channel_norm_forward",
        **_common(run, call, shape),
        **_behind(case),
        x=x,
        y=y,
        bias=_parameter(run, "bias", call),
        mean=statistics["mean"],
        rstd=statistics["rstd"],
        parts=parts,
        eps=call.eps,
        **more,
    )
    return _as_tensor(y, call, shape)


def backward(
    run: Run,
    case: ChannelNormCase,
    call: Call,
    saved: Saved,
    output_mask: tuple[bool, ...] | None,
    recompute_output: bool,
    in_place: bool,
) -> Results:
    del recompute_output, in_place  # there is neither
    shape, sums = _shape(case, call), sums_dtype(call.input.dtype)
    if output_mask is None:
        output_mask = (True, call.weight is not None, call.bias is not None)
    x = run.put("x", _in_memory(call.input, shape))
    channels = call.input.shape[1]
    dx = run.empty("dx", x.shape, x.dtype) if output_mask[0] else None
    dweight, dbias = (
        run.empty(name, (channels,), sums) if wanted else None
        for name, wanted in zip(("dweight", "dbias"), output_mask[1:], strict=True)
    )
    bias = _parameter(run, "bias", call) if case.activation is not None else None
    means = parts = None
    if output_mask[0] and case.training:
        means = run.memory.empty(saved["mean"].numel(), 2, dtype=sums)
    if means is not None or any(output_mask[1:]):
        planes = shape["batch"] * channels * math.ceil(shape["size"] / PART_ELEMENTS)
        parts = run.memory.empty(_pixel_parts(shape) or planes, 2, dtype=sums)
    run.launch(
        "channel_norm_backward",
        **_common(run, call, shape),
        **_behind(case),
        dy=run.put("dy", _in_memory(call.grad_output, shape)),
        x=x,
        bias=bias,
        mean=run.memory.put(saved["mean"]),
        rstd=run.memory.put(saved["rstd"]),
        dx=dx,
        dweight=dweight,
        dbias=dbias,
        means=means,
        parts=parts,
    )
    narrow = call.weight if call.weight is not None else call.bias
    return Results(
        grad_input=None if dx is None else _as_tensor(dx, call, shape),
        grad_weight=None if dweight is None else dweight.to(narrow.dtype),
        grad_bias=None if dbias is None else dbias.to(narrow.dtype),
    )


def _shape(case: ChannelNormCase, call: Call) -> dict[str, Any]:
    """memopt::kernels::ChannelShape."""
    batch, channels, *spatial = call.input.shape
    size = math.prod(spatial)
    pixels = not call.input.is_contiguous()
    if case.over_batch and (pixels or size == 1):
        batch, size, pixels = 1, batch * size, True
    return {
        "batch": batch,
        "channels": channels,
        "size": size,
        "groups": call.num_groups,
        "over_batch": case.over_batch,
        "pixels": pixels,
    }


def _pixel_parts(shape: dict[str, Any]) -> int:
    """Parts times channels; 0 where there are planes."""
    pixels = min(max(shape["size"] // 64 // 32 * 32, 32), 128)  # part_pixels() of that file
    parts = shape["batch"] * math.ceil(shape["size"] / pixels)
    return parts * shape["channels"] if shape["pixels"] else 0


def _in_memory(t: Tensor, shape: dict[str, Any]) -> Tensor:
    if shape["pixels"]:
        return t.movedim(1, -1).reshape(-1, t.shape[1])
    return t.reshape(-1, shape["size"])


def _as_tensor(rows: Tensor, call: Call, shape: dict[str, Any]) -> Tensor:
    batch, channels, *spatial = call.input.shape
    if shape["pixels"]:
        return rows.reshape(batch, *spatial, channels).movedim(-1, 1)
    return rows.reshape(call.input.shape)


def _parameter(run: Run, name: str, call: Call) -> Tensor | None:
    t = call.tensors[name]
    return run.put(name, None if t is None else t.to(sums_dtype(call.input.dtype)))


def _common(run: Run, call: Call, shape: dict[str, Any]) -> dict[str, Any]:
    weight = _parameter(run, "weight", call)
    return {"weight": weight, "shape": shape, "dtype": call.input.dtype}
