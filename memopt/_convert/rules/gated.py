"""Rule for gated units, with and without their linears.

    down(f(gate(x)) up(x))     three linears, or two where one gives gate and up in one tensor
    f(gate(x)) up(x)           the same without the last one; or x itself is gate and up
    down(f(up(x))), f(up(x))   where f is no module, which would be swapped alone

Such a module has a forward of one tensor; at most three submodules that hold matrices; at most one
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
from dataclasses import replace

import torch
from torch import Tensor, nn

from memopt import functional
from memopt._convert.match import NOT_ALWAYS, READS_SWITCHES, Answer, Context, Reason
from memopt._convert.probe import (
    CALLERS_MODES,
    NOT_FINITE,
    constants_of,
    forward_of,
    gradients,
    has_containers,
    random_normal,
    simple_attributes,
    stand_in,
    takes_one_tensor,
)
from memopt._convert.rules.activation import SAVE_THEIR_OUTPUT, activation_name
from memopt._convert.rules.code_reads import reads_flags, sizes_in
from memopt._convert.rules.gated_swap import GatedSwap, halves
from memopt.functional.activation import formula

# Of the stand-in's linears: input and output of the unit, and between.
_OUTSIDE, _INSIDE = 6, 10


def gated_unit(module: nn.Module, context: Context) -> Answer | None:
    """A module with at most three linears that is compared with the formulas."""
    if not _may_be_gated(module):
        return None
    _, activations, _ = _sorted(module)
    if any(child in context.skipped for child in activations.values()):
        return None
    names = tuple(activation_name(child, context.answer(child)) for child in activations.values())
    return context.once(lambda unit: _recognise(unit, names), module, names)


def _may_be_gated(module: nn.Module) -> bool:
    """Whether it has a forward that a gated unit might have."""
    linears, activations, _ = _sorted(module)
    return (
        len(linears) <= 3
        and len(activations) <= 1
        and not any(p is not None for p in module._parameters.values())
        and not module._buffers
        and not has_containers(module)
        and (bool(linears) or simple_attributes(module) is not None)
        and takes_one_tensor(module, or_more=True)
    )


def _recognise(module: nn.Module, named: tuple[str | None, ...]) -> GatedSwap | Reason | None:
    """The swap for a module that may be a gated unit; None if it is not one, and a reason if it is
    one at first sight.

    Args:
        named: the activation that each submodule computes that may be one.
    """
    if None in named:
        return None
    linears, activations, _ = _sorted(module)
    for down in (*reversed(linears), None):
        others = [name for name in linears if name != down]
        for ungated in (False, True):
            if len(others) not in _LINEARS[ungated] or (ungated and named):
                continue
            if down is not None and not others:
                continue
            found = _recognise_linears(module, others, down, ungated, named)
            if isinstance(found, Reason):
                return found
            if found is not None:
                one = next(iter(activations), None)
                return replace(found, activation_module=one, constants=constants_of(module))
    return None


# How many linears, beside `down`, a gated unit has, and one that is not gated.
_LINEARS = {False: (0, 1, 2), True: (1,)}


def _recognise_linears(
    module: nn.Module,
    linears: list[str],
    down: str | None,
    ungated: bool,
    named: tuple[str | None, ...],
) -> GatedSwap | Reason | None:
    first = _Probe(module, linears, down, ungated, training=True)
    if not first.ran:
        return None
    second = _Probe(module, linears, down, ungated, training=False)
    names = [name for name, takes_scalar in functional.ACTIVATIONS.items() if not takes_scalar]
    for name, layout in itertools.product(names, _layouts(len(linears), ungated)):
        if (named and name not in named) or (ungated and name in SAVE_THEIR_OUTPUT):
            continue
        found = replace(first.description, activation=name, layout=layout)
        if first.matches(found) and second.matches(found):
            if reads_flags(module):
                return Reason(READS_SWITCHES)
            inputs = list(_inputs(sizes_in(module)))
            if not (
                all(p.agrees_in_modes(found, inputs) for p in (first, second))
                and _agrees_in_every_dtype(module, linears, found)
            ):
                return Reason(NOT_ALWAYS)
            narrow = _Probe(module, linears, down, ungated, training=True, down_dtype=torch.float32)
            return replace(found, casts_to_weight=down is not None and narrow.ran)
    return None


def _layouts(linears: int, ungated: bool) -> Sequence[str]:
    if ungated:
        return ("ungated",)
    return ("first", "second") if linears == 2 else ("first", "second", "interleaved")


def _inputs(sizes: tuple[int, ...]) -> Iterator[Tensor]:
    """Inputs of one to four dimensions whose sizes may be equal, far from zero, and with NaN; and
    with these sizes, or as many elements.
    """
    size = _OUTSIDE
    for rows in {n for number in sizes for n in (number, number + 1, number // size + 1)}:
        yield random_normal(rows, size, dtype=torch.float64)
    shapes: list[tuple[int, ...]] = [(), (size,), (2, 3), (2, size), (size, size), (2, size, 3)]
    for shape in (*shapes, (2, 3, size), (1,), (1, 3)):
        x = random_normal(*shape, size, dtype=torch.float64)
        yield x
        for number in (1e4, -1e6, float("nan")):
            far = x.clone()
            far.view(-1)[-1] = number
            yield far


def _agrees_in_every_dtype(module: nn.Module, linears: list[str], found: GatedSwap) -> bool:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        ungated = found.layout == "ungated"
        probe = _Probe(module, linears, found.down, ungated, training=True, dtype=dtype)
        x = random_normal(5, _OUTSIDE, dtype=dtype)
        if not probe.agrees(found, x):
            return False
        for number in NOT_FINITE:
            far = x.clone()
            far[-1, 1] = number
            if not probe.is_finite_as(found, far):
                return False
    return True


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
        down: str | None,
        ungated: bool,
        training: bool,
        dtype: torch.dtype = torch.float64,
        down_dtype: torch.dtype | None = None,
    ) -> None:
        self.calls: list[str] = []
        _, _, others = _sorted(module)
        inside = _INSIDE if ungated or len(linears) == 2 else 2 * _INSIDE
        self._modules: dict[str, nn.Module] = {
            name: _Linear(self.calls, name, _OUTSIDE, inside, dtype) for name in linears
        }
        if down is not None:
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
        at = calls.index(down) if down in calls else len(calls)
        outside = _OUTSIDE if down is not None else _INSIDE if linears else _OUTSIDE // 2
        called = tuple(name for name in calls[:at] if name in linears)
        self.ran = (
            self._y is not None
            and self._y.shape == (*self._x.shape[:-1], outside)
            and (down is None or down in calls)
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

    def is_finite_as(self, found: GatedSwap, x: Tensor) -> bool:
        """Whether the output for `x` is finite where that of `found` is: which of NaN and infinity
        the others are is a matter of order.
        """
        y, expected = forward_of(self._twin, x), self._formula(found, x)
        return y is not None and torch.equal(y.isfinite(), expected.isfinite())

    def agrees_in_modes(self, found: GatedSwap, inputs: Sequence[Tensor]) -> bool:
        """Whether it agrees for all inputs, and for the first two in all modes of the caller."""
        for mode in CALLERS_MODES:
            with mode():
                if not all(self.agrees(found, x) for x in inputs[:2]):
                    return False
        return all(self.agrees(found, x) for x in inputs)

    def _formula(self, found: GatedSwap, x: Tensor) -> Tensor:
        outputs = [self._modules[name](x) for name in found.linears] or [x]
        activation = formula(found.activation)
        if found.layout == "ungated":
            h = activation(outputs[0])
        else:
            gate, up = outputs if len(outputs) == 2 else halves(outputs[0], found.layout)
            h = activation(up) * gate if found.layout == "second" else activation(gate) * up
        down = () if found.down is None else (found.down,)
        for name in (*found.between, *down, *found.behind):
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
