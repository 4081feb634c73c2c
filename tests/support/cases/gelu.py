"""gelu, in both forms."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.shapes import Dtypes, random_normal

from .call import Call, Results
from .op import OpCase, Saved

# Bounds of GELU's first and second derivative, erf and tanh form alike (maxima 1.129 and 0.798).
GELU_SLOPE = 1.13
GELU_CURVATURE = 0.8


def exact_gelu(x: Tensor, approximate: str) -> Tensor:
    """max(x, 0) + n cdf(n) with n = -|x|: nothing cancels in either tail, neither in the value nor
    in the derivative.
    """
    n = torch.where(x < 0, x, -x)
    if approximate == "none":
        cdf = 0.5 * torch.erfc(n * -math.sqrt(0.5))
    else:
        cdf = torch.sigmoid(2 * math.sqrt(2 / math.pi) * (n + 0.044715 * n**3))
    return torch.where(x < 0, 0.0, x) + n * cdf


@dataclass(frozen=True)
class GeluCase(OpCase):
    approximate: str = "none"

    elementwise: ClassVar[bool] = True
    keeps_strides: ClassVar[bool] = True

    def __str__(self) -> str:
        return f"{self.family}-{self.approximate}"

    def make_call(
        self,
        size: tuple[int, ...],
        dtypes: Dtypes,
        device: torch.device,
        *,
        values: Tensor | None = None,
        **choices: Any,
    ) -> Call:
        x = random_normal(*size, seed=1) if values is None else values.reshape(size)
        return Call(
            tensors={"input": x.to(device, dtypes.tensor)},
            grads={"output": random_normal(*size, seed=4).to(device, dtypes.tensor)},
            options={"approximate": self.approximate},
        )

    @property
    def forward_op(self) -> torch._ops.OpOverload:
        return torch.ops.memopt._gelu_forward.default

    def backward_arguments(
        self,
        call: Call,
        saved: Saved,
        output_mask: tuple[bool, ...] | None = None,
        recompute_output: bool = False,
    ) -> tuple[tuple, dict[str, Any]]:
        keywords = {"approximate": self.approximate, "recompute_output": recompute_output}
        return (call.grad_output, call.input), keywords

    def torch(self, call: Call) -> Tensor:
        return F.gelu(call.input, approximate=self.approximate)

    def exact(self, call: Call) -> Tensor:
        return exact_gelu(call.input, self.approximate)

    def magnitudes(self, call: Call) -> Results:
        return Results(output=call.input.abs(), grad_input=GELU_SLOPE * call.grad_output.abs())


GELU_CASES = (GeluCase("gelu", "none"), GeluCase("gelu", "tanh"))
