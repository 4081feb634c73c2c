"""gated, swiglu, geglu, and their forms that take gate and up in one tensor.

All are one of two ops, which take the activation's name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from tests.support.shapes import Dtypes, random_normal

from .activation import (
    THROUGHOUT,
    VALUES_ONLY,
    exact_activation,
    named,
    slope_magnitude,
    torch_activation,
    value_magnitude,
)
from .call import Call, Results
from .op import OpCase, Saved


@dataclass(frozen=True)
class GatedCase(OpCase):
    activation: str
    """As gated knows it; swiglu and geglu have theirs fixed."""

    private: ClassVar[str] = "gated"
    kept: ClassVar[tuple[str, ...]] = ("gate", "up")
    gradients: ClassVar[tuple[str, ...]] = ("gate", "up")
    masked: ClassVar[tuple[str, ...]] = gradients
    elementwise: ClassVar[bool] = True

    def __str__(self) -> str:
        return f"{self.family}-{self.activation}"

    @property
    def options(self) -> dict[str, Any]:
        if self.family.startswith("gated"):
            return named(self.activation)
        if self.family.startswith("geglu"):
            return {"approximate": "tanh" if self.activation == "gelu_tanh" else "none"}
        return {}

    def make_call(
        self,
        size: tuple[int, ...],
        dtypes: Dtypes,
        device: torch.device,
        *,
        values: Tensor | None = None,
        **choices: Any,
    ) -> Call:
        gate = random_normal(*size, seed=1) if values is None else values.reshape(size)
        tensors = {"gate": gate, "up": random_normal(*size, seed=5)}
        return Call(
            tensors={name: t.to(device, dtypes.tensor) for name, t in tensors.items()},
            grads={"output": random_normal(*size, seed=4).to(device, dtypes.tensor)},
            options=self.options,
        )

    @property
    def public_op(self) -> torch._ops.OpOverload:
        return getattr(torch.ops.memopt, self.private).default

    def public_arguments(self, call: Call) -> tuple[tuple, dict[str, Any]]:
        return tuple(call.tensors.values()), named(self.activation)

    def backward_arguments(
        self,
        call: Call,
        saved: Saved,
        output_mask: tuple[bool, ...] | None = None,
        recompute_output: bool = False,
    ) -> tuple[tuple, dict[str, Any]]:
        keywords = {
            **named(self.activation),
            "output_mask": output_mask or (True, True),
            "recompute_output": recompute_output,
        }
        return (call.grad_output, call.gate, call.up), keywords

    def gate_and_up(self, call: Call) -> tuple[Tensor, Tensor]:
        return call.gate, call.up

    def torch(self, call: Call) -> Tensor:
        gate, up = self.gate_and_up(call)
        return torch_activation(self.activation, gate) * up

    def exact(self, call: Call) -> Tensor:
        gate, up = self.gate_and_up(call)
        return exact_activation(self.activation, gate) * up

    def magnitudes(self, call: Call) -> Results:
        gate, up = self.gate_and_up(call)
        value = value_magnitude(self.activation, gate)
        dy = call.grad_output.abs()
        return Results(
            output=value * up.abs(),
            grad_gate=dy * up.abs() * slope_magnitude(self.activation, gate),
            grad_up=dy * value,
        )


@dataclass(frozen=True)
class PackedCase(GatedCase):
    """size, in make_call, is the output's."""

    interleaved: bool = False

    private: ClassVar[str] = "gated_packed"
    kept: ClassVar[tuple[str, ...]] = ("input",)
    gradients: ClassVar[tuple[str, ...]] = ("input",)
    masked: ClassVar[tuple[str, ...]] = ()
    # The gradient's columns are twice as many as the output's.
    elementwise: ClassVar[bool] = False

    def __str__(self) -> str:
        return f"{super().__str__()}-{'interleaved' if self.interleaved else 'halves'}"

    def make_call(self, size: tuple[int, ...], *arguments: Any, **choices: Any) -> Call:
        apart = super().make_call(size, *arguments, **choices)
        return Call(
            tensors={"input": self._pack(apart.gate, apart.up)},
            grads=apart.grads,
            options={**self.options, "interleaved": self.interleaved},
        )

    def public_arguments(self, call: Call) -> tuple[tuple, dict[str, Any]]:
        arguments, keywords = super().public_arguments(call)
        return arguments, {**keywords, "interleaved": self.interleaved}

    def backward_arguments(
        self,
        call: Call,
        saved: Saved,
        output_mask: tuple[bool, ...] | None = None,
        recompute_output: bool = False,
    ) -> tuple[tuple, dict[str, Any]]:
        keywords = {
            **named(self.activation),
            "interleaved": self.interleaved,
            "recompute_output": recompute_output,
        }
        return (call.grad_output, call.input), keywords

    def gate_and_up(self, call: Call) -> tuple[Tensor, Tensor]:
        if self.interleaved:
            return call.input[..., ::2], call.input[..., 1::2]
        return call.input.chunk(2, -1)

    def magnitudes(self, call: Call) -> Results:
        apart = super().magnitudes(call)
        packed = self._pack(apart.grad_gate, apart.grad_up)
        return Results(output=apart.output, grad_input=packed)

    def _pack(self, gate: Tensor, up: Tensor) -> Tensor:
        if self.interleaved:
            return torch.stack((gate, up), -1).flatten(-2)
        return torch.cat((gate, up), -1)


GATED_CASES = (
    GatedCase("swiglu", "silu"),
    GatedCase("geglu", "gelu"),
    GatedCase("geglu", "gelu_tanh"),
    *(GatedCase("gated", name) for name in THROUGHOUT if name not in ("silu", "gelu", "gelu_tanh")),
)
FURTHER_GATED_CASES = tuple(GatedCase("gated", name) for name in VALUES_ONLY)
PACKED_CASES = (
    PackedCase("swiglu_packed", "silu", interleaved=False),
    PackedCase("swiglu_packed", "silu", interleaved=True),
    PackedCase("geglu_packed", "gelu_tanh", interleaved=True),
    PackedCase("gated_packed", "relu", interleaved=False),
)
