"""What becomes of a module: a swap, or a reason to leave it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import nn

import memopt.nn
from memopt._subclass import original_class
from memopt.convert.activation import (
    SAVE_THEIR_OUTPUT,
    Activation,
    activation_name,
    may_be_activation,
    name_of_kind,
    recognise_activation,
)
from memopt.convert.gated import may_be_gated, recognise_gated
from memopt.convert.norm import may_be_norm, recognise_norm
from memopt.convert.probe import constants_of, own_attributes
from memopt.convert.swap import Module, Swap, Swapped

TORCH: dict[type[nn.Module], Module] = {
    nn.LayerNorm: Module(memopt.nn.LayerNorm, ("weight", "bias")),
    nn.RMSNorm: Module(memopt.nn.RMSNorm, ("weight",)),
    nn.GELU: Module(memopt.nn.GELU),
    nn.SiLU: Module(memopt.nn.SiLU),
    nn.ReLU: Module(memopt.nn.ReLU),
    nn.Sigmoid: Module(memopt.nn.Sigmoid),
    nn.Dropout: Module(memopt.nn.Dropout),
}

# Their overrides of torch.nn's forwards are known to be other ways to the same function; whether
# one is, is probed.
_LIBRARIES = ("timm", "transformers")

# Where torch.nn keeps what a reader of the report would look for.
_TORCH_FAMILIES = tuple(
    f"torch.nn.modules.{name}"
    for name in ("activation", "batchnorm", "dropout", "instancenorm", "normalization")
)

NO_NORM = "it computes neither a layer norm nor an RMS norm over its last dimension"

SAVES_ITS_OUTPUT = (
    "PyTorch's saves its output, which the next layer saves as well; memopt's would save its input "
    "beside it where there are no recipes"
)


class Chooser:
    """Decides module by module, and remembers what probes of like modules said."""

    def __init__(self, recompute: bool) -> None:
        self._recompute = recompute
        self._activations: dict[nn.Module, str] = {}
        self._probed: dict[Hashable, Any] = {}

    def choose(self, module: nn.Module) -> Swap | str | None:
        """What to swap `module` for, why it is left, or None if there is nothing to say.

        Submodules come before the modules that hold them.
        """
        if isinstance(module, (Swapped, torch.jit.ScriptModule)):
            return None
        choice = self._choose(module)
        if not isinstance(choice, str) and choice is not None and _has_own_forward(module):
            return "its forward was replaced on the instance"
        name = choice.name if isinstance(choice, Activation) else None
        if isinstance(choice, Module):
            name = name_of_kind(choice.base, module)
        if name is not None:
            self._activations[module] = name
        return choice

    def _choose(self, module: nn.Module) -> Swap | str | None:
        cls = original_class(type(module))
        if cls.__module__.startswith("memopt."):
            return None
        for kind, swap in TORCH.items():
            if issubclass(cls, kind):
                if cls.forward is kind.forward:
                    return self._torch(module, swap)
                if cls.__module__.split(".")[0] not in _LIBRARIES:
                    return f"{cls.__qualname__} overrides the forward of {kind.__name__}"
        if cls.__module__.startswith("torch."):
            in_family = cls.__module__ in _TORCH_FAMILIES and not module._modules
            return "memopt has no op for it" if in_family else None
        return self._probe(module)

    def _torch(self, module: nn.Module, swap: Module) -> Swap | str:
        if getattr(module, "inplace", False):
            return "inplace=True overwrites what backward needs"
        if not self._recompute and activation_name(module) in SAVE_THEIR_OUTPUT:
            return SAVES_ITS_OUTPUT
        return swap

    def _probe(self, module: nn.Module) -> Swap | str | None:
        if may_be_norm(module):
            return self._remembered(module, recognise_norm) or NO_NORM
        if may_be_activation(module):
            name = self._remembered(module, recognise_activation)
            if name is None:
                return "it computes no activation that memopt has"
            if not self._recompute and name in SAVE_THEIR_OUTPUT:
                return SAVES_ITS_OUTPUT
            return Activation(name, constants=constants_of(module))
        if may_be_gated(module):
            swap: Swap | None = self._remembered(
                module, lambda m: recognise_gated(m, self._activations)
            )
            return swap
        return None

    def _remembered(self, module: nn.Module, probe: Callable[[nn.Module], Any]) -> Any:
        key = (
            original_class(type(module)),
            tuple(sorted((k, _key(v)) for k, v in own_attributes(module).items())),
            tuple((k, p is not None and (p.shape, p.dtype)) for k, p in module._parameters.items()),
            tuple(
                (k, m is not None and (type(m), self._activations.get(m), activation_name(m)))
                for k, m in module._modules.items()
            ),
        )
        if key not in self._probed:
            self._probed[key] = probe(module)
        return self._probed[key]


def _key(value: object) -> str:
    """Equal for attributes that are alike; all of them live while modules are chosen."""
    if isinstance(value, (bool, int, float, str, type(None))):
        return repr(value)
    return f"object {id(getattr(value, '__func__', value))}"


def _has_own_forward(module: nn.Module) -> bool:
    return any(name == "forward" or name.endswith("_instance_forward") for name in module.__dict__)
