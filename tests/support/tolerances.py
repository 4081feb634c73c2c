"""Every tolerance of the op tests, with its reason.

A result r of an op is accurate where, element by element,

    |r - exact| <= u(tensor) |exact|  +  ROUNDINGS u(sums) magnitude  +  underflow

- u(dtype) is half the distance from 1 to the next number: what one correct rounding can cost,
  relatively. The first term is the rounding to the result's dtype, which no implementation avoids.
- u(sums) is the same for the type that sums are kept in: float32, or float64 for float64 tensors.
  `magnitude` (cases/) is the first-order error analysis of the formula: the size of what is rounded
  on the way, carried through to the result. It grows with mean/std, since a mean rounded to float32
  moves every element of its row.
- ROUNDINGS is how many roundings of that size the longest path of the formula has. See the table.
- Below the smallest normal number of the type, roundings are absolute, and hardware may flush to
  zero.

`worst_error` is the largest |r - exact| in units of that allowance. The tests ask for at most 1, or
at most what PyTorch's own op in the same dtype reaches on the same input: memopt is at least as
accurate as PyTorch, or as accurate as its arithmetic allows.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

# Per kind of result: how many roundings of the accumulation type stand between the inputs and it.
ROUNDINGS = {
    # sum of the row, mean, x - mean, square, sum, rstd, xhat, scale and shift, exponential and
    # polynomial
    "output": 4,
    # the same, then the two sums over the row and the difference of their multiples
    "grad_input": 8,
    # sums over rows: random roundings of partial sums that grow like sqrt(rows) for random
    # gradients and like rows for an expanded gradient, in parts of at least 32 rows: sqrt(32)
    # roundings of the whole sum
    "grad_parameter": 8,
}

# The mean and the reciprocal standard deviation are float32 (float64 for float64 tensors): their
# last rounding, one each for the sum and the division before it, and two for the square root.
STATISTICS_ROUNDINGS = 4

# For bfloat16 tensors a CPU computes GELU, silu and sigmoid to 2^-13 of the value, a 32nd of what
# rounding it costs (kernels/cpu/rounded_to.h).
SHORT_ACTIVATION = 2**-5


def is_short_in_bfloat16(name: str) -> bool:
    """Whether the op or activation of this name is one of those, or made of one."""
    return not {"gelu", "silu", "sigmoid"}.isdisjoint(re.split("[-_]", name))


# Root mean square errors are compared with PyTorch's directly; the margin covers the luck of the
# draw. Where PyTorch's is below one float32 rounding of the magnitude, memopt's may be as large as
# that.
AVERAGE_ERROR_RATIO = 1.02

# The float64 oracle is exact to a float32 result; a float64 result it judges with roundings of its
# own.
LARGEST_ERROR_FLOAT64 = 2

# Two instruction sets, or a CUDA kernel and the CPU's, sum a row in different orders: both are
# within the allowance of the exact result, so they are within twice that of each other.
BETWEEN_IMPLEMENTATIONS = 2


def roundoff(dtype: torch.dtype) -> float:
    """u(dtype): the largest relative error of one rounding to nearest."""
    return torch.finfo(dtype).eps / 2


def sums_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of sums and statistics for tensors of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def largest_error(dtype: torch.dtype) -> float:
    """How many allowances a result for tensors of `dtype` may be from the oracle's."""
    return LARGEST_ERROR_FLOAT64 if dtype == torch.float64 else 1


def allowance(
    exact: Tensor, magnitude: Tensor, roundings: float, dtype: torch.dtype, sums: torch.dtype
) -> Tensor:
    """The error that a result of type `dtype` may have, element by element, in float64."""
    smallest = torch.finfo(dtype).smallest_normal
    # float16 keeps numbers below its smallest normal one, at a fixed distance; the wider exponents
    # may flush.
    underflow = smallest * roundoff(dtype) if dtype == torch.float16 else smallest
    return roundoff(dtype) * exact.abs() + roundings * roundoff(sums) * magnitude + underflow


def worst_error(actual: Tensor, exact: Tensor, allowed: Tensor) -> float:
    """The largest error of `actual` in units of what is allowed; 0 for an empty tensor, inf for a
    NaN.
    """
    if actual.numel() == 0:
        return 0.0
    wide = actual.detach().cpu().double()
    error = torch.where(wide == exact, 0.0, (wide - exact).abs() / allowed)  # equal infinities too
    return float(error.nan_to_num(nan=float("inf")).max())


def root_mean_square(t: Tensor) -> float:
    """The root mean square of all elements."""
    return float(t.square().mean().sqrt())


# The error of a converted model against that of the unconverted one, as root mean squares: of all
# its results together, relative to their sizes, and of a single one. Half the seeds are on either
# side of 1; the errors of one result hang together, since few roundings near the loss move all.
MODEL_ERROR_RATIO = 1.5
RESULT_ERROR_RATIO = 3

# A gradient this much smaller than a model's largest is zero but for rounding (the bias of keys,
# which softmax does not see), and its error is judged by the largest's size.
NO_GRADIENT = 1e-9
