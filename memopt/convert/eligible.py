"""Which calls memopt's ops take. The others go to PyTorch, with PyTorch's results and errors."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import _python_dispatch

from memopt._extension import build_info

_DTYPES = frozenset((torch.float32, torch.bfloat16, torch.float16, torch.float64))
_DEVICES = frozenset(("cpu", "meta", *(("cuda",) if build_info()["cuda"] else ())))


def takes(input: object, *parameters: Tensor | None) -> bool:
    """Whether an op computes this input beside these parameters as PyTorch's op would.

    Not: other dtypes and devices, sparse and nested tensors, tensors that are distributed or
    otherwise wrap others, parameters of a dtype other than input's and float32, and calls inside a
    transform of torch.func or a forward-mode derivative, which memopt's ops refuse.
    """
    return (
        isinstance(input, Tensor)
        and input.dtype in _DTYPES
        and input.device.type in _DEVICES
        and input.layout is torch.strided
        and not input.is_nested
        and not _wraps_others(input)
        and forward_ad._current_level < 0
        and not torch._C._are_functorch_transforms_active()
        and all(parameter is None or _fits(parameter, input) for parameter in parameters)
    )


def casts(input: Tensor) -> bool:
    """Whether autocast gives an op that gets `input` the autocast dtype to compute in."""
    return input.dtype != torch.float64 and torch.is_autocast_enabled(input.device.type)


def _wraps_others(tensor: Tensor) -> bool:
    return bool(_python_dispatch.is_traceable_wrapper_subclass(tensor))


def _fits(parameter: Tensor, input: Tensor) -> bool:
    if parameter.device != input.device or _wraps_others(parameter):
        return False
    if parameter.dtype in (input.dtype, torch.float32):
        return True
    # Autocast casts both: see csrc/autograd/autocast.cpp.
    return casts(input) and parameter.dtype in _DTYPES and parameter.dtype != torch.float64
