"""Rule for modules that compute an activation of memopt's, whatever their class is called."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memopt.nn
from memopt import functional
from memopt._class_patch import original_class
from memopt._convert.match import NOT_ALWAYS, READS_SWITCHES, Answer, Context, Reason
from memopt._convert.probe import (
    CALLERS_MODES,
    NOT_FINITE,
    Constants,
    are_constant,
    constants_of,
    forward_of,
    gradients,
    random_normal,
    simple_attributes,
    stand_in,
    takes_one_tensor,
)
from memopt._convert.rules.code_reads import reads_flags, sizes_in
from memopt._convert.supported import is_plain, supports
from memopt._convert.swap import ClassSwap, Plain, TorchSwap, swap_of
from memopt.functional.activation import SCALAR_NAMES, formula
from memopt.memory.storages import storage_keys
from memopt.nn.activation import MODULES

Function = Callable[[Tensor], Tensor]


# PyTorch saves the output of these, which the next layer saves as well. memopt saves their input,
# which is a gain only where a recipe computes the output again.
SAVE_THEIR_OUTPUT = frozenset(("relu", "sigmoid"))

# What is left for this reason may be no activation at all.
NO_ACTIVATION = "memopt has no op for what it computes"

# PyTorch's functions, which inside the calls of a converted model are memopt's.
_PYTORCHS: dict[str, Function] = {
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "silu": torch._C._nn.silu,
}

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_SHAPES: tuple[tuple[int, ...], ...] = (
    (), (4,), (1,), (3, 4), (4, 4), (1, 4), (2, 3, 4), (4, 4, 4), (1, 3, 4), (2, 4, 3, 4),
    (1, 3, 2, 4), (2, 3, 1, 2, 4),
)  # fmt: skip
_REQUIRED = frozenset((torch.float32, torch.bfloat16))


@dataclass(frozen=True)
class ActivationSwap(ClassSwap):
    """A module that is not torch.nn's and computes one of memopt.functional.ACTIVATIONS."""

    is_one_op = True
    name: str

    scalar: float | None = None
    """The number of an activation that takes one."""

    dtypes: frozenset[torch.dtype] = frozenset()
    """Dtypes of inputs for which it computes the activation in that dtype."""

    constants: Constants = ()
    """Attributes and their values. With other values the module computes something else."""

    def becomes(self) -> str:
        if self.name == "gelu_tanh":
            return "memopt.functional.gelu(approximate='tanh')"
        number = f"({SCALAR_NAMES[self.name]}={self.scalar:g})" if self.scalar else ""
        return f"memopt.functional.{self.name}{number}"

    def needs_recipes(self) -> bool:
        return self.name in SAVE_THEIR_OUTPUT

    def by_function(self, plain: Plain) -> Plain | None:
        function = _PYTORCHS.get(self.name)
        if function is None:
            return None

        def run(module: Any, input: Tensor) -> Tensor:
            if (
                is_plain(input)
                and input.dtype in self.dtypes
                and are_constant(module, self.constants)
            ):
                return function(input)
            return self.run(module, input, plain)

        return run

    def run(self, module: Any, input: Tensor, plain: Plain) -> Tensor:
        if (
            not supports(input)
            or input.dtype not in self.dtypes
            or not are_constant(module, self.constants)
        ):
            return plain(module, input)
        return functional.activation(input, self.name, self.scalar)


def activation_module(module: nn.Module, context: Context) -> Answer | None:
    """A module without tensors whose forward is compared with the activations."""
    if not _may_be_activation(module):
        return None
    found = context.once(_recognise, module)
    if not isinstance(found, _Found):
        return found
    return ActivationSwap(found.name, found.scalar, found.dtypes, constants_of(module))


def other_function(module: nn.Module, context: Context) -> Answer | None:
    """A module without tensors that no rule knows. It may be an activation; the report names it."""
    return Reason(NO_ACTIVATION) if _may_be_activation(module) else None


def activation_name(module: nn.Module, swap: Answer | None = None) -> str | None:
    """The name of the activation that `module` is known to compute, without a probe.

    Args:
        swap: what was decided for the module, if it is not swapped yet.
    """
    if "forward" in module.__dict__:  # whatever its class computes
        return None
    swap = swap_of(module) or swap
    if isinstance(swap, ActivationSwap):
        return swap.name if are_constant(module, swap.constants) else None
    kind = swap.base if isinstance(swap, TorchSwap) else original_class(type(module))
    return _name_of_kind(kind, module)


def _name_of_kind(kind: type[nn.Module], module: nn.Module) -> str | None:
    """The name for a module that computes what `kind` of torch.nn or memopt.nn does."""
    if kind in (nn.GELU, memopt.nn.GELU):
        return "gelu_tanh" if module.approximate == "tanh" else "gelu"
    return _KNOWN.get(kind)


# torch.nn's and memopt.nn's; of gelu the form is an attribute.
_KNOWN: dict[type[nn.Module], str] = {
    kind: name
    for name, make in MODULES.items()
    if (torchs := type(make())) is not nn.GELU
    for kind in (torchs, getattr(memopt.nn, torchs.__name__))
}


def _may_be_activation(module: nn.Module) -> bool:
    """Whether it has no tensors, submodules or state, and a forward of one argument."""
    return (
        not module._parameters
        and not module._buffers
        and not module._modules
        and simple_attributes(module) is not None
        and takes_one_tensor(module)
    )


@dataclass(frozen=True)
class _Found:
    name: str
    scalar: float | None
    dtypes: frozenset[torch.dtype]


def _recognise(module: nn.Module) -> _Found | Reason | None:
    """The activation that `module`, which may be one, computes; None for any other, and a reason if
    it is one at first sight.

    Its forward and gradient are compared with those of every activation in float32, in training and
    in evaluation mode, at values where the activations differ by far more than rounding; its
    forward also for inputs of zero to five dimensions whose sizes may be equal, far from zero, with
    NaN and infinities, of the sizes that its code has as numbers; and in each dtype. It is also
    called in autocast and without gradients. Code that reads switches (True or False) from globals
    or its class is left.
    """
    x = _values().requires_grad_()
    output = forward_of(stand_in(module, training=True), x)
    if output is None or output.shape != x.shape or output.dtype != x.dtype:
        return None
    if storage_keys(output) == storage_keys(x):  # its input, not a copy with leaky_relu's slope 1
        return None
    for name, takes_scalar in functional.ACTIVATIONS.items():
        scalar = _scalar(name, module) if takes_scalar else None
        if takes_scalar and scalar is None:
            continue
        reference = formula(name, scalar)
        if _agree(output, reference(x), x):
            if reads_flags(module):
                return Reason(READS_SWITCHES)
            dtypes = frozenset(d for d in _DTYPES if _agrees_in(module, reference, d))
            if not _is_throughout(module, x, reference) or not dtypes >= _REQUIRED:
                return Reason(NOT_ALWAYS)
            return _Found(name, scalar, dtypes)
    return None


def _scalar(name: str, module: nn.Module) -> float | None:
    """The scalar with which the module may compute the activation of this name: softcap's is its
    limit for large inputs, elu's the one below 0, leaky_relu's its slope there. None if it has
    no such limit or slope.
    """
    far = {"softcap": (1e9, 1e30), "elu": (-1e9, -1e30), "leaky_relu": (-1.0, -1.0)}[name]
    x = torch.tensor(far, dtype=torch.float64, device="cpu")
    y = forward_of(stand_in(module, training=True), x)
    if y is None or y.shape != x.shape or y[0] != y[1] or not 0 < y[0] / x[0].sign() < 1e6:
        return None
    return float(y[0].abs())


def _is_throughout(module: nn.Module, x: Tensor, reference: Function) -> bool:
    for training in (True, False):
        twin = stand_in(module, training=training)
        y = forward_of(twin, x)
        if y is None or not _agree(y, reference(x), x):
            return False
        ours, theirs = gradients(y, [x]), gradients(reference(x), [x])
        if ours is None or theirs is None or not _agree(ours[0], theirs[0], x):
            return False
        for mode in CALLERS_MODES:
            with mode():
                y = forward_of(twin, x)
            if y is None or y.dtype != x.dtype or not _agree(y, reference(x), x):
                return False
        for other in _inputs(sizes_in(module)):
            y = forward_of(twin, other)
            if y is None or y.shape != other.shape or not _agree_far(y, reference, other):
                return False
    return True


def _agrees_in(module: nn.Module, reference: Function, dtype: torch.dtype) -> bool:
    x = _values().to(dtype)
    y = forward_of(stand_in(module, training=True), x)
    if y is None or y.dtype != dtype:
        return False
    # A composition in a low precision rounds at each step, numbers as large as x.
    rounding = 4 * torch.finfo(dtype).eps + torch.finfo(torch.float32).eps
    exact = reference(x.double())
    size = (1 + x.double().abs()) * (1 + exact.abs() / (1 + x.double().abs()))
    if not bool(((y.double() - exact).abs() <= rounding * size).all()):
        return False
    far = torch.tensor([1.0, *NOT_FINITE], dtype=dtype, device="cpu")
    y = forward_of(stand_in(module, training=True), far)
    return y is not None and y.dtype == dtype and _agree_far(y, reference, far)


def _inputs(sizes: tuple[int, ...]) -> Iterator[Tensor]:
    """Inputs of all kinds of shapes, and with these sizes or as many elements."""
    for size in sizes:
        yield random_normal(size).mul(3)
        yield random_normal(size + 1, 2).mul(3)
        yield random_normal(size // 2 + 1, 2).mul(3)
    for shape in _SHAPES:
        x = random_normal(*shape).mul(3)
        yield x
        for number in (1e4, -1e4, 1e9, -1e9, *NOT_FINITE):
            far = x.clone()
            far.view(-1)[-1] = number
            yield far


def _values() -> Tensor:
    dense = random_normal(256).mul(3)
    # Beyond where implementations clip.
    far = torch.tensor(
        [0.0, 7.0, -7.0, 12.0, -12.0, 150.0, -150.0], dtype=torch.float32, device="cpu"
    )
    return torch.cat((dense, far))


def _agree(a: Tensor, b: Tensor, x: Tensor) -> bool:
    """Whether a and b differ by a few roundings of numbers as large as x and the result."""
    scale = 1 + x.detach().abs() + b.detach().abs()
    return bool(((a - b).detach().abs() <= 16 * torch.finfo(a.dtype).eps * scale).all())


def _agree_far(y: Tensor, reference: Function, x: Tensor) -> bool:
    """Whether they agree at any x. At infinities PyTorch's own kernels may return NaN."""
    exact = reference(x.double())
    scale = 1 + x.double().abs() + exact.abs()
    close = (y.double() - exact).abs() <= 16 * torch.finfo(y.dtype).eps * scale
    nan = y.isnan() & (exact.isnan() | x.isinf())
    return bool((nan | (~x.isnan() & ((y == exact) | (close & x.isfinite())))).all())
