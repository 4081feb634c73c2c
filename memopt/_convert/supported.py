"""The calls that memopt's ops support. The others go to PyTorch, with its results and errors."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter

from memopt._compat import compiles_for_inductor, in_transform, wraps_tensors
from memopt._extension import _C

_PLAIN = frozenset((Tensor, Parameter))
# csrc/ops/supported.h: of inputs, and of parameters beside an input of each.
_DTYPES = {dtype: frozenset(parameters) for dtype, parameters in _C.dtypes().items()}
_DEVICES = frozenset(_C.device_types())


def takes_eps(eps: float) -> bool:
    """Whether memopt's norms take it, as csrc/ops/checks.h says: PyTorch's take others too."""
    return 0 <= eps < math.inf


def supports(input: object, *parameters: Tensor | None) -> bool:
    """Whether memopt's ops compute this input with these parameters as PyTorch's do.

    Not supported: other dtypes and devices; sparse and nested tensors; distributed tensors and
    others that wrap tensors; parameters of a dtype other than input's and float32, and of float32
    where input is float64; and calls inside a transform of torch.func or a forward-mode derivative,
    for which memopt's ops raise. Nor, under torch.compile, what Inductor generates code for: it
    fuses PyTorch's own ops with those around them, and would have to call memopt's.
    """
    if is_dynamo_compiling() and compiles_for_inductor():
        return False
    # In front of every call of a swapped module: microseconds count.
    if type(input) not in _PLAIN and (not isinstance(input, Tensor) or wraps_tensors(input)):
        return False
    assert isinstance(input, Tensor)
    if (
        input.dtype not in _DTYPES
        or input.device.type not in _DEVICES
        or input.layout is not torch.strided
        or input.is_nested
        or in_transform()
    ):
        return False
    for parameter in parameters:
        if parameter is not None and not _fits(parameter, input):
            return False
    return True


def is_plain(input: object) -> bool:
    """Whether this is PyTorch's own tensor, outside of every transform."""
    return type(input) in _PLAIN and not in_transform()


def has_kernels_for(device: torch.device) -> bool:
    """Whether this build of memopt computes on such a device at all."""
    return device.type in _DEVICES


def casts(input: Tensor) -> bool:
    """Whether autocast casts `input` in front of a matrix product."""
    return input.dtype != torch.float64 and torch.is_autocast_enabled(input.device.type)


def lowered(input: Tensor) -> Tensor:
    """`input` in the autocast dtype, where autocast is on."""
    return input.to(torch.get_autocast_dtype(input.device.type)) if casts(input) else input


def _fits(parameter: Tensor, input: Tensor) -> bool:
    if type(parameter) not in _PLAIN and wraps_tensors(parameter):
        return False
    if parameter.device != input.device:
        return False
    if parameter.dtype in _DTYPES[input.dtype]:
        return True
    # Autocast casts the parameter: see csrc/autograd/declare.h.
    return casts(input) and parameter.dtype in _DTYPES and parameter.dtype != torch.float64
