"""Which calls memopt's ops take. The others go to PyTorch, with PyTorch's results and errors."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.utils import _python_dispatch

from memopt._extension import _C

_PLAIN = frozenset((Tensor, Parameter))
_DTYPES = frozenset((torch.float32, torch.bfloat16, torch.float16, torch.float64))
_DEVICES = frozenset(("cpu", "meta", *(("cuda",) if _C.build_info()["cuda"] else ())))


def takes(input: object, *parameters: Tensor | None) -> bool:
    """Whether an op computes this input beside these parameters as PyTorch's op would.

    Not: other dtypes and devices, sparse and nested tensors, tensors that are distributed or
    otherwise wrap others, parameters of a dtype other than input's and float32, and calls inside a
    transform of torch.func or a forward-mode derivative, which memopt's ops refuse.
    """
    # In front of every call of a swapped module: microseconds count.
    if type(input) not in _PLAIN and (not isinstance(input, Tensor) or _wraps_others(input)):
        return False
    assert isinstance(input, Tensor)
    if (
        input.dtype not in _DTYPES
        or input.device.type not in _DEVICES
        or input.layout is not torch.strided
        or input.is_nested
        or forward_ad._current_level >= 0
        or torch._C._are_functorch_transforms_active()
    ):
        return False
    for parameter in parameters:
        if parameter is not None and not _fits(parameter, input):
            return False
    return True


def has_kernels_for(device: torch.device) -> bool:
    """Whether this build of memopt computes on such a device at all."""
    return device.type in _DEVICES


def casts(input: Tensor) -> bool:
    """Whether autocast gives an op that gets `input` the autocast dtype to compute in."""
    return input.dtype != torch.float64 and torch.is_autocast_enabled(input.device.type)


def _wraps_others(tensor: Tensor) -> bool:
    return bool(_python_dispatch.is_traceable_wrapper_subclass(tensor))


def _fits(parameter: Tensor, input: Tensor) -> bool:
    if type(parameter) not in _PLAIN and _wraps_others(parameter):
        return False
    if parameter.device != input.device:
        return False
    if parameter.dtype in (input.dtype, torch.float32):
        return True
    # Autocast casts both: see csrc/autograd/autocast.cpp.
    return casts(input) and parameter.dtype in _DTYPES and parameter.dtype != torch.float64
