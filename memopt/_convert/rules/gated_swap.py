"""The swap of a gated unit: it calls the same submodules, and computes the product as one op."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from memopt import functional
from memopt._class_patch import Forward
from memopt._convert.probe import Constants, are_constant
from memopt._convert.rules.activation import activation_name
from memopt._convert.supported import casts, supports
from memopt._convert.swap import ClassSwap, Plain, has_hooks
from memopt.functional.activation import formula


@dataclass(frozen=True)
class GatedSwap(ClassSwap):
    """A gated unit: the names of the submodules that it calls."""

    linears: tuple[str, ...]
    """(gate, up) in the order of their calls, or the one that gives both; none if the input is
    both."""

    down: str | None
    between: tuple[str, ...]
    behind: tuple[str, ...]
    """Called in this order on the product, and on the result."""

    activation: str
    activation_module: str | None
    """The submodule that computes it, if one does."""

    layout: str
    """Two linears: which is the gate, "first" or "second". One or none: which half is ("first" or
    "second"), or "interleaved": they alternate, gate first; or "ungated": f(up(x)), no product."""

    casts_to_weight: bool
    """The product is cast to the dtype of down's weight, as T5 does."""

    constants: Constants = ()
    """Attributes and their values. With other values the module computes something else."""

    def becomes(self) -> str:
        if self.layout == "ungated":
            return f"memopt.functional.activation({self.activation!r})"
        packed = "" if len(self.linears) == 2 else "_packed" * (self.layout != "second")
        return f"memopt.functional.gated{packed}({self.activation!r})"

    def run(self, module: Any, input: Tensor, plain: Plain) -> Tensor:
        # torch.fx, whose proxies are no tensors, shall find the calls that the original makes.
        if not isinstance(input, Tensor) or not are_constant(module, self.constants):
            return plain(module, input)
        submodules = module._modules
        if self.activation_module is not None:
            activation = submodules[self.activation_module]
            # A hook has to see the call, or another activation was put in its place.
            if has_hooks(activation) or activation_name(activation) != self.activation:
                return plain(module, input)
        if not self.linears and not supports(input):
            return plain(module, input)
        outputs = [submodules[name](input) for name in self.linears] or [input]
        h: Tensor = self._product(outputs)
        for name in self.between:
            h = submodules[name](h)
        if self.down is None:
            return h
        if self.casts_to_weight:
            weight = getattr(submodules[self.down], "weight", None)
            if isinstance(weight, Tensor) and weight.dtype.is_floating_point:
                h = h.to(weight.dtype)
        h = submodules[self.down](h)
        for name in self.behind:
            h = submodules[name](h)
        return h

    def make_forward(self, generated: type, plain: Forward) -> Forward:
        forward = super().make_forward(generated, plain)

        def with_one_argument(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if len(args) + len(kwargs) != 1 and isinstance(self, generated):
                return plain(self, *args, **kwargs)  # which may take more, and do more then
            return forward(self, *args, **kwargs)

        return with_one_argument

    def _product(self, outputs: list[Tensor]) -> Tensor:
        if self.layout == "ungated":
            if supports(outputs[0]):
                return functional.activation(outputs[0], self.activation)
            return formula(self.activation)(outputs[0])
        if len(outputs) == 1:
            packed = outputs[0]
            if self.layout != "second" and supports(packed) and packed.shape[-1] % 2 == 0:
                return functional.gated_packed(
                    packed, self.activation, interleaved=self.layout == "interleaved"
                )
            outputs = list(halves(packed, self.layout))
        gate, up = outputs if self.layout != "second" else outputs[::-1]
        # First whether they are tensors: torch.fx's stand-ins must not be compared.
        if supports(gate) and supports(up) and _are_alike(gate, up):
            return functional.gated(gate, up, self.activation)
        return formula(self.activation)(gate) * up


def _are_alike(gate: Tensor, up: Tensor) -> bool:
    same_dtype = gate.dtype == up.dtype or (casts(gate) and casts(up))
    return gate.shape == up.shape and same_dtype


def halves(packed: Tensor, layout: str) -> Iterator[Tensor]:
    if layout == "interleaved":
        yield packed[..., ::2]
        yield packed[..., 1::2]
    else:
        first, second = packed.chunk(2, dim=-1)  # which torch.fx counts
        yield first
        yield second
