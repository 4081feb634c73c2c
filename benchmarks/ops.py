"""Each op against PyTorch's: forward, backward, and both. `python -m benchmarks.ops OP [OPTIONS]`.

An OP is a family: its cases, which may have GELU's two forms, and the speed-ups that are aimed at.
How a case's variants are made: op.py. Those with a Linear: op_linears.py. A new activation has its
benchmark from its formula (memopt/functional/activation.py).
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import memopt
from benchmarks import cli, peers, runner
from benchmarks.harness import Case, Variant
from benchmarks.inputs import EPS, affine_parameters
from benchmarks.op import Op, again, build, ideal_bytes, moved
from benchmarks.op_linears import gelu_linear, layer_norm_linear, mlp_gpt2, mlp_llama
from memopt.functional.activation import FORMULAS, formula

ours = memopt.functional
aten = torch.ops.aten
private = torch.ops.memopt

P = 0.1
"""How much dropout drops."""

GELU = {None: None, "none": "gelu", "tanh": "gelu_tanh"}
ALL_THREE = [True, True, True]

CONVOLUTIONAL = ("relu6", "leaky_relu", "elu", "hardsigmoid", "hardswish", "mish")
"""The activations of convolutional networks alone, a family of their own."""

# The scalar that activations with one are timed with.
SCALARS: dict[str, float] = {"softcap": 30.0, "leaky_relu": 0.01, "elu": 1.0}


def weight_alone(cols: int, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    return affine_parameters(cols, dtype, device)[:1]


def layer_norm(form: str | None = None) -> Op:
    """LayerNorm with its statistics and all three gradients; behind it GELU of that form, if any:
    then PyTorch's forward keeps what is between, for backward.
    """
    named = {"norm": "layer_norm", "activation": GELU[form]}
    norm, norm_backward = aten.native_layer_norm, aten.native_layer_norm_backward

    def eager(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        z = F.layer_norm(x, weight.shape, weight, bias, EPS)
        return z if form is None else F.gelu(z, approximate=form)

    def fused(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        if form is None:
            return ours.layer_norm(x, weight.shape, weight, bias, EPS)
        return ours.layer_norm_gelu(x, weight.shape, weight, bias, EPS, approximate=form)

    def forward(x: Tensor, weight: Tensor, bias: Tensor) -> Sequence[Variant]:
        def by_aten() -> object:
            z, mean, rstd = norm(x, shape, weight, bias, EPS)
            return z if form is None else aten.gelu(z, approximate=form), z, mean, rstd

        shape = list(weight.shape)
        by_ours = functools.partial(private._norm_forward, x, None, 1, weight, bias, EPS, **named)
        return Variant("aten", by_aten), Variant("memopt", by_ours)

    def backward(grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> Sequence[Variant]:
        def by_aten() -> object:
            dz = grad if form is None else aten.gelu_backward(grad, z, approximate=form)
            return norm_backward(dz, x, shape, *of_aten, weight, bias, ALL_THREE)

        shape = list(weight.shape)
        z, *of_aten = norm(x, shape, weight, bias, EPS)
        _, _, *saved = private._norm_forward(x, None, 1, weight, bias, EPS, **named)
        rest = (None, x, 1, *saved, weight, bias, ALL_THREE)
        return Variant("aten", by_aten), *again(private._norm_backward, grad, *rest, **named)

    return Op(
        eager,
        fused,
        moved(2, 3),  # x in, y out; dy and x in, dx out
        statistics=2,
        parameters=affine_parameters,
        forward=forward,
        backward=backward,
        peers=peers.layer_norms if form is None else lambda names: {},
    )


def rms_norm() -> Op:
    """PyTorch's op saves and computes differently on each device (on the CPU it is made of single
    ops), so all directions go through autograd but for the backward that writes the output again.
    """

    def backward(grad: Tensor, x: Tensor, weight: Tensor) -> Sequence[Variant]:
        *_, rstd = private._norm_forward(x, None, 1, weight, None, EPS, norm="rms_norm")
        rest = (None, x, 1, None, rstd, weight, None, [True, True, False])
        return again(private._norm_backward, grad, *rest, norm="rms_norm")[1:]

    return Op(
        lambda x, weight: F.rms_norm(x, weight.shape, weight, EPS),
        lambda x, weight: ours.rms_norm(x, weight.shape, weight, EPS),
        moved(2, 3),
        statistics=1,
        parameters=weight_alone,
        with_graph=True,
        backward=backward,
        peers=peers.rms_norms,
    )


def added(norm: str, p: float | None = None) -> Op:
    """An addition, and dropout in front of it if there is p, then the norm, as in a pre-LN block:
    both outputs are used, so both have a gradient.
    """
    name = f"add_{norm}" if p is None else f"dropout_add_{norm}"
    eager_norm, fused = getattr(F, norm), getattr(ours, name)
    drops = () if p is None else (p,)

    def eager(x: Tensor, residual: Tensor, *affine: Tensor) -> tuple[Tensor, Tensor]:
        total = (x if p is None else F.dropout(x, p)) + residual
        return eager_norm(total, affine[0].shape, *affine, EPS), total

    return Op(
        eager,
        lambda x, residual, *affine: fused(x, residual, *drops, affine[0].shape, *affine, EPS),
        # x and residual in, output and sum out; two gradients and the sum in, one gradient out, or
        # two. The statistics are negligible.
        moved(4, 4 if p is None else 5),
        widths=(1, 1),
        outputs=(1, 1),
        parameters=affine_parameters if norm == "layer_norm" else weight_alone,
        with_graph=True,
    )


def activation(name: str) -> Op:
    """An activation as models without memopt write it; for backward ATen's op, if there is one."""
    scalar = SCALARS.get(name)
    eager = formula(name, scalar)
    named = {"activation": name, "activation_scalar": scalar}
    of_aten = {
        "gelu": lambda grad, x: aten.gelu_backward(grad, x, approximate="none"),
        "gelu_tanh": lambda grad, x: aten.gelu_backward(grad, x, approximate="tanh"),
        "silu": aten.silu_backward,
        "relu": lambda grad, x: aten.threshold_backward(grad, x, 0),
        "relu6": lambda grad, x: aten.hardtanh_backward(grad, x, 0, 6),
        "leaky_relu": lambda grad, x: aten.leaky_relu_backward(grad, x, scalar, False),
        "elu": lambda grad, x: aten.elu_backward(grad, scalar, 1, 1, False, x),
        "hardsigmoid": aten.hardsigmoid_backward,
        "hardswish": aten.hardswish_backward,
        "mish": aten.mish_backward,
    }.get(name)

    def backward(grad: Tensor, x: Tensor) -> Sequence[Variant]:
        by_aten = [] if of_aten is None else [Variant("aten", lambda: of_aten(grad, x))]
        return [*by_aten, *again(private._activation_backward, grad, x, **named)]

    fused = functools.partial(ours.activation, **named)
    return Op(eager, fused, moved(2, 3), backward=backward)


def gelu(form: str) -> Op:
    return activation(str(GELU[form]))


def gated(name: str, up_is: str = "apart") -> Op:
    """A gated unit of two tensors, or of one that holds both in `halves` or `interleaved`.

    PyTorch's backward is autograd's run of its graph.
    """
    activate, interleaved = FORMULAS[name], up_is == "interleaved"
    packs = up_is != "apart"

    def eager(*tensors: Tensor) -> Tensor:
        gate, up = tensors if not packs else parts(*tensors)
        return activate(gate) * up

    def parts(x: Tensor) -> Sequence[Tensor]:
        return (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)

    def backward(grad: Tensor, *tensors: Tensor) -> Sequence[Variant]:
        if packs:
            op, options = private._gated_packed_backward, {"interleaved": interleaved}
        else:
            op, options = private._gated_backward, {"output_mask": (True, True)}
        return again(op, grad, *tensors, activation=name, **options)

    unit = {"silu": "swiglu", "gelu_tanh": "geglu"}[name]
    options = {"approximate": "tanh"} if unit == "geglu" else {}
    options |= {"interleaved": True} if interleaved else {}
    return Op(
        eager,
        functools.partial(getattr(ours, f"{unit}_packed" if packs else unit), **options),
        moved(3, 5),  # gate and up in, y out; dy, gate and up in, their gradients out
        widths=(2,) if packs else (1, 1),
        backward=backward,
        peers=lambda names: {} if packs else peers.gated_units(names, unit),
        peers_write=True,
    )


def dropout() -> Op:
    """ATen's CPU generator draws one number after the other on one thread and its backward reads a
    mask; memopt computes the mask twice and reads none.
    """

    def forward(x: Tensor) -> Sequence[Variant]:
        return (
            Variant("aten", lambda: aten.native_dropout(x, P, True)),
            Variant("memopt", lambda: private._dropout_forward(x, P)),
        )

    def backward(grad: Tensor, x: Tensor) -> Sequence[Variant]:
        _, mask = aten.native_dropout(x, P, True)
        _, state = private._dropout_forward(x, P)
        by_aten, scale = aten.native_dropout_backward, 1 / (1 - P)
        return (
            Variant("aten", lambda: by_aten(grad, mask, scale), extra_bytes=mask.nbytes),
            Variant("memopt", lambda: private._dropout_backward(grad, state, P)),
        )

    return Op(
        lambda x: F.dropout(x, P),
        lambda x: ours.dropout(x, P),
        moved(2, 2),
        forward=forward,
        backward=backward,
    )


def gelu_dropout() -> Op:
    return Op(
        lambda x: F.dropout(F.gelu(x), P),
        lambda x: ours.gelu_dropout(x, P),
        moved(2, 3),
        with_graph=True,
    )


class Family(NamedTuple):
    goals: Mapping[str, float]
    """The ratio to PyTorch that is aimed at on the CPU, by direction."""
    cases: Mapping[str, Callable[..., Op]]
    has_forms: bool = False
    """Whether a case is made for a form of GELU."""
    directions: tuple[str, ...] = ()
    """The only ones that there are; empty: all."""


BOTH = "forward+backward"
FAMILIES: dict[str, Family] = {
    "layer_norm": Family({"forward": 1.0, "backward": 1.3}, {"layer_norm": layer_norm}),
    "layer_norm_gelu": Family({BOTH: 1.6}, {"layer_norm_gelu": layer_norm}, has_forms=True),
    "gelu": Family(dict.fromkeys(cli.DIRECTIONS, 1.2), {"gelu": gelu}, has_forms=True),
    "rms_norm": Family({"forward": 1.0, "backward": 1.3, BOTH: 1.3}, {"rms_norm": rms_norm}),
    "add_norm": Family(
        {BOTH: 1.3},
        {f"add_{norm}": functools.partial(added, norm) for norm in ("layer_norm", "rms_norm")},
    ),
    "activation": Family(
        dict.fromkeys(cli.DIRECTIONS, 1.0),
        {
            name: functools.partial(activation, name)
            for name in FORMULAS
            if not name.startswith("gelu") and name not in CONVOLUTIONAL
        },
    ),
    "conv_activation": Family(
        dict.fromkeys(cli.DIRECTIONS, 1.0),
        {name: functools.partial(activation, name) for name in CONVOLUTIONAL},
    ),
    "gated": Family(
        dict.fromkeys(cli.DIRECTIONS, 1.3),
        {
            "swiglu": functools.partial(gated, "silu"),
            "geglu": functools.partial(gated, "gelu_tanh"),
            "swiglu_halves": functools.partial(gated, "silu", "halves"),
            "swiglu_interleaved": functools.partial(gated, "silu", "interleaved"),
        },
    ),
    "dropout": Family(
        {"forward": 1.5, BOTH: 1.5},
        {
            "dropout": dropout,
            "gelu_dropout": gelu_dropout,
            "dropout_add_layer_norm": functools.partial(added, "layer_norm", P),
        },
    ),
    "layer_norm_linear": Family({BOTH: 1.0}, {"layer_norm_linear": layer_norm_linear}),
    "gelu_linear": Family({BOTH: 1.0}, {"gelu_linear": gelu_linear}, has_forms=True),
    "mlp": Family({BOTH: 1.0}, {"mlp_gpt2": mlp_gpt2, "mlp_llama": mlp_llama}, directions=(BOTH,)),
}


def make_cases(family: Family, args: argparse.Namespace) -> Iterator[Case]:
    args.direction = family.directions or args.direction
    for name, make in family.cases.items():
        for form in args.approximate if family.has_forms else (None,):
            op = make(form) if family.has_forms else make()
            of_op = (functools.partial(each, op) for each in (build, ideal_bytes))
            yield from runner.all_cases(name, *of_op, args, form)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures a family; returns 0, 1 if a case failed, 2 for a usage error."""
    name, *options = [*(sys.argv[1:] if argv is None else argv), ""]
    if name not in FAMILIES:
        print(
            f"benchmarks.ops: must be one of {', '.join(FAMILIES)}, got {name!r}", file=sys.stderr
        )
        return 2
    family = FAMILIES[name]
    return runner.main(name, functools.partial(make_cases, family), family.goals, options[:-1])


if __name__ == "__main__":
    sys.exit(main())
