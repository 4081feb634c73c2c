"""Rule for modules that compute a layer norm or an RMS norm over their last dimension, or over the
channels behind the batch.

    rms_norm    x / sqrt(mean(x^2) + eps) w       w may be 1, or stored as w - 1 (zero-centred)
    layer_norm  (x - mean(x)) / sqrt(var(x) + eps) w + b

Such a module has at most one weight and one bias, each a vector, and no buffers; as its only
submodule perhaps one of torch.nn's norms without parameters, which its forward calls. The forward
of a stand-in with random parameters is compared with the formulas: with its own number of columns,
in float32 and in the module's dtype; and with few columns, for inputs of one to five dimensions
whose sizes may be equal, with rows so small that eps matters, large ones, ones with a mean far from
zero, with NaN and infinities, in training and evaluation, in each dtype; with a first size of 1,
and of the numbers in its code; and in autocast and without gradients. Code that reads switches
(True or False) from globals or its class is left.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from memopt._convert.match import NOT_ALWAYS, READS_SWITCHES, Answer, Context, Reason
from memopt._convert.probe import (
    constants_of,
    has_containers,
    simple_attributes,
    takes_one_tensor,
)
from memopt._convert.rules.code_reads import reads_flags
from memopt._convert.rules.norm_probe import NormProbe, inner_norm, parameters_of, size_attribute
from memopt._convert.rules.norm_swap import NormSwap

NO_NORM = "it computes neither a layer norm nor an RMS norm over its last dimension or its channels"

_FEW = 6
_EQUAL_SIZES = 256
"""Most columns with which inputs are probed that have as many rows, if few columns do not do."""


def norm(module: nn.Module, context: Context) -> Answer | None:
    """A module with at most two vectors whose forward is compared with the formulas."""
    if not _may_be_norm(module) or any(child in context.skipped for child in module.children()):
        return None
    found = context.once(_recognise, module)
    named = parameters_of(module) and not module._modules
    return Reason(NO_NORM) if found is None and named else found


def _may_be_norm(module: nn.Module) -> bool:
    """Whether it has at most two vectors, of one shape, and a forward of one argument."""
    parameters = list(parameters_of(module).values())
    return bool(
        len(parameters) <= 2
        and all(p.numel() == max(p.shape, default=0) > 1 for p in parameters)
        and len({p.shape for p in parameters}) <= 1
        and not module._buffers
        and (not module._modules or (parameters and inner_norm(module) is not None))
        and not has_containers(module)
        and (parameters or simple_attributes(module) is not None)
        and takes_one_tensor(module)
    )


def _recognise(module: nn.Module) -> NormSwap | Reason | None:
    """The swap for a module that may be a norm; None if it computes something else, and a reason
    if it is a norm at first sight.
    """
    parameters = parameters_of(module)
    size = next((p.numel() for p in parameters.values()), size_attribute(module))
    own = next((p.dtype for p in parameters.values()), torch.float32)
    as_it_is = NormProbe(module, size or _FEW)
    found = next(iter(as_it_is.candidates()), None)
    if found is None:
        return None
    if found.bounds and found.added_eps(module, size or _FEW) is None:
        return Reason(NOT_ALWAYS)
    if reads_flags(module):
        return Reason(READS_SWITCHES)
    if not as_it_is.agrees_in(found, own) or not as_it_is.agrees_in_modes(found):
        return Reason(NOT_ALWAYS)
    probe = NormProbe(module, _FEW) if size is None or size > _FEW else as_it_is
    dims = probe.dims(found)
    if not dims and size is not None and size <= _EQUAL_SIZES:
        probe = as_it_is
        dims = probe.dims(found)
    found = replace(found, dims=dims)
    dtypes = probe.dtypes(found)
    if dims <= {1} or (own, own) not in dtypes:
        return Reason(NOT_ALWAYS)
    return replace(
        found,
        size=None if parameters else size,
        dtypes=dtypes,
        keeps_strides=probe.keeps_strides(found),
        copies=frozenset(d for d, _ in dtypes if probe.keeps_copy(found, d)),
        constants=constants_of(module, read="" if found.inner else found.eps),
    )
