"""group_norm, instance_norm and batch_norm.

Letters as in csrc/kernels/channel_norm.h, with e_ for a quantity's error in roundings of the type
that sums have. Tensors are looked at as [batch, groups, channels of a group, size]; a set is the
last two dimensions, or for batch norm all but the second.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.shapes import Dtypes, random_normal
from tests.support.tolerances import sums_dtype

from .activation import named
from .call import Call, Results
from .op import OpCase, Saved

RUNNING = ("running_mean", "running_var")


@dataclass(frozen=True)
class ChannelNormCase(OpCase):
    training: bool = True
    """Of batch norm: by the statistics of the input."""

    activation: str | None = None
    """Behind the norm; its results are compared with those of the two ops, not with an oracle."""

    private: ClassVar[str] = "channel_norm"
    forward_results: ClassVar[tuple[str, ...]] = ("output", "mean", "rstd", "variance")
    parameters: ClassVar[tuple[str, ...]] = ("weight", "bias")
    constants: ClassVar[tuple[str, ...]] = RUNNING
    saved: ClassVar[tuple[str, ...]] = ("mean", "rstd")
    gradients: ClassVar[tuple[str, ...]] = ("input", "weight", "bias")
    masked: ClassVar[tuple[str, ...]] = gradients
    reemitted: ClassVar[tuple[str, ...]] = ()

    def __str__(self) -> str:
        mode = "" if self.training else "evaluation"
        return "-".join(filter(None, (self.family, mode, self.activation)))

    @property
    def behind(self) -> dict[str, Any]:
        """Keyword arguments of the ops."""
        return {} if self.activation is None else named(self.activation)

    def two_ops(self, call: Call) -> Tensor:
        """The norm, and the activation one after the other."""
        output = replace(self, activation=None).memopt(call)
        return torch.ops.memopt.activation(output, **self.behind)

    @property
    def over_batch(self) -> bool:
        return self.family == "batch_norm"

    def make_call(
        self,
        size: tuple[int, ...],
        dtypes: Dtypes,
        device: torch.device,
        *,
        groups: int = 2,
        values: Tensor | None = None,
        gamma: Tensor | None = None,
        weight: bool = True,
        bias: bool = True,
        **choices: Any,
    ) -> Call:
        """gamma is around 1 unless it is given; running statistics are of the parameters' type."""
        channels = size[1]
        x = random_normal(*size, seed=1) if values is None else values.reshape(size)
        gamma = random_normal(channels, seed=2) + 1 if gamma is None else gamma
        beta = random_normal(channels, seed=3)
        tensors = {
            "input": x.to(device, dtypes.tensor),
            "weight": gamma.to(device, dtypes.parameter) if weight else None,
            "bias": beta.to(device, dtypes.parameter) if bias else None,
        }
        options: dict[str, Any] = {"eps": 1e-5, "num_groups": groups}
        if self.over_batch:
            mean, var = random_normal(channels, seed=5), random_normal(channels, seed=6).square()
            running = (t.to(device, dtypes.parameter) for t in (mean, var + 0.1))
            tensors.update(zip(RUNNING, running, strict=True))
            options["num_groups"] = channels
        if self.family == "instance_norm":
            options["num_groups"] = channels
        return Call(
            tensors=tensors,
            grads={"output": random_normal(*size, seed=4).to(device, dtypes.tensor)},
            options=options,
            parameters=self.parameters,
            constants=RUNNING,
        )

    def arguments(self, call: Call) -> tuple[tuple, dict[str, Any]]:
        if self.over_batch:
            positional = (call.input, call.running_mean, call.running_var, call.weight, call.bias)
            return positional, {"training": self.training, "eps": call.eps, **self.behind}
        if self.family == "instance_norm":
            keywords = {"weight": call.weight, "bias": call.bias, "eps": call.eps}
            return (call.input,), {**keywords, **self.behind}
        return (call.input, call.num_groups, call.weight, call.bias, call.eps), self.behind

    def _given(self, call: Call) -> tuple[Tensor | None, Tensor | None]:
        if self.training:
            return None, None
        dtype = sums_dtype(call.input.dtype)
        rstd = (call.running_var.to(dtype) + call.eps).rsqrt()
        return call.running_mean.to(dtype).clone(), rstd

    def _groups(self, call: Call) -> int:
        return 1 if self.over_batch else call.num_groups

    def forward_arguments(self, call: Call) -> tuple[tuple, dict[str, Any]]:
        groups = self._groups(call)
        positional = (call.input, groups, *self._given(call), call.weight, call.bias, call.eps)
        return positional, {"norm": self.family, **self.behind}

    def forward(self, call: Call) -> tuple[Results, Saved]:
        outputs, saved = super().forward(call)
        if not self.training:
            saved = dict(zip(self.saved, self._given(call), strict=True))
        return outputs, saved

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
            *(call.grad_output, call.input, self._groups(call), saved["mean"], saved["rstd"]),
            *(call.weight, call.bias, not self.training, output_mask),
        )
        return positional, {"norm": self.family, **self.behind}

    def output_again(self, call: Call, saved: Saved) -> Tensor:
        """What a recipe does: the output from the statistics."""
        (x, groups, _, _, *rest), keywords = self.forward_arguments(call)
        arguments = (x, groups, saved["mean"], saved["rstd"], *rest)
        output: Tensor = self.forward_op(*arguments, **keywords)[0]
        return output

    gradient_op: ClassVar[Any] = torch.ops.memopt._channel_norm_activation_backward.default
    """The gradient of the norm's output, from that of the activation behind it."""

    def gradient_arguments(self, call: Call, saved: Saved) -> tuple[tuple, dict[str, Any]]:
        (*positional, _, _), keywords = self.backward_arguments(call, saved)
        return tuple(positional), keywords

    def torch(self, call: Call) -> Tensor:
        x, weight, bias, eps = call.input, call.weight, call.bias, call.eps
        if self.over_batch:
            running = (call.running_mean, call.running_var)
            return F.batch_norm(x, *running, weight, bias, training=self.training, eps=eps)
        if self.family == "instance_norm":
            return F.instance_norm(x, weight=weight, bias=bias, eps=eps)
        if weight is None and bias is not None:  # which PyTorch's backward does not take
            weight = torch.ones_like(bias)
        return F.group_norm(x, call.num_groups, weight, bias, eps)

    def exact(self, call: Call) -> Tensor:
        if not self.training:
            return self.torch(call)
        # The norm does not see a shift of a set. PyTorch's batch norm in float64 is off by more
        # digits than what it is to judge.
        x = call.input.reshape(self._shape(call)) - self._moments(call)[0]
        x = x - x.mean(self._set, keepdim=True)
        y = x * (x.square().mean(self._set, keepdim=True) + call.eps).rsqrt()
        if call.weight is not None:
            y = y * self._of_channels(call, call.weight)
        if call.bias is not None:
            y = y + self._of_channels(call, call.bias)
        return y.reshape(call.input.shape)

    # The error analysis.

    def _shape(self, call: Call) -> tuple[int, int, int, int]:
        batch, channels, *spatial = call.input.shape
        groups = call.num_groups
        return batch, groups, channels // groups, math.prod(spatial)

    @property
    def _set(self) -> tuple[int, ...]:
        return (0, 2, 3) if self.over_batch else (2, 3)

    def _of_channels(self, call: Call, t: Tensor) -> Tensor:
        _, groups, each, _ = self._shape(call)
        return t.reshape(1, groups, each, 1)

    def _moments(self, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """Mean, standard deviation and reciprocal of sqrt(variance + eps), in float64."""
        if not self.training:
            mean, var = (
                self._of_channels(call, getattr(call, name).detach().cpu().double())
                for name in RUNNING
            )
            return mean, var.sqrt(), (var + call.eps).rsqrt()
        x = call.input.detach().cpu().double().reshape(self._shape(call))
        first = x.mean(self._set, keepdim=True)
        second = (x - first).mean(self._set, keepdim=True)
        variance = (x - first - second).square().mean(self._set, keepdim=True)
        return first + second, variance.sqrt(), (variance + call.eps).rsqrt()

    def magnitudes(self, call: Call) -> Results:
        shape = self._shape(call)
        x, dy = call.input.reshape(shape), call.grad_output.reshape(shape)
        mean, std, rstd = self._moments(call)
        xhat = (x - mean) * rstd
        gamma, beta = (
            torch.ones(()) * default
            if parameter is None
            else self._of_channels(call, parameter).abs()
            for parameter, default in ((call.weight, 1), (call.bias, 0))
        )
        # As a row's (layer_norm.py); statistics that are given are rounded all the same.
        e_xhat = (mean.abs() + std) * rstd + xhat.abs()
        g = dy.abs() * gamma

        def mean_of_set(t: Tensor) -> Tensor:
            return t.mean(self._set, keepdim=True)

        if self.training:
            mean_gx, e_mean_gx = mean_of_set(g * xhat.abs()), mean_of_set(g * e_xhat)
            e_dx = rstd * (g + mean_of_set(g) + e_xhat * mean_gx + xhat.abs() * e_mean_gx)
        else:
            e_dx = rstd * g
        channels = call.input.shape[1]
        return Results(
            output=(gamma * e_xhat + beta).reshape(call.input.shape),
            grad_input=e_dx.reshape(call.input.shape),
            grad_weight=None
            if call.weight is None
            else (dy.abs() * e_xhat).sum((0, 3)).reshape(channels),
            grad_bias=None if call.bias is None else dy.abs().sum((0, 3)).reshape(channels),
        )

    def statistics(self, call: Call) -> dict[str, tuple[Tensor, Tensor]]:
        mean, std, rstd = (t.squeeze((2, 3)) for t in self._moments(call))
        if self.over_batch:
            mean, std, rstd = mean[0], std[0], rstd[0]
        return {"mean": (mean, mean.abs() + std), "rstd": (rstd, rstd)}

    def read_by_backward(self, call: Call) -> tuple[str, ...]:
        return ("input", "weight")

    def statistics_bytes(self, call: Call) -> int:
        """Mean and rstd of each set: two float32, two float64 for float64."""
        sets = call.input.shape[1] if self.over_batch else call.input.shape[0] * call.num_groups
        return sets * 2 * sums_dtype(call.input.dtype).itemsize


GROUP_NORM_CASES = (ChannelNormCase("group_norm"), ChannelNormCase("instance_norm"))
BATCH_NORM_CASES = (ChannelNormCase("batch_norm"), ChannelNormCase("batch_norm", training=False))
CHANNEL_NORM_CASES = (*GROUP_NORM_CASES, *BATCH_NORM_CASES)
CHANNEL_NORM_ACTIVATION_CASES = (
    ChannelNormCase("group_norm", activation="silu"),
    ChannelNormCase("instance_norm", activation="leaky_relu"),
    ChannelNormCase("batch_norm", activation="relu"),
    ChannelNormCase("batch_norm", training=False, activation="gelu_tanh"),
)
