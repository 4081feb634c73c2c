"""layer_norm and layer_norm_gelu.

One letter per quantity as in csrc/kernels/layer_norm.h, with e_ for its error in roundings of the
type that sums have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import hypothesis.strategies as st
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.shapes import Dtypes, random_normal
from tests.support.tolerances import sums_dtype

from .activation import GELU_CURVATURE, GELU_SLOPE, exact_gelu
from .call import Call, Results
from .op import OpCase, Saved


class Moments(NamedTuple):
    """The moments of each row, in the shape of the op's statistics."""

    mean: Tensor
    std: Tensor
    rstd: Tensor


def _normalized_dims(call: Call) -> tuple[int, ...]:
    return tuple(range(-len(call.normalized_shape), 0))


def exact_moments(call: Call) -> Moments:
    """Mean, standard deviation and reciprocal of sqrt(variance + eps), in float64.

    The mean of the deviations from a first mean corrects it: otherwise its rounding would be the
    error at a mean/std of 1e4.
    """
    x, dims = call.input.detach().cpu().double(), _normalized_dims(call)
    first = x.mean(dims, keepdim=True)
    second = (x - first).mean(dims, keepdim=True)
    variance = (x - first - second).square().mean(dims, keepdim=True)
    return Moments(first + second, variance.sqrt(), (variance + call.eps).rsqrt())


@dataclass(frozen=True)
class NormCase(OpCase):
    approximate: str | None = None
    """Which form of GELU stands behind the norm; None if there is none."""

    private: ClassVar[str] = "norm"
    forward_results: ClassVar[tuple[str, ...]] = ("output", "sum", "mean", "rstd")
    parameters: ClassVar[tuple[str, ...]] = ("weight", "bias")
    saved: ClassVar[tuple[str, ...]] = ("mean", "rstd")
    gradients: ClassVar[tuple[str, ...]] = ("input", "weight", "bias")
    masked: ClassVar[tuple[str, ...]] = gradients

    def __str__(self) -> str:
        return "-".join(filter(None, (self.family, self.approximate)))

    @property
    def _approximate(self) -> dict[str, str]:
        return {} if self.approximate is None else {"approximate": self.approximate}

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
        bias: bool = True,
        **choices: Any,
    ) -> Call:
        """gamma is around 1 unless it is given."""
        shape = size[len(size) - normalized_dims :]
        x = random_normal(*size, seed=1) if values is None else values.reshape(size)
        gamma = random_normal(*shape, seed=2) + 1 if gamma is None else gamma.reshape(shape)
        beta = random_normal(*shape, seed=3)
        return Call(
            tensors={
                "input": x.to(device, dtypes.tensor),
                "weight": gamma.to(device, dtypes.parameter) if weight else None,
                "bias": beta.to(device, dtypes.parameter) if bias else None,
            },
            grads={"output": random_normal(*size, seed=4).to(device, dtypes.tensor)},
            options={"normalized_shape": shape, "eps": 1e-5, **self._approximate},
            parameters=self.parameters,
        )

    def random_choices(self, draw: Any, size: tuple[int, ...]) -> dict[str, Any]:
        # Dimensions of no elements are for the rows.
        most = len(size) - 1 if size[0] == 0 else len(size)
        return {
            "normalized_dims": draw(st.integers(1, most)),
            "weight": draw(st.booleans()),
            "bias": draw(st.booleans()),
        }

    def arguments(self, call: Call) -> tuple[tuple, dict[str, Any]]:
        positional = (call.input, call.normalized_shape, call.weight, call.bias, call.eps)
        return positional, self._approximate

    @property
    def norm_keywords(self) -> dict[str, Any]:
        """Keyword arguments of the private ops."""
        activation = {None: None, "none": "gelu", "tanh": "gelu_tanh"}[self.approximate]
        return {"norm": "layer_norm", "activation": activation}

    def forward_arguments(self, call: Call) -> tuple[tuple, dict[str, Any]]:
        dims = len(call.normalized_shape)
        return (call.input, None, dims, call.weight, call.bias, call.eps), self.norm_keywords

    def backward_arguments(
        self,
        call: Call,
        saved: Saved,
        output_mask: tuple[bool, ...] | None = None,
        recompute_output: bool = False,
    ) -> tuple[tuple, dict[str, Any]]:
        if output_mask is None:
            output_mask = (True, call.weight is not None, call.bias is not None)
        positional = (
            *(call.grad_output, None, call.input, len(call.normalized_shape)),
            *(saved["mean"], saved["rstd"], call.weight, call.bias, output_mask),
        )
        return positional, {**self.norm_keywords, "recompute_output": recompute_output}

    def torch(self, call: Call) -> Tensor:
        result = F.layer_norm(
            call.input, call.normalized_shape, call.weight, call.bias, eps=call.eps
        )
        if self.approximate is None:
            return result
        return F.gelu(result, approximate=self.approximate)

    def exact(self, call: Call) -> Tensor:
        # The norm does not see a shift of its row, and centred rows leave its sums nothing to
        # cancel.
        centred = call.input - exact_moments(call).mean.to(call.input.device)
        result = F.layer_norm(centred, call.normalized_shape, call.weight, call.bias, call.eps)
        return result if self.approximate is None else exact_gelu(result, self.approximate)

    def magnitudes(self, call: Call) -> Results:
        x, dy, dims = call.input, call.grad_output, _normalized_dims(call)
        mean, std, rstd = exact_moments(call)
        xhat = (x - mean) * rstd
        gamma = torch.ones_like(x) if call.weight is None else call.weight
        beta = torch.zeros_like(x) if call.bias is None else call.bias
        z = xhat * gamma + beta
        # The mean is rounded, and so are the sums of deviations, which are of the size of std,
        # behind mean and rstd.
        e_xhat = (mean.abs() + std) * rstd + xhat.abs()
        e_z = gamma.abs() * e_xhat + beta.abs()
        if self.approximate is None:
            dz, e_dz, e_y = dy.abs(), torch.zeros_like(dy), e_z
        else:
            dz = dy.abs() * GELU_SLOPE
            e_dz = dy.abs() * (GELU_SLOPE + GELU_CURVATURE * e_z)
            e_y = z.abs() + GELU_SLOPE * e_z

        def row_mean(t: Tensor) -> Tensor:
            return t.mean(dims, keepdim=True)

        g = dz * gamma.abs()
        e_g = g + e_dz * gamma.abs()
        mean_gx = row_mean(g * xhat.abs())
        e_mean_gx = row_mean(g * e_xhat + e_g * xhat.abs())
        e_dx = rstd * (e_g + row_mean(e_g) + e_xhat * mean_gx + xhat.abs() * e_mean_gx)
        row_dims = tuple(range(x.dim() - len(dims)))
        e_dgamma = dz * e_xhat + e_dz * xhat.abs()
        e_dbeta = dz + e_dz
        if row_dims:
            e_dgamma, e_dbeta = e_dgamma.sum(row_dims), e_dbeta.sum(row_dims)
        return Results(
            output=e_y,
            grad_input=e_dx,
            grad_weight=None if call.weight is None else e_dgamma,
            grad_bias=None if call.bias is None else e_dbeta,
        )

    def statistics(self, call: Call) -> dict[str, tuple[Tensor, Tensor]]:
        mean, std, rstd = exact_moments(call)
        return {"mean": (mean, mean.abs() + std), "rstd": (rstd, rstd)}

    def read_by_backward(self, call: Call) -> tuple[str, ...]:
        # beta is read where the activation's derivative is computed at z.
        return ("input", "weight") if self.approximate is None else ("input", "weight", "bias")

    def statistics_bytes(self, call: Call) -> int:
        """Mean and rstd of each row: two float32, two float64 for float64."""
        rows = call.input.shape[: call.input.dim() - len(call.normalized_shape)].numel()
        return rows * 2 * sums_dtype(call.input.dtype).itemsize


NORM_CASES = (
    NormCase("layer_norm"),
    NormCase("layer_norm_gelu", "none"),
    NormCase("layer_norm_gelu", "tanh"),
)
