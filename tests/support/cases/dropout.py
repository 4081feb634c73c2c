"""What drops elements at random: dropout, activation_dropout, dropout_add_layer_norm and
dropout_add_rms_norm.

The generator is seeded before each call through the public function, so that a call has one result;
the oracle makes the mask again from the state that is drawn then (support/philox.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from tests.support import seed as seeds
from tests.support.philox import keep_mask
from tests.support.shapes import Dtypes
from tests.support.tolerances import sums_dtype

from .activation import (
    exact_activation,
    named,
    slope_magnitude,
    torch_activation,
    value_magnitude,
)
from .add_norm import AddNormCase
from .call import Call, Results
from .layer_norm import NormCase
from .op import OpCase, Saved
from .rms_norm import RmsNormCase

SEED = 20141
STATE_BYTES = 16


def drawn_state(device_type: str) -> Tensor:
    """[seed, offset] of the first call on such a device after manual_seed(SEED)."""
    if device_type == "cuda":
        return torch.tensor([SEED, 0])
    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(torch.iinfo(torch.int64).max, (2,), generator=generator)


@lru_cache(maxsize=64)
def _kept(device_type: str, size: int, p: float) -> Tensor:
    return keep_mask(drawn_state(device_type), size, p)


def keep_scales(call: Call, dtype: torch.dtype) -> Tensor:
    """What the elements of the call's input are multiplied by, with 1 / (1 - p) rounded to
    `dtype`.
    """
    x = call.input
    kept = _kept(call.drawn_on, x.numel(), call.p).reshape(x.shape).to(x.device)
    return kept.to(dtype) * (0.0 if call.p == 1 else 1 / (1 - call.p))


@dataclass(frozen=True)
class DropoutCase(OpCase):
    """dropout itself, and what all have in common."""

    p: float = 0.3

    private: ClassVar[str] = "dropout"
    forward_results: ClassVar[tuple[str, ...]] = ("output", "rng_state")
    random: ClassVar[bool] = True
    linear: ClassVar[bool] = True
    rows_are_independent: ClassVar[bool] = False
    kept: ClassVar[tuple[str, ...]] = ()
    saved: ClassVar[tuple[str, ...]] = ("rng_state",)
    reemitted: ClassVar[tuple[str, ...]] = ()

    def seed(self) -> None:
        seeds.seed(SEED)

    def call_options(self, device: torch.device) -> dict[str, Any]:
        # drawn_on is for the oracle, which computes on the CPU whatever the call's device is.
        return {"p": self.p, "drawn_on": device.type}

    def arguments(self, call: Call) -> tuple[tuple, dict[str, Any]]:
        return (call.input, call.p), {}

    def backward_arguments(
        self,
        call: Call,
        saved: Saved,
        output_mask: tuple[bool, ...] | None = None,
        recompute_output: bool = False,
    ) -> tuple[tuple, dict[str, Any]]:
        return (call.grad_output, saved["rng_state"], call.p), {}

    def torch(self, call: Call) -> Tensor:
        return call.input * keep_scales(call, call.input.dtype)

    def magnitudes(self, call: Call) -> Results:
        scales = keep_scales(call, torch.float64)
        return Results(output=call.input.abs() * scales, grad_input=call.grad_output.abs() * scales)

    def statistics_bytes(self, call: Call) -> int:
        return STATE_BYTES


@dataclass(frozen=True)
class ActivationDropoutCase(DropoutCase):
    activation: str = "gelu"

    private: ClassVar[str] = "activation_dropout"
    linear: ClassVar[bool] = False
    kept: ClassVar[tuple[str, ...]] = ("input",)
    reemitted: ClassVar[tuple[str, ...]] = ("output",)

    def __str__(self) -> str:
        return f"{self.family}-{self.activation}"

    def arguments(self, call: Call) -> tuple[tuple, dict[str, Any]]:
        return (call.input, call.p), named(self.activation)

    def forward_arguments(self, call: Call) -> tuple[tuple, dict[str, Any]]:
        return (call.input, None, call.p), named(self.activation)

    def backward_arguments(
        self,
        call: Call,
        saved: Saved,
        output_mask: tuple[bool, ...] | None = None,
        recompute_output: bool = False,
    ) -> tuple[tuple, dict[str, Any]]:
        keywords = {**named(self.activation), "recompute_output": recompute_output}
        return (call.grad_output, call.input, saved["rng_state"], call.p), keywords

    def torch(self, call: Call) -> Tensor:
        return torch_activation(self.activation, call.input) * keep_scales(call, call.input.dtype)

    def exact(self, call: Call) -> Tensor:
        return exact_activation(self.activation, call.input) * keep_scales(call, torch.float64)

    def magnitudes(self, call: Call) -> Results:
        scales = keep_scales(call, torch.float64)
        slope = slope_magnitude(self.activation, call.input)
        return Results(
            output=value_magnitude(self.activation, call.input) * scales,
            grad_input=slope * call.grad_output.abs() * scales,
        )


@dataclass(frozen=True)
class DropoutAddNormCase(AddNormCase):
    """What both have in common. p = 0.5, which doubles what is kept, is exact in every type: so the
    sum is known to the last bit, of which the norm makes as much as it likes.
    """

    p: float = 0.5

    private: ClassVar[str] = "dropout_add_norm"
    forward_results: ClassVar[tuple[str, ...]] = ("output", "sum", "mean", "rstd", "rng_state")
    random: ClassVar[bool] = True
    rows_are_independent: ClassVar[bool] = False

    def seed(self) -> None:
        seeds.seed(SEED)

    def make_call(
        self,
        size: tuple[int, ...],
        dtypes: Dtypes,
        device: torch.device,
        **choices: Any,
    ) -> Call:
        call = super().make_call(size, dtypes, device, **choices)
        options = {**call.options, "p": self.p, "drawn_on": device.type}
        return replace(call, options=options)

    def arguments(self, call: Call) -> tuple[tuple, dict[str, Any]]:
        (x, residual, *rest), keywords = super().arguments(call)
        return (x, residual, call.p, *rest), keywords

    def forward_arguments(self, call: Call) -> tuple[tuple, dict[str, Any]]:
        (x, residual, *rest), keywords = super().forward_arguments(call)
        return (x, residual, None, call.p, *rest), self._without_activation(keywords)

    @property
    def backward_results(self) -> tuple[str, ...]:
        grads = ("grad_input", "grad_residual", "grad_weight", "grad_bias")
        return (*grads, "output")

    def backward_arguments(
        self,
        call: Call,
        saved: Saved,
        output_mask: tuple[bool, ...] | None = None,
        recompute_output: bool = False,
    ) -> tuple[tuple, dict[str, Any]]:
        if output_mask is None:
            given = (getattr(call, name) is not None for name in self.parameters)
            output_mask = (True, True, *given)
        # The norm knows one gradient where this op has two.
        (*tensors, mask), keywords = super().backward_arguments(
            call, saved, output_mask[1:], recompute_output
        )
        grad_output, grad_sum, total, *rest = tensors
        positional = (grad_output, grad_sum, total, saved["rng_state"], call.p, *rest)
        return (*positional, (output_mask[0], *mask)), self._without_activation(keywords)

    @staticmethod
    def _without_activation(keywords: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in keywords.items() if name != "activation"}

    def backward(
        self,
        call: Call,
        saved: Saved,
        output_mask: tuple[bool, ...] | None = None,
        recompute_output: bool = False,
    ) -> Results:
        return OpCase.backward(self, call, saved, output_mask, recompute_output)

    def dropped(self, call: Call) -> Tensor:
        return call.input * keep_scales(call, call.input.dtype)

    def rounded_sum(self, call: Call) -> Tensor:
        """As the op must round it: the product is exact in float64, and the sum of it and the
        residual is rounded to the type of sums and to the tensors' type.
        """
        dtype = getattr(torch, call.sum_dtype)
        x, residual = (t.detach().to(dtype).double() for t in (call.input, call.residual))
        scales = keep_scales(call, sums_dtype(dtype)).double()
        return (x * scales + residual).to(sums_dtype(dtype)).to(dtype).double()

    def magnitudes(self, call: Call) -> Results:
        results = super().magnitudes(call)
        scales = keep_scales(call, torch.float64)
        # Where processors have no fused multiply-add, the product is rounded.
        results["sum"] = results["sum"] + call.input.abs() * scales
        results["grad_input"] = results["grad_residual"] * scales
        return results

    def statistics_bytes(self, call: Call) -> int:
        return super().statistics_bytes(call) + STATE_BYTES


@dataclass(frozen=True)
class DropoutAddLayerNormCase(DropoutAddNormCase):
    parameters: ClassVar[tuple[str, ...]] = NormCase.parameters
    saved: ClassVar[tuple[str, ...]] = (*NormCase.saved, "rng_state")
    gradients: ClassVar[tuple[str, ...]] = ("input", "residual", "weight", "bias")
    masked: ClassVar[tuple[str, ...]] = gradients


@dataclass(frozen=True)
class DropoutAddRmsNormCase(DropoutAddNormCase):
    parameters: ClassVar[tuple[str, ...]] = RmsNormCase.parameters
    saved: ClassVar[tuple[str, ...]] = (*RmsNormCase.saved, "rng_state")
    gradients: ClassVar[tuple[str, ...]] = ("input", "residual", "weight")
    masked: ClassVar[tuple[str, ...]] = gradients


ACTIVATION_DROPOUT_CASES = tuple(
    ActivationDropoutCase("activation_dropout", activation=name)
    for name in ("gelu", "silu", "relu_squared", "softcap")
)
DROPOUT_ADD_NORM_CASES = (
    DropoutAddLayerNormCase("dropout_add_layer_norm", NormCase("layer_norm")),
    DropoutAddRmsNormCase("dropout_add_rms_norm", RmsNormCase("rms_norm")),
)
# With the variant of rms_norm, for what proves the norm behind dropout.
ALL_DROPOUT_ADD_NORM_CASES = (
    *DROPOUT_ADD_NORM_CASES,
    DropoutAddRmsNormCase("dropout_add_rms_norm", RmsNormCase("rms_norm", True)),
)
DROPOUT_CASES = (
    DropoutCase("dropout"),
    *ACTIVATION_DROPOUT_CASES,
    *DROPOUT_ADD_NORM_CASES,
)
