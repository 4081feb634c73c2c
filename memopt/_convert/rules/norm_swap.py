"""The swap of a norm that is not torch.nn's."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memopt import functional
from memopt._class_patch import original_class
from memopt._convert.probe import Constants, are_constant
from memopt._convert.supported import casts, lowered, supports, takes_eps
from memopt._convert.swap import ClassSwap, Plain, has_hooks


def is_bare_norm(module: nn.Module | None, kind: type[nn.Module]) -> bool:
    """Whether it is of this class of torch.nn's, has no parameters, and only its forward counts."""
    return (
        module is not None
        and original_class(type(module)) is kind
        and "forward" not in module.__dict__
        and not any(p is not None for p in module._parameters.values())
        and not has_hooks(module)
    )


_LARGEST_BOUND = 1e-8
"""The bound of a row's root mean square. Activations are a thousand times as large."""


def _parameter(module: nn.Module, name: str | None) -> Any:
    """The attribute; where it is a parameter, without torch.fx's notice, which would record it in
    front of what the original's forward does.
    """
    if name is None:
        return None
    parameters = module._parameters
    return parameters[name] if name in parameters else getattr(module, name)


@dataclass(frozen=True)
class NormSwap(ClassSwap):
    """A norm that is not torch.nn's, where it finds its arguments, and for which inputs."""

    is_one_op = True
    op: str
    """"rms_norm" or "layer_norm"."""

    weight: str | None
    bias: str | None
    """Names of the parameters."""

    eps: str | float
    """The attribute's name, or the number where forward has it as a constant. With `inner`, a name
    of that module's."""

    zero_centered_weight: bool = False
    channels_first: bool = False
    """Whether it normalises over dimension 1, not the last."""

    bounds: str = ""
    """The size that eps bounds where nothing is added to the mean square: "length" in
    x / max(|x|, eps) sqrt(cols), as with F.normalize, or "rms" in x / max(|x| / sqrt(cols), eps).
    The square of the bound of the root mean square is added, see `added_eps`."""

    size: int | None = None
    """The number of columns, if the module has no parameters and has it as an attribute."""

    inner: tuple[str, type[nn.Module]] | None = None
    """The submodule of torch.nn's that normalises, without parameters, and its class. The original
    is called where it is another one by now, or a hook has to see its call."""

    dims: frozenset[int] = frozenset()
    """It computes the norm for inputs of so many dimensions; for others the original is called."""

    dtypes: frozenset[tuple[torch.dtype, torch.dtype]] = frozenset()
    """Dtypes of input and parameters for which the result has the dtype of the input."""

    keeps_strides: bool = True
    """Whether, with `channels_first`, the output has the input's strides, and not channels last."""

    copies: frozenset[torch.dtype] = frozenset()
    """Dtypes of inputs of which it keeps nothing for backward but what it has computed."""

    is_written: bool = False
    """Whether the code around seems to write tensors in place, perhaps the input behind the call:
    with `copies`, a copy of it is kept."""

    lowers: bool = False
    """Whether it computes in the autocast dtype under autocast."""

    constants: Constants = ()
    """Attributes other than eps. If one has another value, the module computes something else."""

    def becomes(self) -> str:
        arguments = []
        if self.zero_centered_weight:
            arguments.append("zero_centered_weight=True" if self.op == "rms_norm" else "1 + weight")
        if self.channels_first:
            arguments.append("channels first")
        return f"memopt.functional.{self.op}" + (f"({', '.join(arguments)})" if arguments else "")

    def run(self, module: Any, input: Tensor, plain: Plain) -> Tensor:
        weight, bias = _parameter(module, self.weight), _parameter(module, self.bias)
        if (
            not supports(input, weight, bias)
            or input.dim() not in self.dims
            or not self._fits(input, weight if weight is not None else bias)
            or not are_constant(module, self.constants)
        ):
            return plain(module, input)
        owner = module
        if self.inner is not None:
            name, kind = self.inner
            owner = module._modules[name]
            of_all = (input.shape[1 if self.channels_first else -1],)
            if not is_bare_norm(owner, kind) or owner.normalized_shape != of_all:
                return plain(module, input)
        eps = self.added_eps(owner, input.shape[1 if self.channels_first else -1])
        if eps is None:
            return plain(module, input)
        if self.lowers:
            input = lowered(input)
        if self.is_written and input.dtype in self.copies and torch.is_grad_enabled():
            input = input.clone()  # no more than the original keeps
        if not self.channels_first:
            return self._compute(input, weight, bias, eps)
        output = self._compute(input.movedim(1, -1), weight, bias, eps).movedim(-1, 1)
        if not self.keeps_strides or output.stride() == input.stride():
            return output
        if input.is_contiguous():
            return output.contiguous()  # a copy that recipes know
        return torch.empty_like(input, dtype=output.dtype).copy_(output)

    def added_eps(self, owner: Any, cols: int) -> float | None:
        """The number that is added to the mean square, or to the variance; None where memopt's op
        does not take it, or a bound is not what it computes: the two differ where a row is within a
        thousand times the bound.
        """
        eps: float | None = getattr(owner, self.eps) if isinstance(self.eps, str) else self.eps
        if eps is None or not takes_eps(eps):
            return None
        if not self.bounds:
            return eps
        bound = eps / math.sqrt(cols) if self.bounds == "length" else eps
        return bound * bound if bound <= _LARGEST_BOUND else None

    def _fits(self, input: Tensor, parameter: Tensor | None) -> bool:
        cols = input.shape[1 if self.channels_first else -1]
        if parameter is None:
            dtypes, expected = (input.dtype, input.dtype), self.size
        else:
            dtypes, expected = (input.dtype, parameter.dtype), parameter.numel()
        same_size = expected in (cols, None) and cols > 0
        return same_size and (dtypes in self.dtypes or casts(input))

    def _compute(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        shape = x.shape[-1:]
        if weight is not None and weight.dim() != 1:
            weight = weight.flatten()
        if bias is not None and bias.dim() != 1:
            bias = bias.flatten()
        if self.op == "layer_norm":
            if self.zero_centered_weight and weight is not None:
                weight = 1 + weight
            return functional.layer_norm(x, shape, weight, bias, eps)
        return functional.rms_norm(
            x, shape, weight, eps, zero_centered_weight=self.zero_centered_weight
        )
