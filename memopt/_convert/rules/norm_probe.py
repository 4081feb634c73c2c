"""Probes of modules that may compute a norm: see norm.py."""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memopt._convert.probe import (
    CALLERS_MODES,
    NOT_FINITE,
    forward_of,
    gradients,
    own_attributes,
    random_normal,
    stand_in,
    with_size,
)
from memopt._convert.rules.code_reads import sizes_in
from memopt._convert.rules.norm_swap import NormSwap, is_bare_norm
from memopt._function_code import plain_function

# The stand-in's eps. No module has it as its default, so that the right attribute is found.
_PROBE_EPS = 3e-4
# Where forward does not have its eps as a constant: defaults of functions that it calls.
_COMMON_EPS = (1e-5, 1e-6, 1e-8, 1e-12, 1e-3, 1e-7)
# Rows near a bound, in its size: only there is one constant told from another.
_NEAR_BOUND = (0.1, 1.0, 10.0)
# A number that stands out of a row of ones, as in trained models: what a clamp would cut off. Its
# square is a number of 16 bits.
_OUTLIER = 200.0

_ROW_SCALES = (1.0, 30.0, 1e-2, 1e-3, 1e-5)
_FAR_SCALES = (1e4, 1e-4, 1e6, 1.0, 1e12)
# Means of the rows, in their deviations.
_FAR_MEANS = (0.0, 10.0, 0.5, 100.0, -3.0)

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in module._parameters.items() if p is not None}


def size_attribute(module: nn.Module) -> int | None:
    """The number of columns that a module without parameters has as an attribute, at least 2:
    smaller numbers are axes, or sizes that its forward does not look at.
    """
    for value in own_attributes(module).values():
        if isinstance(value, tuple) and len(value) == 1 and type(value[0]) is int and value[0] > 1:
            return value[0]
    return None


def inner_norm(module: nn.Module) -> tuple[str, type[nn.Module]] | None:
    """The name and class of its only submodule, if a norm of torch.nn's without parameters."""
    for kind in (nn.LayerNorm, nn.RMSNorm):
        for name, child in module._modules.items():
            if len(module._modules) == 1 and is_bare_norm(child, kind):
                return name, kind
    return None


class NormProbe:
    """A stand-in for a module with `cols` columns, and what it computes."""

    def __init__(self, module: nn.Module, cols: int) -> None:
        self._module = module
        self._cols = cols
        self._inner = inner_norm(module)
        self._sizes = sizes_in(module)
        names = parameters_of(module)
        size = next((p.numel() for p in names.values()), size_attribute(module))
        self._resized = {} if size is None else with_size(module, size, cols)
        self._parameters = {
            name: random_normal(cols, seed=2 + i).reshape([cols if n > 1 else 1 for n in p.shape])
            for i, (name, p) in enumerate(names.items())
        }

    def candidates(self) -> Iterator[NormSwap]:
        """The formulas that agree in float32 for one input, in training and evaluation."""
        for channels_first, dim in ((False, 3), (True, 4), (True, 3)):
            outputs: dict[str | float, Tensor | None] = {}
            for found in self._formulas(channels_first, dim):
                x = self._input(found, torch.float32)
                eps = found.eps if isinstance(found.eps, str) else 0.0
                if eps not in outputs:
                    outputs[eps] = forward_of(self._twin(found, torch.float32), x)
                y = outputs[eps]
                if (
                    y is not None
                    and self._close(found, y, x)
                    and self._same_gradients(found, x)
                    and (not found.bounds or self._agrees_near_bound(found))
                ):
                    yield found

    def agrees_in(self, found: NormSwap, dtype: torch.dtype) -> bool:
        """Whether it computes `found` in this dtype of parameters and input."""
        return (dtype, dtype) in self.dtypes(found, (dtype,))

    def dims(self, found: NormSwap) -> frozenset[int]:
        """The numbers of dimensions of inputs for which it computes `found`."""
        return frozenset(
            dim
            for dim in range(2 if found.channels_first else 1, 6)
            if all(
                self._agrees(found, x, training)
                for x in self._inputs(found, dim)
                for training in (True, False)
            )
        )

    def dtypes(
        self, found: NormSwap, dtypes: tuple[torch.dtype, ...] = _DTYPES
    ) -> frozenset[tuple[torch.dtype, torch.dtype]]:
        """Dtypes of input and parameters with which it computes `found` in the input's dtype."""
        pairs = {(dtype, parameters) for dtype in dtypes for parameters in (dtype, torch.float32)}
        return frozenset(
            (dtype, parameters)
            for dtype, parameters in pairs
            if all(
                self._agrees(found, x, training, parameters)
                for x in self._inputs_in(found, dtype)
                for training in (True, False)
            )
        )

    def keeps_copy(self, found: NormSwap, dtype: torch.dtype) -> bool:
        """Whether its gradients are what they were if its input is written behind the call."""
        given = self._input(found, dtype).requires_grad_()
        all_gradients = []
        for is_written in (False, True):
            twin = self._twin(found, dtype)
            x = given.clone()
            y = forward_of(twin, x)
            if is_written:
                x.detach().zero_()
            own = [given, *parameters_of(twin).values()]
            all_gradients.append(None if y is None else gradients(y, own))
        before, after = all_gradients
        return before is not None and after is not None and all(map(torch.equal, before, after))

    def agrees_in_modes(self, found: NormSwap) -> bool:
        """Whether it computes `found` in float32 in all modes of the caller."""
        x = self._input(found, torch.float32)
        for mode in CALLERS_MODES:
            for training in (True, False):
                twin = self._twin(found, torch.float32, training)
                with mode():
                    y = forward_of(twin, x)
                if y is None or y.dtype != x.dtype or not self._close(found, y, x, twin):
                    return False
        return True

    def keeps_strides(self, found: NormSwap) -> bool:
        """Whether the output of a contiguous input with channels in front is contiguous."""
        if not found.channels_first:
            return True
        x = self._input(found, torch.float32).contiguous()
        y = forward_of(self._twin(found, torch.float32), x)
        return y is not None and y.is_contiguous()

    def _formulas(self, channels_first: bool, dim: int) -> Iterator[NormSwap]:
        """Norms that the module may compute for an input of `dim` dimensions."""
        for found in self._roles(channels_first):
            yield replace(found, dims=frozenset((dim,)), inner=self._inner)

    def _roles(self, channels_first: bool) -> Iterator[NormSwap]:
        names = list(self._parameters)
        roles: list[tuple[str | None, str | None]] = [(None, None)]
        if names:
            roles = [(w, next((n for n in names if n != w), None)) for w in names]
        for weight, bias in roles:
            for centred in (False, True) if weight is not None else (False,):
                for eps in ["eps"] if self._inner else _eps_candidates(self._module):
                    if bias is None:
                        yield NormSwap("rms_norm", weight, None, eps, centred, channels_first)
                    yield NormSwap("layer_norm", weight, bias, eps, centred, channels_first)
                    for bounds in ("length", "rms") if bias is None and not self._inner else ():
                        yield NormSwap(
                            "rms_norm", weight, None, eps, centred, channels_first, bounds
                        )

    def _twin(self, found: NormSwap, dtype: torch.dtype, training: bool = True) -> Any:
        eps = {found.eps: _PROBE_EPS} if isinstance(found.eps, str) else {}
        parameters = {name: p.to(dtype) for name, p in self._parameters.items()}
        if self._inner is None:
            return stand_in(
                self._module, parameters, attributes={**self._resized, **eps}, training=training
            )
        name, kind = self._inner
        inner: Any = kind(self._cols, elementwise_affine=False, device="cpu")
        inner.__dict__.update(eps)
        return stand_in(self._module, parameters, {name: inner}, self._resized, training=training)

    def _agrees(
        self,
        found: NormSwap,
        x: Tensor,
        training: bool,
        parameters: torch.dtype | None = None,
    ) -> bool:
        twin = self._twin(found, parameters or x.dtype, training)
        y = forward_of(twin, x)
        return y is not None and y.dtype == x.dtype and self._close(found, y, x, twin)

    def _agrees_near_bound(self, found: NormSwap) -> bool:
        bound = _PROBE_EPS if isinstance(found.eps, str) else found.eps
        scales = tuple(scale * bound for scale in _NEAR_BOUND)
        x = self._in_layout(found, self._rows((5, 2, self._cols), scales))
        return self._agrees(found, x.float(), training=True)

    def _close(self, found: NormSwap, y: Tensor, x: Tensor, twin: nn.Module | None = None) -> bool:
        """Whether `y` is the formula of `x`, to within rounding, and NaN where that is."""
        if y.shape != x.shape:
            return False
        twin = twin or self._twin(found, x.dtype)
        wide = {name: p.detach().double() for name, p in parameters_of(twin).items()}
        expected = self._formula(found, x.double(), wide)
        y, expected = y.detach().double(), expected.detach()
        dim = 1 if found.channels_first else -1
        # The sums are float32's at least; their error is relative to the largest number of a row,
        # and to the part of it that a mean far from zero leaves. bfloat16 may round at every step.
        steps = 3 if x.dtype in (torch.float32, torch.float64) else 16
        rounding = steps * torch.finfo(x.dtype).eps + 1e-5
        largest = expected.abs().nan_to_num(0.0).amax(dim, keepdim=True)
        if found.op == "layer_norm":
            exact = x.double()
            far = (exact.mean(dim, keepdim=True) / exact.std(dim, keepdim=True)).square()
            largest = largest * (1 + far.nan_to_num(0.0, posinf=0.0))
        error = (y - expected).abs()
        return bool(
            ((error <= rounding * largest) | (y.isnan() & expected.isnan()) | (y == expected)).all()
        )

    def _same_gradients(self, found: NormSwap, x: Tensor) -> bool:
        for training in (True, False):
            twin = self._twin(found, x.dtype, training)
            x = x.detach().requires_grad_()
            y = forward_of(twin, x)
            exact_x = x.detach().double().requires_grad_()
            own = parameters_of(twin)
            exact = {name: p.detach().double().requires_grad_() for name, p in own.items()}
            if y is None or not self._close(found, y, x, twin):
                return False
            ours = gradients(y, [x, *own.values()])
            theirs = gradients(self._formula(found, exact_x, exact), [exact_x, *exact.values()])
            if ours is None or theirs is None:
                return False
            for a, b in zip(ours, theirs, strict=True):
                if ((a - b).abs() > 1e-3 * b.abs() + 1e-4 * b.abs().max()).any():
                    return False
        return True

    def _formula(self, found: NormSwap, x: Tensor, parameters: dict[str, Tensor]) -> Tensor:
        eps = found.eps if isinstance(found.eps, float) else _PROBE_EPS
        rows = x.movedim(1, -1) if found.channels_first else x
        if found.bounds:
            eps = eps if found.bounds == "length" else eps * rows.shape[-1] ** 0.5
            y = F.normalize(rows, dim=-1, eps=eps) * rows.shape[-1] ** 0.5
        elif found.op == "layer_norm":
            y = F.layer_norm(rows, rows.shape[-1:], None, None, eps)
        else:
            y = F.rms_norm(rows, rows.shape[-1:], None, eps)
        if found.weight is not None:
            y = y * (parameters[found.weight].flatten() + int(found.zero_centered_weight))
        if found.bias is not None:
            y = y + parameters[found.bias].flatten()
        return torch.movedim(y, -1, 1) if found.channels_first else y

    def _input(self, found: NormSwap, dtype: torch.dtype) -> Tensor:
        """An input of the fewest dimensions that the module takes, three if that may be."""
        return self._in_layout(found, self._rows((5, 2, self._cols), _ROW_SCALES)).to(dtype)

    def _in_layout(self, found: NormSwap, rows: Tensor) -> Tensor:
        """Rows of three dimensions, where the norm looks for them."""
        if not found.channels_first:
            return rows
        x = rows.movedim(-1, 1)
        return x if 3 in found.dims else x[..., None]

    def _inputs(self, found: NormSwap, dim: int) -> Iterator[Tensor]:
        """Inputs of so many dimensions: sizes that differ and that equal the number of columns."""
        c = self._cols
        shapes: dict[int, list[tuple[int, ...]]] = {
            1: [(c,)],
            2: [(5, c), (c, c), (1, c)],
            3: [(2, 5, c), (2, c, c), (c, 5, c), (1, 5, c), (2, 1, c)],
            4: [(2, 5, 3, c), (2, c, 3, c), (2, 3, c, c), (2, c, c, c), (1, 2, 3, c)],
            5: [(2, 2, 5, 1, c), (2, c, 1, 2, c), (1, 2, 3, 1, c)],
        }
        if dim > 1:
            rows = {n for size in self._sizes for n in (size, size + 1, size // c + 1)}
            shapes[dim] += [(n, *[1] * (dim - 2), c) for n in sorted(rows)]
        for i, shape in enumerate(shapes[dim]):
            x = self._rows(shape, _ROW_SCALES if i % 2 else _FAR_SCALES)
            yield (x.movedim(-1, 1) if found.channels_first else x).float()
        for number in NOT_FINITE:
            x = self._rows(shapes[dim][0], _ROW_SCALES)
            x.reshape(-1, c)[-1, 1] = number
            yield (x.movedim(-1, 1) if found.channels_first else x).float()

    def _inputs_in(self, found: NormSwap, dtype: torch.dtype) -> Iterator[Tensor]:
        """`_input`, the same with numbers that are not finite in its last row, and rows with a
        number that stands out.
        """
        yield self._input(found, dtype)
        for number in (_OUTLIER, -_OUTLIER):
            rows = self._rows((5, 2, self._cols), (1.0,))
            for place, row in enumerate(rows.view(10, self._cols)):
                row[place % self._cols] = number  # some weights are small
            yield self._in_layout(found, rows).to(dtype)
        for number in NOT_FINITE:
            x = self._input(found, dtype)
            (x.movedim(1, -1) if found.channels_first else x)[-1, ..., 1] = number
            yield x

    def _rows(self, shape: tuple[int, ...], scales: tuple[float, ...]) -> Tensor:
        """Rows along the last dimension in float64, of different sizes and means."""
        count = max(1, torch.Size(shape[:-1]).numel())
        means = _FAR_MEANS if scales is _FAR_SCALES else (0.5,)
        rows = random_normal(count, shape[-1], dtype=torch.float64)
        rows += torch.tensor(means, dtype=torch.float64, device=rows.device).repeat(count)[
            :count, None
        ]
        rows *= torch.tensor(scales, dtype=torch.float64, device=rows.device).repeat(count)[
            :count, None
        ]
        return torch.reshape(rows, shape)


def _eps_candidates(module: nn.Module) -> list[str | float]:
    """Attributes and constants of forward that are small numbers."""

    def small(value: object) -> bool:
        return isinstance(value, float) and 0 < value < 0.1

    attributes = [name for name, value in own_attributes(module).items() if small(value)]
    code = getattr(plain_function(type(module).forward), "__code__", None)
    constants = code.co_consts if isinstance(code, types.CodeType) else ()
    found = [value for value in constants if small(value)]
    return [*attributes, *found, *(value for value in _COMMON_EPS if value not in found)]
