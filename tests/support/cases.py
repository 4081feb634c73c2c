"""The table of ops under test, and the one shape that a call to any of them has.

A property that all ops promise is tested once, over OP_CASES; a fourth op joins those tests by a
line here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import memopt


@dataclass(frozen=True)
class Call:
    """The arguments of one call, and the gradient that comes back to its output."""

    input: Tensor
    normalized_shape: tuple[int, ...]
    weight: Tensor | None
    bias: Tensor | None
    grad_output: Tensor
    eps: float = 1e-5

    def map(self, function: Callable[[Tensor], Tensor]) -> Call:
        """The same call with `function` applied to each of its tensors."""
        tensors = {
            name: function(getattr(self, name))
            for name in ("input", "weight", "bias", "grad_output")
            if getattr(self, name) is not None
        }
        return replace(self, **tensors)

    def leaves(self) -> Call:
        """The same call on fresh autograd leaves that share these tensors' memory and strides."""
        leaf = self.map(lambda t: t.detach().requires_grad_(t.is_floating_point()))
        return replace(leaf, grad_output=self.grad_output)

    def __str__(self) -> str:
        weight = None if self.weight is None else self.weight.dtype
        return f"input {tuple(self.input.shape)} {self.input.dtype}, parameters {weight}"


class Results(NamedTuple):
    """What a call computes. None where the op has no such result or it was not asked for."""

    output: Tensor | None
    grad_input: Tensor | None
    grad_weight: Tensor | None
    grad_bias: Tensor | None


class Statistics(NamedTuple):
    mean: Tensor | None
    rstd: Tensor | None


@dataclass(frozen=True)
class OpCase:
    """One op with its keyword choices fixed."""

    family: str
    approximate: str | None = None

    def __str__(self) -> str:
        return "-".join(filter(None, (self.family, self.approximate)))

    @property
    def normalizes(self) -> bool:
        return self.family != "gelu"

    @property
    def _approximate(self) -> dict[str, str]:
        return {} if self.approximate is None else {"approximate": self.approximate}

    def memopt(self, call: Call) -> Tensor:
        """The op under test, through the public Python function."""
        function = getattr(memopt.functional, self.family)
        return function(*self._arguments(call), **self._approximate)

    def torch(self, call: Call) -> Tensor:
        """The same mathematics by PyTorch's own ops."""
        result = call.input
        if self.normalizes:
            result = F.layer_norm(
                result, call.normalized_shape, call.weight, call.bias, eps=call.eps
            )
        if self.approximate is not None:
            result = F.gelu(result, approximate=self.approximate)
        return result

    def dispatcher_op(self, suffix: str = "") -> torch._ops.OpOverload:
        """The public op, or with suffix "forward" or "backward" the private op behind it."""
        name = f"_{self.family}_{suffix}" if suffix else self.family
        return getattr(torch.ops.memopt, name).default

    def forward_arguments(self, call: Call) -> tuple[tuple, dict]:
        """Positional and keyword arguments of the public op and of the forward op."""
        return self._arguments(call), self._approximate

    def backward_arguments(
        self,
        call: Call,
        statistics: Statistics,
        output_mask: tuple[bool, bool, bool] | None = None,
        recompute_output: bool = False,
    ) -> tuple[tuple, dict]:
        """Positional and keyword arguments of the backward op; for all gradients by default."""
        keywords = {**self._approximate, "recompute_output": recompute_output}
        if not self.normalizes:
            return (call.grad_output, call.input), keywords
        if output_mask is None:
            output_mask = (True, call.weight is not None, call.bias is not None)
        positional = (
            call.grad_output,
            call.input,
            call.normalized_shape,
            *statistics,
            call.weight,
            call.bias,
            output_mask,
        )
        return positional, keywords

    def forward(self, call: Call) -> tuple[Tensor, Statistics]:
        """The forward op, below autograd."""
        arguments, keywords = self.forward_arguments(call)
        result = self.dispatcher_op("forward")(*arguments, **keywords)
        if not self.normalizes:
            return result, Statistics(None, None)
        output, mean, rstd = result
        return output, Statistics(mean, rstd)

    def backward(
        self,
        call: Call,
        statistics: Statistics,
        output_mask: tuple[bool, bool, bool] | None = None,
        recompute_output: bool = False,
    ) -> Results:
        """The backward op. `output` of the result is the re-emitted forward output."""
        arguments, keywords = self.backward_arguments(
            call, statistics, output_mask, recompute_output
        )
        result = self.dispatcher_op("backward")(*arguments, **keywords)
        if not self.normalizes:
            grad_input, output = result
            return Results(output, grad_input, None, None)
        grad_input, grad_weight, grad_bias, output = result
        return Results(output, grad_input, grad_weight, grad_bias)

    def _arguments(self, call: Call) -> tuple:
        if not self.normalizes:
            return (call.input,)
        return (call.input, call.normalized_shape, call.weight, call.bias, call.eps)


GELU_CASES = (OpCase("gelu", "none"), OpCase("gelu", "tanh"))
NORM_CASES = (
    OpCase("layer_norm"),
    OpCase("layer_norm_gelu", "none"),
    OpCase("layer_norm_gelu", "tanh"),
)
OP_CASES = GELU_CASES + NORM_CASES


def evaluate(function: Callable[[Call], Tensor], call: Call) -> Results:
    """Output and gradients of `function` by autograd, `call.grad_output` coming in."""
    leaves = call.leaves()
    output = function(leaves)
    inputs = {
        name: getattr(leaves, name)
        for name in ("input", "weight", "bias")
        if getattr(leaves, name) is not None
    }
    gradients = torch.autograd.grad(
        output, tuple(inputs.values()), call.grad_output, allow_unused=True
    )
    by_name = dict(zip(inputs, gradients, strict=True))
    return Results(
        output.detach(), by_name.get("input"), by_name.get("weight"), by_name.get("bias")
    )
