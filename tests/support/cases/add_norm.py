"""add_layer_norm and add_rms_norm: the cases of the norm alone, at the rounded sum."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from tests.support.shapes import Dtypes, random_normal

from .call import Call, Results, as_tuple
from .layer_norm import NormCase
from .op import OpCase, Saved
from .rms_norm import RmsNormCase


@dataclass(frozen=True)
class AddNormCase(OpCase):
    """What both have in common; `norm` is the case of the norm alone."""

    norm: NormCase | RmsNormCase | None = None

    private: ClassVar[str] = "norm"
    forward_results: ClassVar[tuple[str, ...]] = ("output", "sum", "mean", "rstd")
    outputs: ClassVar[tuple[str, ...]] = ("output", "sum")
    kept: ClassVar[tuple[str, ...]] = ()
    kept_outputs: ClassVar[tuple[str, ...]] = ("sum",)

    def __str__(self) -> str:
        return str(self.norm).replace(self.norm.family, self.family)

    def make_call(
        self,
        size: tuple[int, ...],
        dtypes: Dtypes,
        device: torch.device,
        *,
        values: Tensor | None = None,
        **choices: Any,
    ) -> Call:
        """`values` are those of the sum, halved between input and residual."""
        if values is not None:
            values = values / 2
        call = self.norm.make_call(size, dtypes, device, values=values, **choices)
        residual = random_normal(*size, seed=5) if values is None else values.reshape(size)
        activations = {
            "input": call.input,
            "residual": residual.to(device, dtypes.tensor),
        }
        grads = {
            "output": call.grad_output,
            "sum": random_normal(*size, seed=6).to(device, dtypes.tensor),
        }
        return replace(
            call,
            tensors={**activations, **{name: call.tensors[name] for name in self.parameters}},
            grads=grads,
            # For the oracle, which must round the sum as the op does; a name, since options are
            # arguments of exported models.
            options={**call.options, "sum_dtype": _name(dtypes.tensor)},
        )

    def random_choices(self, draw: Any, size: tuple[int, ...]) -> dict[str, Any]:
        return self.norm.random_choices(draw, size)

    def arguments(self, call: Call) -> tuple[tuple, dict[str, Any]]:
        (_, *positional), keywords = self.norm.arguments(call)
        return (call.input, call.residual, *positional), keywords

    def forward_arguments(self, call: Call) -> tuple[tuple, dict[str, Any]]:
        (x, _, *rest), keywords = self.norm.forward_arguments(call)
        return (x, call.residual, *rest), keywords

    @property
    def backward_results(self) -> tuple[str, ...]:
        return self.norm.backward_results

    def forward(self, call: Call) -> tuple[Results, Saved]:
        """The sum is an output and saved."""
        outputs, saved = super().forward(call)
        return outputs, {**saved, "sum": outputs["sum"]}

    def backward_arguments(
        self,
        call: Call,
        saved: Saved,
        output_mask: tuple[bool, ...] | None = None,
        recompute_output: bool = False,
    ) -> tuple[tuple, dict[str, Any]]:
        inner = replace(call, tensors={**call.tensors, "input": saved["sum"]})
        (grad_output, _, *rest), keywords = self.norm.backward_arguments(
            inner, saved, output_mask, recompute_output
        )
        return (grad_output, call.grad_sum, *rest), keywords

    def backward(
        self,
        call: Call,
        saved: Saved,
        output_mask: tuple[bool, ...] | None = None,
        recompute_output: bool = False,
    ) -> Results:
        """One gradient serves input and residual."""
        results = super().backward(call, saved, output_mask, recompute_output)
        names = ["output", "grad_input", "grad_residual"]
        names += [f"grad_{name}" for name in self.parameters]
        results["grad_residual"] = results["grad_input"]
        return Results({name: results[name] for name in names})

    def _norm_call(self, call: Call, total: Tensor) -> Call:
        return replace(
            call,
            tensors={"input": total, **{name: call.tensors[name] for name in self.parameters}},
            grads={"output": call.grads["output"]},
        )

    def torch(self, call: Call) -> tuple[Tensor, ...]:
        total = self.dropped(call) + call.residual
        return (*as_tuple(self.norm.torch(self._norm_call(call, total))), total)

    def dropped(self, call: Call) -> Tensor:
        """What the residual is added to."""
        return call.input

    def rounded_sum(self, call: Call) -> Tensor:
        """As PyTorch's addition rounds it, which the op must equal in bits; float64."""
        dtype = getattr(torch, call.sum_dtype)
        addends = (t.detach().to(dtype) for t in (call.input, call.residual))
        return sum(addends).double()

    def exact(self, call: Call) -> tuple[Tensor, ...]:
        """The sum's rounding is part of the function, with a derivative of 1."""
        total = self.dropped(call) + call.residual
        total = total + (self.rounded_sum(call) - total).detach()
        return (*as_tuple(self.norm.exact(self._norm_call(call, total))), total)

    def magnitudes(self, call: Call) -> Results:
        total = self.rounded_sum(call)
        results = self.norm.magnitudes(self._norm_call(call, total))
        e_dx = results["grad_input"] + call.grad_sum.abs()
        named = {"output": results["output"], "sum": total.abs()}
        named |= {"grad_input": e_dx, "grad_residual": e_dx}
        return Results({**named, **{f"grad_{n}": results[f"grad_{n}"] for n in self.parameters}})

    def statistics(self, call: Call) -> dict[str, tuple[Tensor, Tensor]]:
        return self.norm.statistics(self._norm_call(call, self.rounded_sum(call)))

    def read_by_backward(self, call: Call) -> tuple[str, ...]:
        return ("weight",)

    def statistics_bytes(self, call: Call) -> int:
        return self.norm.statistics_bytes(call)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class AddLayerNormCase(AddNormCase):
    parameters: ClassVar[tuple[str, ...]] = NormCase.parameters
    saved: ClassVar[tuple[str, ...]] = NormCase.saved
    gradients: ClassVar[tuple[str, ...]] = NormCase.gradients
    masked: ClassVar[tuple[str, ...]] = NormCase.masked


@dataclass(frozen=True)
class AddRmsNormCase(AddNormCase):
    parameters: ClassVar[tuple[str, ...]] = RmsNormCase.parameters
    saved: ClassVar[tuple[str, ...]] = RmsNormCase.saved
    gradients: ClassVar[tuple[str, ...]] = RmsNormCase.gradients
    masked: ClassVar[tuple[str, ...]] = RmsNormCase.masked


ADD_NORM_CASES = (
    AddLayerNormCase("add_layer_norm", NormCase("layer_norm")),
    AddRmsNormCase("add_rms_norm", RmsNormCase("rms_norm")),
    AddRmsNormCase("add_rms_norm", RmsNormCase("rms_norm", True)),
)
