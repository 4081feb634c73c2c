"""Rule for modules that compute a layer norm or an RMS norm over their last dimension.

    rms_norm    x / sqrt(mean(x^2) + eps) w    or, with a zero-centred weight, (1 + w)
    layer_norm  (x - mean(x)) / sqrt(var(x) + eps) w + b

Such a module has one weight of one dimension, at most one bias, no buffers and no submodules. The
forward of a stand-in with random parameters is compared with the formulas, in float32 and in the
module's dtype, on rows so small that eps matters.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memopt import functional
from memopt.convert.match import Answer, Context, Reason
from memopt.convert.probe import (
    Constants,
    are_constant,
    constants_of,
    forward_of,
    gradients,
    has_containers,
    own_attributes,
    random_normal,
    stand_in,
    takes_one_tensor,
)
from memopt.convert.supported import casts, lowered, supports
from memopt.convert.swap import ClassSwap, Plain

# The stand-in's eps. No module has it as its default, so that the right attribute is found.
_PROBE_EPS = 3e-4
_ROW_SCALES = (1.0, 30.0, 1e-2, 1e-3, 1e-5)

NO_NORM = "it computes neither a layer norm nor an RMS norm over its last dimension"


@dataclass(frozen=True)
class NormSwap(ClassSwap):
    """A norm that is not torch.nn's, and where it finds its arguments."""

    op: str
    """"rms_norm" or "layer_norm"."""

    weight: str
    bias: str | None
    """Names of the parameters."""

    eps: str | float
    """The attribute's name, or the number where forward has it as a constant."""

    zero_centered_weight: bool
    returns_input_dtype: bool
    """Even if the weight has another dtype. Otherwise PyTorch's type promotion decides."""

    lowers: bool = False
    """Under autocast it computes in the autocast dtype."""

    constants: Constants = ()
    """Attributes other than eps. If one has another value, the module computes something else."""

    def becomes(self) -> str:
        centred = "zero_centered_weight=True" if self.zero_centered_weight else ""
        return f"memopt.functional.{self.op}" + (f"({centred})" if centred else "")

    def run(self, module: Any, input: Tensor, plain: Plain) -> Tensor:
        weight = getattr(module, self.weight)
        bias = None if self.bias is None else getattr(module, self.bias)
        if (
            not supports(input, weight, bias)
            or input.shape[-1:] != weight.shape
            or not (weight.dtype == input.dtype or self.returns_input_dtype or casts(input))
            or not are_constant(module, self.constants)
        ):
            return plain(module, input)
        eps = getattr(module, self.eps) if isinstance(self.eps, str) else self.eps
        if self.lowers:
            input = lowered(input)
        return self._compute(input, weight, bias, eps)

    def _compute(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        if self.op == "layer_norm":
            return functional.layer_norm(x, weight.shape, weight, bias, eps)
        return functional.rms_norm(
            x, weight.shape, weight, eps, zero_centered_weight=self.zero_centered_weight
        )


def norm(module: nn.Module, context: Context) -> Answer | None:
    """A module with one weight of one dimension whose forward is compared with the formulas."""
    if not _may_be_norm(module):
        return None
    return context.once(_recognise, module) or Reason(NO_NORM)


def _may_be_norm(module: nn.Module) -> bool:
    """Whether it has one or two vectors of one length and a forward of one argument."""
    parameters = [p for p in module._parameters.values() if p is not None]
    return (
        len(parameters) in (1, 2)
        and all(p.dim() == 1 and p.shape == parameters[0].shape for p in parameters)
        and parameters[0].numel() > 0
        and not module._buffers
        and not module._modules
        and not has_containers(module)
        and takes_one_tensor(module)
    )


def _recognise(module: nn.Module) -> NormSwap | None:
    """How the module, which may be one, computes its norm; None if it computes something else."""
    for candidate in _candidates(module):
        if _matches(module, candidate, torch.float32):
            dtype = next(p.dtype for p in module._parameters.values() if p is not None)
            if dtype != torch.float32 and not _matches(module, candidate, dtype):
                return None
            constants = constants_of(module, read=candidate.eps)
            return replace(_with_dtype_rule(module, candidate), constants=constants)
    return None


def _candidates(module: nn.Module) -> Iterator[NormSwap]:
    names = [name for name, p in module._parameters.items() if p is not None]
    for weight in names:
        bias = next((name for name in names if name != weight), None)
        for eps in _eps_candidates(module):
            if bias is None:
                yield NormSwap("rms_norm", weight, None, eps, False, False)
                yield NormSwap("rms_norm", weight, None, eps, True, False)
            yield NormSwap("layer_norm", weight, bias, eps, False, False)


def _eps_candidates(module: nn.Module) -> list[str | float]:
    """Attributes and constants of forward that are small numbers."""

    def small(value: object) -> bool:
        return isinstance(value, float) and 0 < value < 0.1

    attributes = [name for name, value in own_attributes(module).items() if small(value)]
    code = getattr(type(module).forward, "__code__", None)
    constants = code.co_consts if isinstance(code, types.CodeType) else ()
    return [*attributes, *(value for value in constants if small(value))]


def _matches(module: nn.Module, norm: NormSwap, dtype: torch.dtype) -> bool:
    eps = norm.eps if isinstance(norm.eps, float) else _PROBE_EPS
    x, parameters = _arguments(module, dtype, dtype)
    exact_x, exact = _widened(x, parameters)
    expected = _formula(norm, exact_x, exact, eps)
    # Three roundings to the dtype: of x / rms, of its product with the weight, and one on the way.
    # The sums are float32's; their error is relative to the largest number of a row.
    largest = expected.detach().abs().amax(-1, keepdim=True)
    tolerance = 3 * torch.finfo(dtype).eps * expected.detach().abs() + 1e-5 * largest
    for training in (True, False):
        twin = _twin(module, norm, parameters, training)
        y = forward_of(twin, x)
        if y is None or y.shape != x.shape or y.dtype != dtype:
            return False
        if ((y - expected).detach().abs() > tolerance).any():
            return False
        if dtype == torch.float32 and not _same_gradients(y, x, twin, expected, exact_x, exact):
            return False
    return True


def _same_gradients(
    y: Tensor,
    x: Tensor,
    twin: nn.Module,
    expected: Tensor,
    exact_x: Tensor,
    exact: dict[str, Tensor],
) -> bool:
    ours = gradients(y, [x, *(p for p in twin._parameters.values() if p is not None)])
    theirs = gradients(expected, [exact_x, *exact.values()])
    if ours is None or theirs is None:
        return False
    return all(
        bool(((a - b).abs() <= 1e-3 * b.abs() + 1e-4 * b.abs().max()).all())
        for a, b in zip(ours, theirs, strict=True)
    )


def _with_dtype_rule(module: nn.Module, norm: NormSwap) -> NormSwap:
    x, parameters = _arguments(module, torch.bfloat16, torch.float32)
    y = forward_of(_twin(module, norm, parameters, training=True), x)
    keeps = y is not None and y.dtype == torch.bfloat16
    return NormSwap(norm.op, norm.weight, norm.bias, norm.eps, norm.zero_centered_weight, keeps)


def _twin(module: nn.Module, norm: NormSwap, parameters: dict[str, Tensor], training: bool) -> Any:
    eps = {norm.eps: _PROBE_EPS} if isinstance(norm.eps, str) else {}
    return stand_in(module, parameters, attributes=eps, training=training)


def _arguments(
    module: nn.Module, dtype: torch.dtype, parameter_dtype: torch.dtype
) -> tuple[Tensor, dict[str, Tensor]]:
    """Rows of different sizes, and random parameters."""
    names = [name for name, p in module._parameters.items() if p is not None]
    cols = next(p.numel() for p in module._parameters.values() if p is not None)
    scales = torch.tensor(_ROW_SCALES, dtype=torch.float64, device="cpu")
    rows = random_normal(len(_ROW_SCALES), 2, cols, dtype=torch.float64) + 0.5
    x = (rows * scales[:, None, None]).to(dtype).requires_grad_()
    parameters = {
        name: random_normal(cols, seed=2 + i).to(parameter_dtype) for i, name in enumerate(names)
    }
    return x, parameters


def _widened(x: Tensor, parameters: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    wide = {name: p.double().requires_grad_() for name, p in parameters.items()}
    return x.detach().double().requires_grad_(), wide


def _formula(norm: NormSwap, x: Tensor, parameters: dict[str, Tensor], eps: float) -> Tensor:
    weight = parameters[norm.weight]
    if norm.op == "layer_norm":
        bias = None if norm.bias is None else parameters[norm.bias]
        return F.layer_norm(x, weight.shape, weight, bias, eps)
    scale = 1 + weight if norm.zero_centered_weight else weight
    return F.rms_norm(x, weight.shape, None, eps) * scale
