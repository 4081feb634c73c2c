"""rms_norm, and with a weight around 0 that is added to 1.

Letters as in csrc/kernels/rms_norm.h, with e_ for a quantity's error in roundings of the type that
sums have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import hypothesis.strategies as st
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.shapes import Dtypes, random_normal
from tests.support.tolerances import sums_dtype

from .call import Call, Results
from .op import OpCase, Saved


@dataclass(frozen=True)
class RmsNormCase(OpCase):
    zero_centered_weight: bool = False

    private: ClassVar[str] = "norm"
    forward_results: ClassVar[tuple[str, ...]] = ("output", "sum", "mean", "rstd")
    parameters: ClassVar[tuple[str, ...]] = ("weight",)
    saved: ClassVar[tuple[str, ...]] = ("rstd",)
    gradients: ClassVar[tuple[str, ...]] = ("input", "weight")
    masked: ClassVar[tuple[str, ...]] = gradients

    def __str__(self) -> str:
        return self.family + ("-zero_centered" if self.zero_centered_weight else "")

    def make_call(
        self,
        size: tuple[int, ...],
        dtypes: Dtypes,
        device: torch.device,
        *,
        normalized_dims: int = 1,
        values: Tensor | None = None,
        gamma: Tensor | None = None,
        weight: bool = True,
        **choices: Any,
    ) -> Call:
        """The scale is around 1 unless gamma is given, which is the weight. eps is given, since its
        default depends on the type and the oracle's is another.
        """
        shape = size[len(size) - normalized_dims :]
        x = random_normal(*size, seed=1) if values is None else values.reshape(size)
        if gamma is None:
            gamma = random_normal(*shape, seed=2) + (0 if self.zero_centered_weight else 1)
        return Call(
            tensors={
                "input": x.to(device, dtypes.tensor),
                "weight": gamma.reshape(shape).to(device, dtypes.parameter) if weight else None,
            },
            grads={"output": random_normal(*size, seed=4).to(device, dtypes.tensor)},
            options={
                "normalized_shape": shape,
                "eps": 1e-5,
                "zero_centered_weight": self.zero_centered_weight,
            },
            parameters=self.parameters,
        )

    def random_choices(self, draw: Any, size: tuple[int, ...]) -> dict[str, Any]:
        # Dimensions of no elements are for the rows.
        most = len(size) - 1 if size[0] == 0 else len(size)
        return {"normalized_dims": draw(st.integers(1, most)), "weight": draw(st.booleans())}

    @property
    def _keywords(self) -> dict[str, Any]:
        return {"zero_centered_weight": self.zero_centered_weight}

    def arguments(self, call: Call) -> tuple[tuple, dict[str, Any]]:
        return (call.input, call.normalized_shape, call.weight, call.eps), self._keywords

    @property
    def norm_keywords(self) -> dict[str, Any]:
        """Keyword arguments of the private ops."""
        return {"norm": "rms_norm", **self._keywords}

    @property
    def backward_results(self) -> tuple[str, ...]:
        return ("grad_input", "grad_weight", "grad_bias", "output")

    def forward_arguments(self, call: Call) -> tuple[tuple, dict[str, Any]]:
        dims = len(call.normalized_shape)
        return (call.input, None, dims, call.weight, None, call.eps), self.norm_keywords

    def backward_arguments(
        self,
        call: Call,
        saved: Saved,
        output_mask: tuple[bool, ...] | None = None,
        recompute_output: bool = False,
    ) -> tuple[tuple, dict[str, Any]]:
        if output_mask is None:
            output_mask = (True, call.weight is not None)
        positional = (
            *(call.grad_output, None, call.input, len(call.normalized_shape)),
            *(None, saved["rstd"], call.weight, None, (*output_mask, False)),
        )
        return positional, {**self.norm_keywords, "recompute_output": recompute_output}

    def scale(self, call: Call) -> Tensor | None:
        """What the normalised row is multiplied by."""
        if call.weight is None or not self.zero_centered_weight:
            return call.weight
        return call.weight + 1

    def torch(self, call: Call) -> Tensor:
        scale = self.scale(call)
        if scale is None or scale.dtype == call.input.dtype:
            return F.rms_norm(call.input, call.normalized_shape, scale, call.eps)
        # PyTorch has no fused kernel for two dtypes, warns, and computes like this.
        wide = F.rms_norm(call.input.to(scale.dtype), call.normalized_shape, scale, call.eps)
        return wide.to(call.input.dtype)

    def magnitudes(self, call: Call) -> Results:
        x, dy = call.input, call.grad_output
        dims = tuple(range(-len(call.normalized_shape), 0))
        rstd, _ = self.statistics(call)["rstd"]
        scale = self.scale(call)
        scale = torch.ones_like(x) if scale is None else scale
        # Squares do not cancel: every error is relative.
        xhat = (x * rstd).abs()
        g = (dy * scale).abs()
        mean_gx = (g * xhat).mean(dims, keepdim=True)
        # rstd, xhat and the product with g each err by their own size.
        e_dx = rstd * (2 * g + 4 * xhat * mean_gx)
        row_dims = tuple(range(x.dim() - len(dims)))
        e_dgamma = dy.abs() * xhat
        return Results(
            output=2 * xhat * scale.abs(),
            grad_input=e_dx,
            grad_weight=None
            if call.weight is None
            else e_dgamma.sum(row_dims)
            if row_dims
            else e_dgamma,
        )

    def statistics(self, call: Call) -> dict[str, tuple[Tensor, Tensor]]:
        x = call.input.detach().cpu().double()
        dims = tuple(range(-len(call.normalized_shape), 0))
        rstd = (x.square().mean(dims, keepdim=True) + call.eps).rsqrt()
        return {"rstd": (rstd, rstd)}

    def read_by_backward(self, call: Call) -> tuple[str, ...]:
        return ("input", "weight")

    def statistics_bytes(self, call: Call) -> int:
        """rstd of each row: a float32, or a float64 for float64."""
        rows = call.input.shape[: call.input.dim() - len(call.normalized_shape)].numel()
        return rows * sums_dtype(call.input.dtype).itemsize


RMS_NORM_CASES = (RmsNormCase("rms_norm"), RmsNormCase("rms_norm", True))
