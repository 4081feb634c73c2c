"""Proves: an argument of a wrong type makes every function of memopt.functional, and every module's
constructor and call, raise a TypeError that names the function that was called, the argument, what
it must be and what it is.
"""

from __future__ import annotations

import inspect
import typing
from typing import Any

import pytest
import torch

import memopt.functional as F
import memopt.nn as M

FUNCTIONS = [name for name in F.__all__ if callable(getattr(F, name))]


def right_arguments(name: str) -> dict[str, Any]:
    """That run."""
    x, square, vector = torch.ones(2, 4), torch.ones(4, 4), torch.ones(4)
    if name == "gated_packed_linear":
        square = torch.ones(4, 2)
    if name == "instance_norm":
        x = torch.ones(2, 4, 3)
    of_loss = "cross_entropy" in name or "log_probs" in name
    known = {
        "input": x,
        "target": torch.tensor([0, 1]),
        "linear_weight": square,
        "residual": x,
        "gate": x,
        "up": x,
        "weight": square if "linear" in name and not of_loss else vector,
        "up_weight": square,
        "down_weight": square,
        "normalized_shape": (4,),
        "num_groups": 2,
        "running_mean": torch.zeros(4),
        "running_var": vector,
        "activation": "relu" if name != "mlp" else "gelu",
        "cap": 2.0,
        "p": 0.5,
        "norm_weight": vector,
        "norm_bias": vector,
    }
    parameters = inspect.signature(getattr(F, name)).parameters.values()
    return {
        each.name: known.get(each.name)
        for each in parameters
        if each.default is each.empty or each.name in ("weight", "input")
    }


CASES = [
    (name, argument)
    for name in FUNCTIONS
    for argument, hint in typing.get_type_hints(inspect.unwrap(getattr(F, name))).items()
    if argument != "return"
    and bool not in (hint, *typing.get_args(hint))
    # Not read without running statistics.
    and (name, argument) != ("instance_norm", "momentum")
]


class Odd:
    """Of no type that any function takes."""


@pytest.mark.parametrize(("name", "argument"), CASES)
def test_the_function_and_the_argument_are_named(name: str, argument: str) -> None:
    arguments = right_arguments(name)
    getattr(F, name)(**arguments)
    with pytest.raises(TypeError, match=rf"^{name}: {argument} must be an? .*, got Odd$"):
        getattr(F, name)(**{**arguments, argument: Odd()})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: F.gelu("x"), "gelu: input must be a Tensor, got str"),
        (lambda x: F.gelu(None), "gelu: input must be a Tensor, got None"),
        (lambda x: F.dropout(x, p="0.1"), "dropout: p must be a float, got str"),
        (lambda x: F.softcap(x, "2"), "softcap: cap must be a float, got str"),
        (
            lambda x: F.layer_norm(x, 4),
            "layer_norm: normalized_shape must be a sequence of ints, got int",
        ),
        (
            lambda x: F.layer_norm_linear(x, None, None, [x, "w"]),
            "layer_norm_linear: weight must be a Tensor or a sequence of Tensors, got list of "
            "Tensor, str",
        ),
        (lambda x: F.swiglu(x, 3), "swiglu: up must be a Tensor, got int"),
    ],
)
def test_messages(call: Any, message: str) -> None:
    with pytest.raises(TypeError) as raised:
        call(torch.ones(2, 4))
    assert str(raised.value) == message


def test_other_errors_are_as_they_were() -> None:
    with pytest.raises(RuntimeError, match="gelu: approximate must be 'none' or 'tanh'"):
        F.gelu(torch.ones(2), approximate="some")
    with pytest.raises(ValueError, match="dropout: p must be between 0 and 1, got 2"):
        F.dropout(torch.ones(2), p=2)
    with pytest.raises(TypeError, match=r"gelu\(\) missing 1 required positional argument"):
        F.gelu()


def test_numbers_of_other_kinds_are_taken() -> None:
    x = torch.ones(2, 4)
    assert torch.equal(F.softcap(x, 2), F.softcap(x, 2.0))
    assert torch.equal(F.layer_norm(x, [4]), F.layer_norm(x, torch.Size([4])))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: M.Dropout(p="0.1"), "Dropout: p must be a float, got str"),
        (lambda: M.LayerNormGELU("x"), "LayerNormGELU: normalized_shape must be an int or a "),
        (lambda: M.MLP(4, "8"), "MLP: hidden_features must be an int, got str"),
        (lambda: M.GEGLU(approximate=3), "GEGLU: approximate must be a str, got int"),
        (lambda: M.Activation(3), "Activation: activation must be a str, got int"),
        (lambda: M.GELU()("x"), "gelu: input must be a Tensor, got str"),
        (lambda: M.SwiGLU()(torch.ones(2, 4), 3), "gated: up must be a Tensor, got int"),
    ],
)
def test_modules(make: Any, message: str) -> None:
    with pytest.raises(TypeError) as raised:
        make()
    assert str(raised.value).startswith(message)
