"""Rules for modules whose class is enough to know them: torch.nn's, and memopt's own."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

import memopt.nn
from memopt import functional
from memopt._class_patch import original_class
from memopt._convert.match import Answer, Context, Reason
from memopt._convert.supported import supports, takes_eps
from memopt._convert.swap import AttributeSwap, Plain, TorchSwap, replaces
from memopt.functional.sync_batch_norm import group_of_ranks
from memopt.recipes import is_kept_anyway


@dataclass(frozen=True)
class SyncBatchNormSwap(TorchSwap):
    """A batch norm across ranks. On one rank, outside its group and in evaluation PyTorch's forward
    calls batch_norm, which is memopt's inside the calls of a converted model.
    """

    def by_function(self, plain: Plain) -> Plain | None:
        return None

    def run(self, module: Any, input: Tensor, plain: Plain) -> Tensor:
        if not module.training or group_of_ranks(module.process_group)[0] < 2:
            return plain(module, input)
        if input.device.type == "cpu":  # which PyTorch's refuses
            output: Tensor = self.base.forward(module, input)
            return output
        return super().run(module, input, plain)


SWAPS: dict[type[nn.Module], TorchSwap] = {
    nn.LayerNorm: TorchSwap(memopt.nn.LayerNorm, ("weight", "bias")),
    nn.RMSNorm: TorchSwap(memopt.nn.RMSNorm, ("weight",)),
    nn.SyncBatchNorm: SyncBatchNormSwap(
        memopt.nn.SyncBatchNorm, ("weight", "bias", "running_mean", "running_var")
    ),
    nn.GELU: TorchSwap(memopt.nn.GELU),
    nn.SiLU: TorchSwap(memopt.nn.SiLU),
    nn.ReLU: TorchSwap(memopt.nn.ReLU, saves_input_for_output=True),
    nn.Sigmoid: TorchSwap(memopt.nn.Sigmoid, saves_input_for_output=True),
    nn.ReLU6: TorchSwap(memopt.nn.ReLU6),
    nn.LeakyReLU: TorchSwap(memopt.nn.LeakyReLU),
    nn.ELU: TorchSwap(memopt.nn.ELU),
    nn.Hardsigmoid: TorchSwap(memopt.nn.Hardsigmoid),
    nn.Hardswish: TorchSwap(memopt.nn.Hardswish),
    nn.Mish: TorchSwap(memopt.nn.Mish),
    nn.Dropout: TorchSwap(memopt.nn.Dropout),
}

# Norms over channels, whose modules stay, and the functions that they call.
_FUNCTIONS: dict[type[nn.Module], str] = {
    nn.modules.batchnorm._BatchNorm: "batch_norm",
    nn.modules.instancenorm._InstanceNorm: "instance_norm",
    nn.GroupNorm: "group_norm",
}

# The attributes with the numbers of activations that take one.
_NUMBERS: dict[type[nn.Module], str] = {nn.LeakyReLU: "negative_slope", nn.ELU: "alpha"}

# Where torch.nn keeps what a reader of the report would look for.
_TORCH_FAMILIES = tuple(
    f"torch.nn.modules.{name}"
    for name in ("activation", "batchnorm", "dropout", "instancenorm", "normalization")
)

UNMENTIONED = Reason("")


def memopts_own(module: nn.Module, context: Context) -> Answer | None:
    """Leaves the modules of memopt.nn, which others would become."""
    in_memopt = original_class(type(module)).__module__.startswith("memopt.")
    return UNMENTIONED if in_memopt else None


def torch_module(module: nn.Module, context: Context) -> Answer | None:
    """A module of torch.nn that memopt.nn has too, or of a subclass that keeps its forward."""
    cls = original_class(type(module))
    for kind, swap in SWAPS.items():
        if not issubclass(cls, kind):
            continue
        if cls.forward is not kind.forward:
            return None  # often another way to compute the same; whether it is, a probe tells
        if 0 in getattr(module, "normalized_shape", ()):
            return Reason("it normalises no elements")
        if not takes_eps(getattr(module, "eps", None) or 0.0):
            return Reason("memopt's op takes a finite eps that is not negative")
        number = _NUMBERS.get(kind)
        if number is not None and not 0 < getattr(module, number) < math.inf:
            return Reason(f"memopt's op takes a finite and positive {number}")
        if not getattr(module, "inplace", False):
            return swap
        if kind is nn.Dropout:
            return Reason("inplace=True: memopt's dropout does not write over its input")
        return replace(swap, in_place=True)
    return None


def calls_function(module: nn.Module, context: Context) -> Answer | None:
    """A module of torch.nn whose function goes to memopt's, so that it needs no swap."""
    cls = original_class(type(module))
    for kind, function in _FUNCTIONS.items():
        if issubclass(cls, kind) and cls.forward is kind.forward:
            if context.functions and "forward" not in module.__dict__:
                return Reason("", function=function)
            return Reason(f"its function, {function}, is memopt's with recipes and functional=True")
    return None


def other_module_of_torch(module: nn.Module, context: Context) -> Answer | None:
    """A module of PyTorch for which memopt has no op. The report names it if it looks like one."""
    cls = original_class(type(module))
    if not cls.__module__.startswith("torch."):
        return None
    in_family = cls.__module__ in _TORCH_FAMILIES and not module._modules
    return Reason("memopt has no op for it") if in_family else UNMENTIONED


_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


@replaces(F.gelu)
def gelu(input: Tensor) -> Tensor:
    """memopt.functional.gelu, or PyTorch's where that does not support the call."""
    return functional.gelu(input) if supports(input) else F.gelu(input)


@replaces(F.relu)
def relu(input: Tensor) -> Tensor:
    """memopt.functional.relu where that is a gain, or PyTorch's."""
    return functional.relu(input) if supports(input) and is_kept_anyway(input) else F.relu(input)


_OF_LAYERS: dict[Callable[..., Tensor], AttributeSwap] = {
    F.gelu: AttributeSwap("activation", gelu),
    F.relu: AttributeSwap("activation", relu, saves_input_for_output=True),
}


def transformer_layer(module: nn.Module, context: Context) -> Answer | None:
    """PyTorch's gelu or relu in the attribute `activation`; other rules swap the modules inside.

    The layers' fast path in evaluation looks at the attribute `activation_relu_or_gelu`, which
    their constructor sets, and not at the function. So it is taken as before.
    """
    if not isinstance(module, _LAYERS):
        return None
    function = module.__dict__.get("activation")
    return next((swap for original, swap in _OF_LAYERS.items() if original is function), None)
