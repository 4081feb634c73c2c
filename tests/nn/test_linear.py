"""Proves: the modules with linears behind compute what the modules apart do, on the same parameters
and under the same keys, can be made of them and taken apart into them, and keep nothing between.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memopt.nn as mnn
from memopt.demo.model import LayerNormThenGELU
from memopt.memory.saved import SavedTensors
from tests.support.modules import assert_copies

PAIRS: dict[str, tuple[type, Callable[[], nn.Module]]] = {
    "LayerNormLinear": (mnn.LayerNormLinear, lambda: nn.LayerNorm(6, eps=1e-3)),
    "LayerNormLinear, memopt's": (mnn.LayerNormLinear, lambda: mnn.LayerNorm(6, bias=False)),
    "RMSNormLinear": (mnn.RMSNormLinear, lambda: nn.RMSNorm(6, eps=1e-3)),
    "zero-centred": (mnn.RMSNormLinear, lambda: mnn.RMSNorm(6, zero_centered_weight=True)),
    "GELULinear": (mnn.GELULinear, lambda: nn.GELU("tanh")),
    "ActivationLinear, gelu": (mnn.ActivationLinear, nn.GELU),
    "ActivationLinear, gelu tanh": (mnn.ActivationLinear, lambda: mnn.GELU("tanh")),
    "ActivationLinear, silu": (mnn.ActivationLinear, nn.SiLU),
    "ActivationLinear, relu": (mnn.ActivationLinear, nn.ReLU),
    "ActivationLinear, quick_gelu": (mnn.ActivationLinear, mnn.QuickGELU),
    "ActivationLinear, relu_squared": (mnn.ActivationLinear, mnn.ReLUSquared),
    "ActivationLinear, sigmoid": (mnn.ActivationLinear, mnn.Sigmoid),
}
every_pair = pytest.mark.parametrize(("kind", "make"), PAIRS.values(), ids=PAIRS.keys())
NORMS = {
    "LayerNormLinear": (mnn.LayerNormLinear, nn.LayerNorm, 8),
    "RMSNormLinear": (mnn.RMSNormLinear, nn.RMSNorm, 4),
}
every_norm = pytest.mark.parametrize(
    ("kind", "norm", "row_bytes"), NORMS.values(), ids=NORMS.keys()
)
UNITS = {
    "SwiGLU": mnn.SwiGLU,
    "GEGLU": lambda interleaved=False: mnn.GEGLU("tanh", interleaved),
    "Gated": lambda interleaved=False: mnn.Gated("relu", interleaved),
}
every_unit = pytest.mark.parametrize("unit", UNITS.values(), ids=UNITS.keys())


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@every_pair
def test_made_of_a_pair_it_computes_what_the_pair_does(kind, make) -> None:
    front, linear = make(), nn.Linear(6, 4)
    fused = kind.from_modules(front, linear)
    x = torch.randn(3, 6)
    assert_close(fused(x), linear(front(x)))
    fused(x).sum().backward()
    assert linear.weight.grad is not None
    first, second = fused.to_modules()
    assert second is linear
    assert type(first).__name__ == type(front).__name__
    assert_close(second(first(x)), linear(front(x)))


@every_norm
def test_several_linears_share_a_norm(kind, norm, row_bytes: int) -> None:
    front, linears = norm(6), [nn.Linear(6, 4), nn.Linear(6, 2, bias=False), nn.Linear(6, 2)]
    fused = kind.from_modules(front, *linears).eval()
    x = torch.randn(3, 6, requires_grad=True)
    with SavedTensors(exclude=fused.parameters()) as saved:
        outputs = fused(x)
    assert saved.bytes == x.nbytes + 3 * row_bytes
    assert isinstance(outputs, tuple)
    for output, linear in zip(outputs, linears, strict=True):
        assert_close(output, linear(front(x)))
    assert fused.to_modules() == (front, *linears)
    expected = {f"linears.{i}.weight" for i in range(3)} | {"linears.0.bias", "linears.2.bias"}
    assert set(fused.state_dict()) == expected | {f"norm.{name}" for name in front.state_dict()}
    built = kind(6, (4, 2, 2))
    assert [y.shape[-1] for y in built(x)] == [4, 2, 2]
    assert_copies_of_several(built, x)


def assert_copies_of_several(module: nn.Module, x: Tensor) -> None:
    first = nn.Sequential(module, First())
    assert_copies(first, x)


class First(nn.Module):
    def forward(self, outputs: tuple[Tensor, ...]) -> Tensor:
        return outputs[0]


@every_unit
@pytest.mark.parametrize("packed", [None, False, True], ids=["apart", "halves", "interleaved"])
def test_behind_a_gated_unit(unit, packed: bool | None) -> None:
    """`packed`: None for gate and up apart, otherwise whether they are interleaved."""
    unit, linear = unit(bool(packed)), nn.Linear(6, 4)
    fused = mnn.GatedLinear.from_modules(unit, linear, packed=packed is not None)
    inputs = [torch.randn(3, 6), torch.randn(3, 6)]
    if packed is not None:
        inputs = [torch.stack(inputs, -1 if packed else -2).flatten(-2)]
    leaves = [t.requires_grad_() for t in inputs]
    with SavedTensors(exclude=fused.parameters()) as saved:
        output = fused(*leaves)
    assert saved.bytes == sum(t.nbytes for t in leaves)
    assert_close(output, linear(unit(*inputs)))
    first, second = fused.to_modules()
    assert second is linear
    assert type(first) is type(unit)
    assert_close(second(first(*inputs)), output)
    assert set(fused.state_dict()) == {"linear.weight", "linear.bias"}


def test_gated_without_a_linear() -> None:
    gate, up = torch.randn(3, 6), torch.randn(3, 6)
    unit = mnn.Gated("sigmoid")
    assert_close(unit(gate, up), torch.sigmoid(gate) * up)
    # torch.nn's GLU has its gate in the second half.
    assert_close(unit(torch.cat((gate, up), -1)), F.glu(torch.cat((up, gate), -1)))
    assert repr(unit) == "Gated(activation='sigmoid')"


@pytest.mark.parametrize(
    ("module", "keys"),
    [
        (mnn.LayerNormLinear(6, 4, bias=False), {"norm.weight", "norm.bias"}),
        (mnn.LayerNormLinear(6, 4, bias=False, norm_bias=False), {"norm.weight"}),
        (mnn.RMSNormLinear(6, 4, bias=False), {"norm.weight"}),
        (mnn.RMSNormLinear(6, 4, bias=False, elementwise_affine=False), set()),
        (mnn.GELULinear(6, 4, bias=False), set()),
        (mnn.ActivationLinear(6, 4, bias=False, activation="silu"), set()),
        (mnn.GatedLinear(3, 4, bias=False, packed=True), set()),
    ],
    ids=lambda value: str(sorted(value)) if isinstance(value, set) else repr(value),
)
def test_keys_and_copies(module: nn.Module, keys: set[str]) -> None:
    assert set(module.state_dict()) == keys | {"linear.weight"}
    assert_copies(module, torch.randn(2, 6))


def test_what_a_repr_says() -> None:
    assert "GELULinear(\n  approximate='tanh'\n" in repr(mnn.GELULinear(6, 4, approximate="tanh"))
    assert "activation='silu'\n" in repr(mnn.GatedLinear(6, 4))
    packed = mnn.GatedLinear(6, 4, activation="relu", packed=True)
    assert "activation='relu', packed=True, interleaved=False\n" in repr(packed)


def test_the_training_flag_and_the_dtype_come_with_the_modules() -> None:
    norm, linear = nn.LayerNorm(6, dtype=torch.float64).eval(), nn.Linear(6, 4).double().eval()
    fused = mnn.LayerNormLinear.from_modules(norm, linear)
    assert not fused.training
    assert not any(module.training for module in fused.modules())
    assert fused(torch.randn(2, 6, dtype=torch.float64)).dtype == torch.float64


class ScaledLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def linear_with_its_own_forward() -> nn.Linear:
    linear = nn.Linear(6, 4)
    linear.forward = lambda x: x  # type: ignore[method-assign]
    return linear


BAD_PAIRS = {
    "another norm": (
        lambda: mnn.LayerNormLinear.from_modules(nn.RMSNorm(6), nn.Linear(6, 4)),
        TypeError,
        r"LayerNormLinear\.from_modules: takes a LayerNorm and a Linear, got RMSNorm$",
    ),
    "no linear": (
        lambda: mnn.GELULinear.from_modules(nn.GELU(), nn.Conv1d(1, 1, 1)),
        TypeError,
        "takes a GELU and a Linear, got Conv1d",
    ),
    "other features": (
        lambda: mnn.RMSNormLinear.from_modules(nn.RMSNorm(5), nn.Linear(6, 4)),
        ValueError,
        "must be over the linear's 6 features, got",
    ),
    "other features of the second": (
        lambda: mnn.LayerNormLinear.from_modules(nn.LayerNorm(6), nn.Linear(6, 4), nn.Linear(5, 4)),
        ValueError,
        "must be over the linear's 5 features, got",
    ),
    "a norm that does more": (
        lambda: mnn.LayerNormLinear.from_modules(LayerNormThenGELU(6), nn.Linear(6, 4)),
        TypeError,
        "got LayerNormThenGELU with a forward of its own",
    ),
    "memopt's norm that does more": (
        lambda: mnn.LayerNormLinear.from_modules(mnn.LayerNormGELU(6), nn.Linear(6, 4)),
        TypeError,
        "got LayerNormGELU with a forward of its own",
    ),
    "a linear that does more": (
        lambda: mnn.GELULinear.from_modules(nn.GELU(), ScaledLinear(6, 4)),
        TypeError,
        "got ScaledLinear with a forward of its own",
    ),
    "a linear whose forward was replaced": (
        lambda: mnn.GELULinear.from_modules(nn.GELU(), linear_with_its_own_forward()),
        TypeError,
        "got Linear with a forward of its own",
    ),
    "no activation": (
        lambda: mnn.ActivationLinear.from_modules(nn.Tanh(), nn.Linear(6, 4)),
        TypeError,
        r"ActivationLinear\.from_modules: takes an activation of torch\.nn or .*, got Tanh",
    ),
    "no gated unit": (
        lambda: mnn.GatedLinear.from_modules(nn.SiLU(), nn.Linear(6, 4)),
        TypeError,
        "takes a Gated and a Linear, got SiLU",
    ),
    "unknown activation": (
        lambda: mnn.ActivationLinear(6, 4, activation="tanh"),
        ValueError,
        "ActivationLinear: activation must be one of 'gelu', .*got 'tanh'",
    ),
    "unknown gate": (
        lambda: mnn.Gated("tanh"),
        ValueError,
        "Gated: activation must be one of 'gelu', .*got 'tanh'",
    ),
    "unknown form": (
        lambda: mnn.GELULinear(6, 4, approximate="erf"),
        ValueError,
        "GELULinear: approximate must be 'none' or 'tanh', got 'erf'",
    ),
    "interleaved, not packed": (
        lambda: mnn.GatedLinear(6, 4, interleaved=True),
        ValueError,
        "GatedLinear: interleaved must be False where packed is, got True",
    ),
    "one tensor for two": (
        lambda: mnn.GatedLinear(6, 4)(torch.zeros(2, 6)),
        TypeError,
        r"GatedLinear: takes gate and up \(packed=False\), got one tensor",
    ),
    "two tensors for one": (
        lambda: mnn.GatedLinear(6, 4, packed=True)(torch.zeros(2, 6), torch.zeros(2, 6)),
        TypeError,
        "GatedLinear: takes one packed tensor, got two",
    ),
    "no linears": (
        lambda: mnn.LayerNormLinear(6, ())(torch.zeros(2, 6)),
        RuntimeError,
        "layer_norm_linear: weights must hold at least one weight, got none",
    ),
}


@pytest.mark.parametrize(("make", "error", "message"), BAD_PAIRS.values(), ids=BAD_PAIRS.keys())
def test_bad_input(make: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()
