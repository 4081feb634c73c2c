"""Rule for gated units between linears.

    down(f(gate(x)) up(x))     three linears, or two where one gives gate and up in one tensor

Such a module has a forward of one argument; two or three submodules that hold matrices; at most one
that is an activation; and perhaps others (dropout, Identity, a norm), called between the product
and `down` or after `down`. The output and the gradients of a stand-in with small linears are
compared with the formula in float64; so is the output for inputs of one to four dimensions, far
from zero and with NaN, and in float32 and bfloat16.

The new forward calls the same submodules in the same order. So their hooks run, adapters and
quantised linears work, and random numbers are drawn in the same order. Only the product and the
activation in front of it become one op.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from memopt import functional
from memopt.convert.match import Answer, Context
from memopt.convert.probe import (
    Constants,
    are_constant,
    constants_of,
    forward_of,
    gradients,
    has_containers,
    random_normal,
    stand_in,
    takes_one_tensor,
)
from memopt.convert.rules.activation import ACTIVATIONS, activation_name
from memopt.convert.supported import casts, supports
from memopt.convert.swap import ClassSwap, Plain

# Of the stand-in's linears: input and output of the unit, and between.
_OUTSIDE, _INSIDE = 6, 10


@dataclass(frozen=True)
class GatedSwap(ClassSwap):
    """A gated unit: the names of the submodules that it calls."""

    linears: tuple[str, ...]
    """(gate, up) in the order of their calls, or the one that gives both."""

    down: str
    between: tuple[str, ...]
    behind: tuple[str, ...]
    """Called in this order on the product, and on the result."""

    activation: str
    activation_module: str | None
    """The submodule that computes it, if one does."""

    layout: str
    """Two linears: which is the gate, "first" or "second". One: which half is ("first" or
    "second"), or "interleaved": they alternate, gate first."""

    casts_to_weight: bool
    """The product is cast to the dtype of down's weight, as T5 does."""

    constants: Constants = ()
    """If an attribute has another value, the module computes something else."""

    def becomes(self) -> str:
        packed = "" if len(self.linears) == 2 else "_packed" * (self.layout != "second")
        return f"memopt.functional.gated{packed}({self.activation!r})"

    def run(self, module: Any, input: Tensor, plain: Plain) -> Tensor:
        if not are_constant(module, self.constants):
            return plain(module, input)
        submodules = module._modules
        if self.activation_module is not None:
            activation = submodules[self.activation_module]
            # A hook has to see the call, or another activation was put in its place.
            if _has_hooks(activation) or activation_name(activation) != self.activation:
                return plain(module, input)
        h: Tensor = self._product([submodules[name](input) for name in self.linears])
        for name in self.between:
            h = submodules[name](h)
        if self.casts_to_weight:
            weight = getattr(submodules[self.down], "weight", None)
            if isinstance(weight, Tensor) and weight.dtype.is_floating_point:
                h = h.to(weight.dtype)
        h = submodules[self.down](h)
        for name in self.behind:
            h = submodules[name](h)
        return h

    def _product(self, outputs: list[Tensor]) -> Tensor:
        if len(outputs) == 1:
            packed = outputs[0]
            if self.layout != "second" and supports(packed) and packed.shape[-1] % 2 == 0:
                return functional.gated_packed(
                    packed, self.activation, interleaved=self.layout == "interleaved"
                )
            outputs = list(_halves(packed, self.layout))
        gate, up = outputs if self.layout != "second" else outputs[::-1]
        same_dtype = gate.dtype == up.dtype or (casts(gate) and casts(up))
        if supports(gate) and supports(up) and gate.shape == up.shape and same_dtype:
            return functional.gated(gate, up, self.activation)
        return ACTIVATIONS[self.activation][1](gate) * up


def gated_unit(module: nn.Module, context: Context) -> Answer | None:
    """A module with two or three linears that is compared with the formula."""
    if not _may_be_gated(module):
        return None
    _, activations, _ = _sorted(module)
    if any(child in context.skipped for child in activations.values()):
        return None
    names = tuple(activation_name(child, context.answer(child)) for child in activations.values())
    return context.once(lambda unit: _recognise(unit, names), module, names)


def _may_be_gated(module: nn.Module) -> bool:
    """Whether it has submodules and a forward that a gated unit might have."""
    linears, activations, _ = _sorted(module)
    return (
        len(linears) in (2, 3)
        and len(activations) <= 1
        and not any(p is not None for p in module._parameters.values())
        and not module._buffers
        and not has_containers(module)
        and takes_one_tensor(module)
    )


def _recognise(module: nn.Module, named: tuple[str | None, ...]) -> GatedSwap | None:
    """What the module, which may be one, calls; None if it is no gated unit.

    Args:
        named: the activation that each submodule computes that may be one.
    """
    if None in named:
        return None
    linears, activations, _ = _sorted(module)
    names = [name for name in ACTIVATIONS if not named or name in named]
    for down in reversed(linears):
        others = [name for name in linears if name != down]
        first = _Probe(module, others, down, training=True)
        if not first.ran:
            continue
        second = _Probe(module, others, down, training=False)
        for name, layout in itertools.product(names, _layouts(len(others))):
            found = replace(
                first.description,
                activation=name,
                activation_module=next(iter(activations), None),
                layout=layout,
            )
            if first.matches(found) and second.matches(found):
                if not all(p.agrees(found, x) for p in (first, second) for x in _inputs()):
                    return None
                if not _agrees_in_every_dtype(module, others, found):
                    return None
                narrow = _Probe(module, others, down, training=True, down_dtype=torch.float32)
                return replace(found, casts_to_weight=narrow.ran, constants=constants_of(module))
    return None


def _inputs() -> Iterator[Tensor]:
    """Of one to four dimensions whose sizes may be equal, far from zero, and with NaN."""
    size = _OUTSIDE
    for shape in ((), (size,), (2, 3), (2, size), (size, size), (2, size, 3), (2, 3, size)):
        x = random_normal(*shape, size, dtype=torch.float64)
        yield x
        for number in (1e4, -1e6, float("nan")):
            far = x.clone()
            far.view(-1)[-1] = number
            yield far


def _agrees_in_every_dtype(module: nn.Module, linears: list[str], found: GatedSwap) -> bool:
    for dtype in (torch.float32, torch.bfloat16):
        probe = _Probe(module, linears, found.down, training=True, dtype=dtype)
        if not probe.agrees(found, random_normal(5, _OUTSIDE, dtype=dtype)):
            return False
    return True


def _layouts(linears: int) -> Sequence[str]:
    return ("first", "second") if linears == 2 else ("first", "second", "interleaved")


def _halves(packed: Tensor, layout: str) -> Iterator[Tensor]:
    if layout == "interleaved":
        yield packed[..., ::2]
        yield packed[..., 1::2]
    else:
        yield from packed.chunk(2, dim=-1)


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def _sorted(module: nn.Module) -> tuple[list[str], dict[str, nn.Module], list[str]]:
    """Names of the submodules that hold matrices, the activation modules, names of the others."""
    linears, activations, others = [], {}, []
    for name, child in module._modules.items():
        if child is None:
            continue
        if hasattr(child, "in_features") or any(p.dim() >= 2 for p in child.parameters()):
            linears.append(name)
        elif _has_no_tensors(child) and not isinstance(child, (nn.Dropout, nn.Identity)):
            activations[name] = child
        else:
            others.append(name)
    return linears, activations, others


def _has_no_tensors(module: nn.Module) -> bool:
    return next(module.parameters(), None) is None and next(module.buffers(), None) is None


class _Probe:
    """A stand-in with small linears, and what its forward called and returned."""

    def __init__(
        self,
        module: nn.Module,
        linears: list[str],
        down: str,
        training: bool,
        dtype: torch.dtype = torch.float64,
        down_dtype: torch.dtype | None = None,
    ) -> None:
        self.calls: list[str] = []
        _, _, others = _sorted(module)
        inside = _INSIDE * (3 - len(linears))
        self._modules: dict[str, nn.Module] = {
            name: _Linear(self.calls, name, _OUTSIDE, inside, dtype) for name in linears
        }
        self._modules[down] = _Linear(self.calls, down, _INSIDE, _OUTSIDE, down_dtype or dtype)
        for i, name in enumerate(others):
            self._modules[name] = _Affine(self.calls, name, i)
        activations = {
            name: stand_in(child, training=training)
            for name, child in module._modules.items()
            if child is not None and name not in self._modules
        }
        self._twin = stand_in(
            module, submodules={**activations, **self._modules}, training=training
        )
        self._x = random_normal(5, _OUTSIDE, dtype=dtype).mul(2).requires_grad_()
        self._y = forward_of(self._twin, self._x)
        calls = list(self.calls)
        at = calls.index(down) if down in calls else 0
        called = tuple(name for name in calls[:at] if name in linears)
        self.ran = (
            self._y is not None
            and self._y.shape == self._x.shape
            and len(set(calls)) == len(calls)
            and sorted(called) == sorted(linears)
        )
        self.description = GatedSwap(
            linears=called,
            down=down,
            between=tuple(name for name in calls[:at] if name in others),
            behind=tuple(calls[at + 1 :]),
            activation="",
            activation_module=None,
            layout="",
            casts_to_weight=False,
        )

    def matches(self, found: GatedSwap) -> bool:
        """Whether output and gradients are those of `found`."""
        if not self.ran or self._y is None:
            return False
        calls = (self.description.linears, self.description.between, self.description.behind)
        if calls != (found.linears, found.between, found.behind):
            return False
        expected = self._formula(found, self._x)
        inputs = [self._x, *(p for m in self._modules.values() for p in m.parameters())]
        ours, theirs = gradients(self._y, inputs), gradients(expected, inputs)
        if ours is None or theirs is None:
            return False
        return all(
            torch.allclose(a, b, rtol=1e-7, atol=1e-7 * float(b.detach().abs().max()))
            for a, b in zip([self._y, *ours], [expected, *theirs], strict=True)
        )

    def agrees(self, found: GatedSwap, x: Tensor) -> bool:
        """Whether the output for `x`, which may have NaN, is that of `found`."""
        y, expected = forward_of(self._twin, x), self._formula(found, x)
        if y is None or y.shape != expected.shape or y.dtype != expected.dtype:
            return False
        # A low precision rounds at each step, numbers as large as the largest of the product.
        largest = expected.detach().abs().nan_to_num(0.0).amax(-1, keepdim=True)
        equal = (y - expected).detach().abs() <= 16 * torch.finfo(x.dtype).eps * largest
        return bool((equal | (y.isnan() & expected.isnan())).all())

    def _formula(self, found: GatedSwap, x: Tensor) -> Tensor:
        outputs = [self._modules[name](x) for name in found.linears]
        gate, up = outputs if len(outputs) == 2 else _halves(outputs[0], found.layout)
        if found.layout == "second":
            gate, up = up, gate
        h = ACTIVATIONS[found.activation][1](gate) * up
        for name in (*found.between, found.down, *found.behind):
            h = self._modules[name](h)
        return h


class _Linear(nn.Linear):
    """Notes its name when it is called."""

    def __init__(
        self,
        calls: list[str],
        name: str,
        inputs: int,
        outputs: int,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__(inputs, outputs, device="cpu", dtype=dtype)
        self._calls, self._name = calls, name

    def forward(self, input: Tensor) -> Tensor:
        self._calls.append(self._name)
        return super().forward(input)


class _Affine(nn.Module):
    """Stands for a dropout or the like: another function of each element, so that the order of
    several shows.
    """

    def __init__(self, calls: list[str], name: str, number: int) -> None:
        super().__init__()
        self._calls, self._name = calls, name
        self._scale, self._shift = 1.5 + number, 0.25 * (number + 1)

    def forward(self, input: Tensor) -> Tensor:
        self._calls.append(self._name)
        return input * self._scale + self._shift
