"""Proves: mlp equals, in every bit of its output and gradients and at every level of recomputation,
memopt's ops one after another, whatever asks for gradients; it saves exactly what its level says;
it runs no product that no gradient asks for; and its dropouts are the same again in backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import memopt.functional as M
from memopt import checkpoint
from tests.support.live_bytes import LiveBytes
from tests.support.record_ops import RecordOps
from tests.support.saved_bytes import SavedTensors

LEVELS = ("none", "activations", "all")
every_level = pytest.mark.parametrize("recompute", LEVELS)
FEATURES, HIDDEN = 24, 40
STATISTICS_BYTES = {"none": 0, "layer_norm": 8, "rms_norm": 4}
STATE_BYTES = 16


@dataclass(frozen=True)
class Variant:
    name: str
    norm: str = "none"
    gated: bool = False
    activation: str = "gelu"
    bias: bool = True
    activation_dropout: float = 0.0
    dropout: float = 0.0
    residual: bool = False
    zero_centered_weight: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def first(self) -> int:
        """Linears in front of the activation."""
        return 2 if self.gated else 1

    def options(self) -> dict[str, Any]:
        return {
            "norm": self.norm,
            "activation": self.activation,
            "activation_dropout": self.activation_dropout,
            "dropout": self.dropout,
            "residual": self.residual,
            "zero_centered_weight": self.zero_centered_weight,
        }


VARIANTS = (
    Variant("plain"),
    Variant("GPT-2", norm="layer_norm", activation="gelu_tanh", residual=True),
    Variant("GPT-2 with dropout", norm="layer_norm", dropout=0.1, residual=True),
    Variant("Llama", norm="rms_norm", gated=True, activation="silu", bias=False, residual=True),
    Variant("Gemma", "rms_norm", True, "gelu_tanh", bias=False, zero_centered_weight=True),
    Variant("T5", "rms_norm", False, "relu", bias=False, activation_dropout=0.1, dropout=0.1),
    Variant("gated T5", "rms_norm", True, "gelu_tanh", False, 0.1, 0.1, residual=True),
    Variant("BERT", activation_dropout=0.2, residual=True),
    Variant("gated without norm", gated=True, activation="relu_squared", residual=True),
)
every_variant = pytest.mark.parametrize("variant", VARIANTS, ids=str)


def make_tensors(
    variant: Variant, device: torch.device, dtype: torch.dtype, leading: tuple[int, ...] = (6,)
) -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {"input": (*leading, FEATURES)}
    for name in ("gate", "up") if variant.gated else ("up",):
        shapes[f"{name}_weight"] = (HIDDEN, FEATURES)
        if variant.bias:
            shapes[f"{name}_bias"] = (HIDDEN,)
    shapes["down_weight"] = (FEATURES, HIDDEN)
    if variant.bias:
        shapes["down_bias"] = (FEATURES,)
    if variant.norm != "none":
        shapes["norm_weight"] = (FEATURES,)
    if variant.norm == "layer_norm":
        shapes["norm_bias"] = (FEATURES,)
    torch.manual_seed(3)
    return {
        name: (torch.randn(shape) / 2).to(device, dtype).requires_grad_()
        for name, shape in shapes.items()
    }


def fused(variant: Variant, tensors: dict[str, Tensor], recompute: str = "activations") -> Tensor:
    torch.manual_seed(5)
    return M.mlp(
        **{"up_bias": None, **tensors, **variant.options()},  # type: ignore[arg-type]
        recompute=recompute,
    )


def apart(variant: Variant, tensors: dict[str, Tensor]) -> Tensor:
    """The ops one after another."""
    torch.manual_seed(5)
    x = n = tensors["input"]
    norm_weight = tensors.get("norm_weight")
    if variant.norm == "layer_norm":
        n = M.layer_norm(x, x.shape[-1:], norm_weight, tensors.get("norm_bias"))
    elif variant.norm == "rms_norm":
        zero_centered = variant.zero_centered_weight
        n = M.rms_norm(x, x.shape[-1:], norm_weight, zero_centered_weight=zero_centered)
    linears = {
        name: F.linear(n, tensors[f"{name}_weight"], tensors.get(f"{name}_bias"))
        for name in (("gate", "up") if variant.gated else ("up",))
    }
    p = variant.activation_dropout
    if variant.gated:
        a = M.dropout(M.gated(linears["gate"], linears["up"], variant.activation), p)
    else:
        a = activation_dropout(linears["up"], p, variant.activation)
    y = M.dropout(F.linear(a, tensors["down_weight"], tensors.get("down_bias")), variant.dropout)
    return y + x if variant.residual else y


def activation_dropout(x: Tensor, p: float, activation: str) -> Tensor:
    name, _, approximate = activation.partition("_")
    plain = M.gelu(x, approximate or "none") if name == "gelu" else getattr(M, activation)(x)
    return M.dropout(plain, p)


def gradients(
    y: Tensor, tensors: dict[str, Tensor], create_graph: bool = False
) -> dict[str, Tensor]:
    torch.manual_seed(1)
    wanted = {name: t for name, t in tensors.items() if t.requires_grad}
    grads = torch.autograd.grad(
        y, list(wanted.values()), torch.randn_like(y), create_graph=create_graph
    )
    return dict(zip(wanted, grads, strict=True))


def assert_same_bits(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, a in actual.items():
        e = expected[name]
        assert a.dtype == e.dtype
        assert torch.equal(a, e), f"{name} differs by up to {(a - e).abs().max()}"


@every_level
@every_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("leading", [(6,), (2, 3), (), (0,)], ids=str)
def test_equals_the_ops_one_after_another_in_every_bit(
    variant: Variant,
    dtype: torch.dtype,
    leading: tuple[int, ...],
    recompute: str,
    device: torch.device,
) -> None:
    tensors = make_tensors(variant, device, dtype, leading)
    actual, expected = fused(variant, tensors, recompute), apart(variant, tensors)
    assert torch.equal(actual, expected)
    assert_same_bits(gradients(actual, tensors), gradients(expected, tensors))


FROZEN = {
    "input": ("input",),
    "input and norm": ("input", "norm_weight", "norm_bias"),
    "norm": ("norm_weight", "norm_bias"),
    "weights": ("gate_weight", "up_weight", "down_weight"),
    "gate": ("gate_weight", "gate_bias"),
    "up": ("up_weight", "up_bias"),
    "down": ("down_weight", "down_bias"),
    "all but biases": ("input", "norm_weight", "gate_weight", "up_weight", "down_weight"),
    "all but down": (
        *("input", "norm_weight", "norm_bias", "gate_weight", "gate_bias"),
        *("up_weight", "up_bias"),
    ),
}


@every_level
@every_variant
@pytest.mark.parametrize("frozen", FROZEN)
def test_frozen_parts(variant: Variant, frozen: str, recompute: str, device: torch.device) -> None:
    tensors = make_tensors(variant, device, torch.float32)
    for name in FROZEN[frozen]:
        if name in tensors:
            tensors[name].requires_grad_(False)
    if not any(t.requires_grad for t in tensors.values()):
        assert not fused(variant, tensors, recompute).requires_grad
        return
    assert_same_bits(
        gradients(fused(variant, tensors, recompute), tensors),
        gradients(apart(variant, tensors), tensors),
    )


def saved_bytes(variant: Variant, recompute: str, rows: int, frozen: tuple[str, ...] = ()) -> int:
    tensors = make_tensors(variant, torch.device("cpu"), torch.bfloat16, (rows,))
    for name in frozen:
        if name in tensors:
            tensors[name].requires_grad_(False)
    parameters = [t for name, t in tensors.items() if name != "input"]
    with SavedTensors(exclude=parameters) as saved:
        fused(variant, tensors, recompute)
    return saved.bytes


@every_variant
def test_saves_what_its_level_says(variant: Variant) -> None:
    rows, h, m = 12, FEATURES, HIDDEN
    statistics = STATISTICS_BYTES[variant.norm]
    norm_output = 0 if variant.norm == "none" else 2 * h
    states = STATE_BYTES * ((variant.activation_dropout > 0) + (variant.dropout > 0))
    row = {
        "none": 2 * h + norm_output + 2 * variant.first * m + 2 * m + statistics,
        "activations": 2 * h + 2 * variant.first * m + statistics,
        "all": 2 * h + statistics,
    }
    for recompute in LEVELS:
        counted = saved_bytes(variant, recompute, rows)
        print(
            f"{variant}, {recompute}: {row[recompute]} B a row "
            f"(h = {h}, m = {m}, {variant.first} first linears) + {states} B"
        )
        assert counted == rows * row[recompute] + states


def test_saves_nothing_for_gradients_that_nobody_asks_for() -> None:
    rows, h, m = 12, FEATURES, HIDDEN
    weights = ("gate_weight", "up_weight", "down_weight")
    llama = Variant("Llama", norm="rms_norm", gated=True, activation="silu", bias=False)
    plain = Variant("plain")
    # Frozen weights: a gradient still goes through the norm and the activation.
    assert saved_bytes(llama, "activations", rows, weights) == rows * (2 * h + 4 + 4 * m)
    assert saved_bytes(llama, "none", rows, weights) == rows * (2 * h + 4 + 4 * m)
    assert saved_bytes(plain, "activations", rows, weights) == rows * 2 * m
    # Only the last bias is trained: nothing at all.
    rest = ("input", "up_weight", "up_bias", "down_weight")
    for recompute in LEVELS:
        assert saved_bytes(plain, recompute, rows, rest) == 0
    # Only the last linear is trained: what stands before it, by the level.
    before = ("input", "up_weight", "up_bias")
    by_level = {"none": 2 * m, "activations": 2 * m, "all": 2 * h}
    for recompute, row in by_level.items():
        assert saved_bytes(plain, recompute, rows, before) == rows * row


def products(variant: Variant, recompute: str, frozen: tuple[str, ...] = ()) -> int:
    """Matrix products in backward."""
    tensors = make_tensors(variant, torch.device("cpu"), torch.float32)
    for name in frozen:
        tensors[name].requires_grad_(False)
    y = fused(variant, tensors, recompute)
    with RecordOps() as record:
        y.backward(torch.ones_like(y))
    return sum(str(op).startswith(("aten.mm", "aten.addmm", "aten.linear")) for op in record.ops)


def test_runs_no_product_that_no_gradient_asks_for() -> None:
    gpt = Variant("GPT-2", norm="layer_norm", residual=True)
    for recompute, again in (("none", 0), ("activations", 0), ("all", 1)):
        assert products(gpt, recompute) == 4 + again
        assert products(gpt, recompute, ("up_weight",)) == 3 + again
        assert products(gpt, recompute, ("up_weight", "down_weight")) == 2 + again
        assert products(gpt, recompute, ("input", "norm_weight", "norm_bias")) == 3 + again
    llama = Variant("Llama", norm="rms_norm", gated=True, activation="silu", bias=False)
    assert products(llama, "activations") == 6
    assert products(llama, "all") == 8


@pytest.mark.parametrize("gated", [False, True])
def test_buffers_are_written_over_and_go_early(gated: bool) -> None:
    """Of results that are alive at one time, in float32: p and a hold m a row, n and y h.

    Forward holds p and a, or p alone where it is not kept; backward its gradient (written over the
    incoming one), a and V's gradient; where p was made again, n is alive as well and a takes p's
    place.
    """
    rows, h, m = 512, FEATURES, HIDDEN
    g = 2 if gated else 1
    variant = Variant("bytes", "rms_norm", gated, "silu", bias=False)
    forward, backward = {}, {}
    for recompute in ("activations", "all"):
        tensors = make_tensors(variant, torch.device("cpu"), torch.float32, (rows,))
        with LiveBytes() as live:
            y = fused(variant, tensors, recompute)
        forward[recompute] = live.most
        grad = torch.ones_like(y)
        with LiveBytes() as live:
            y.backward(grad)
        backward[recompute] = live.most
    rstd = rows * 4
    assert forward["activations"] == 4 * rows * ((g + 1) * m + h) + rstd
    assert forward["all"] == 4 * rows * (g * m + h) + rstd
    assert backward["activations"] == 4 * rows * (g + 1) * m + 4 * h * m
    assert backward["all"] == 4 * rows * ((g + 1) * m + h) + 4 * h * m


@every_variant
def test_gradients_of_gradients(variant: Variant) -> None:
    tensors = make_tensors(variant, torch.device("cpu"), torch.float64, (2,))
    results = []
    for recompute in (*LEVELS, None):
        y = fused(variant, tensors, recompute) if recompute else apart(variant, tensors)
        first = gradients(y, tensors, create_graph=True)
        total = torch.stack([g.square().sum() for g in first.values()]).sum()
        second = torch.autograd.grad(total, list(tensors.values()), allow_unused=True)
        results.append(second)
    for second in results[:-1]:
        for actual, expected in zip(second, results[-1], strict=True):
            assert (actual is None) == (expected is None)
            if actual is not None:
                torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


def needs_what_was_not_saved(norm: str, frozen: str) -> bool:
    """Frozen weights need no input, and then without a norm nobody saves it."""
    return norm == "none" and frozen in ("weights", "all but biases")


@every_level
@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("norm", ["none", "layer_norm"])
def test_gradients_of_gradients_with_frozen_parts(norm: str, frozen: str, recompute: str) -> None:
    variant = Variant("gated", norm=norm, gated=True, activation="silu", residual=True)
    tensors = make_tensors(variant, torch.device("cpu"), torch.float64, (2,))
    for name in FROZEN[frozen]:
        if name in tensors:
            tensors[name].requires_grad_(False)
    trained = [t for t in tensors.values() if t.requires_grad]

    def second(y: Tensor) -> tuple[Tensor | None, ...]:
        first = gradients(y, tensors, create_graph=True)
        total = torch.stack([g.square().sum() for g in first.values()]).sum()
        if not total.requires_grad:
            return ()
        return torch.autograd.grad(total, trained, allow_unused=True)

    if recompute != "all" and needs_what_was_not_saved(norm, frozen):
        with pytest.raises(RuntimeError, match="create_graph=True asks for what was not saved"):
            second(fused(variant, tensors, recompute))
        return
    actual = second(fused(variant, tensors, recompute))
    for a, e in zip(actual, second(apart(variant, tensors)), strict=True):
        assert (a is None) == (e is None)
        if a is not None:
            torch.testing.assert_close(a, e, rtol=1e-9, atol=1e-9)


@every_level
@every_variant
def test_in_a_region_compiled_and_twice(
    variant: Variant, recompute: str, device: torch.device
) -> None:
    tensors = make_tensors(variant, device, torch.float32)
    expected = gradients(fused(variant, tensors, recompute), tensors)
    region = checkpoint(fused, variant, tensors, recompute)
    assert_same_bits(gradients(region, tensors), expected)

    y = fused(variant, tensors, recompute)
    for _ in range(2):
        y.backward(torch.ones_like(y), retain_graph=True)
    once = gradients_of_ones(fused(variant, tensors, recompute), tensors)
    for name, tensor in tensors.items():
        assert torch.equal(tensor.grad, 2 * once[name])

    if variant.dropout or variant.activation_dropout:
        return  # a compiled graph draws its random numbers by an op of PyTorch's
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda tensors: M.mlp(
            **{"up_bias": None, **tensors, **variant.options()}, recompute=recompute
        ),
        backend="aot_eager",
        fullgraph=True,
    )
    assert_same_bits(gradients(compiled(tensors), tensors), expected)


def gradients_of_ones(y: Tensor, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    grads = torch.autograd.grad(y, list(tensors.values()), torch.ones_like(y))
    return dict(zip(tensors, grads, strict=True))


def test_compiled_dropouts_are_the_same_in_backward(device: torch.device) -> None:
    variant = Variant("T5", norm="none", activation="relu", bias=False, dropout=0.5)
    tensors = make_tensors(variant, device, torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x, up, down: M.mlp(x, up, None, down, dropout=0.5, recompute="all"),
        backend="aot_eager",
        fullgraph=True,
    )
    y = compiled(tensors["input"], tensors["up_weight"], tensors["down_weight"])
    dropped = y == 0
    assert dropped.any()
    assert not dropped.all()
    # A gradient that stands only where the output was dropped goes nowhere.
    y.backward(dropped.float())
    for name in ("input", "up_weight", "down_weight"):
        assert not tensors[name].grad.any()


@every_level
@every_variant
def test_autocast_casts_input_and_weights(
    variant: Variant, recompute: str, device: torch.device
) -> None:
    tensors = make_tensors(variant, device, torch.float32)
    if variant.residual:
        tensors["input"] = tensors["input"].detach().bfloat16().requires_grad_()
    with torch.autocast(device.type, torch.bfloat16):
        actual, expected = fused(variant, tensors, recompute), apart(variant, tensors)
    assert actual.dtype == torch.bfloat16
    assert torch.equal(actual, expected)
    assert_same_bits(gradients(actual, tensors), gradients(expected, tensors))


def test_without_gradients_and_in_eval(device: torch.device) -> None:
    variant = Variant("all", "layer_norm", True, "silu", True, 0.3, 0.3, True)
    tensors = make_tensors(variant, device, torch.float32)
    with torch.no_grad():
        assert torch.equal(fused(variant, tensors), apart(variant, tensors))
    quiet = {**variant.options(), "activation_dropout": 0.0, "dropout": 0.0}
    assert torch.equal(
        M.mlp(**tensors, **variant.options(), training=False), M.mlp(**tensors, **quiet)
    )
    # p = 1: nothing but the residual is left.
    nothing_left = M.mlp(**tensors, **{**variant.options(), "dropout": 1.0})
    assert torch.equal(nothing_left, tensors["input"])


X, UP, DOWN = torch.randn(2, 4), torch.randn(6, 4), torch.randn(4, 6)
BAD: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "level": (
        lambda: M.mlp(X, UP, None, DOWN, recompute="some"),
        RuntimeError,
        "mlp: recompute must be 'none', 'activations' or 'all', got 'some'",
    ),
    "activation": (
        lambda: M.mlp(X, UP, None, DOWN, activation="tanh"),
        RuntimeError,
        "activation must be 'gelu', .*got 'tanh'",
    ),
    "norm": (
        lambda: M.mlp(X, UP, None, DOWN, norm="batch"),
        RuntimeError,
        "mlp: norm must be 'none', 'layer_norm' or 'rms_norm', got 'batch'",
    ),
    "norm size": (
        lambda: M.mlp(X, UP, None, DOWN, norm="layer_norm", norm_weight=torch.ones(3)),
        RuntimeError,
        r"layer_norm: weight must have shape \[4\]",
    ),
    "norm parameters without a norm": (
        lambda: M.mlp(X, UP, None, DOWN, norm_weight=torch.ones(4)),
        RuntimeError,
        "must be None where norm is 'none'",
    ),
    "norm bias": (
        lambda: M.mlp(X, UP, None, DOWN, norm="rms_norm", norm_bias=torch.ones(4)),
        RuntimeError,
        "norm_bias must be None where norm is 'rms_norm'",
    ),
    "up features": (
        lambda: M.mlp(X, torch.randn(6, 5), None, DOWN),
        RuntimeError,
        r"mlp: up_weight must have shape \[out, 4\]",
    ),
    "gate rows": (
        lambda: M.mlp(X, UP, None, DOWN, gate_weight=torch.randn(5, 4)),
        RuntimeError,
        "mlp: gate_weight must have up_weight's 6 rows, got 5",
    ),
    "gate bias alone": (
        lambda: M.mlp(X, UP, None, DOWN, gate_bias=torch.zeros(6)),
        RuntimeError,
        "gate_bias must be None without gate_weight",
    ),
    "down features": (
        lambda: M.mlp(X, UP, None, torch.randn(4, 5)),
        RuntimeError,
        r"mlp: down_weight must have shape \[out, 6\]",
    ),
    "several dtypes": (
        lambda: M.mlp(X, UP, None, DOWN.double()),
        RuntimeError,
        "mlp: down_weight must have input's dtype",
    ),
    "bias": (
        lambda: M.mlp(X, UP, torch.zeros(4), DOWN),
        RuntimeError,
        r"mlp: up_bias must have shape \[6\]",
    ),
    "residual": (
        lambda: M.mlp(X, UP, None, torch.randn(3, 6), residual=True),
        RuntimeError,
        "mlp: down_weight must have input's 4 features as rows where residual is added, got 3",
    ),
    "dropout": (
        lambda: M.mlp(X, UP, None, DOWN, dropout=1.5),
        ValueError,
        "mlp: dropout must be between 0 and 1, got 1.5",
    ),
    "activation dropout": (
        lambda: torch.ops.memopt.mlp(X, UP, None, DOWN, None, activation_dropout=float("nan")),
        ValueError,
        "mlp: activation_dropout must be between 0 and 1, got nan",
    ),
    "scalar": (
        lambda: M.mlp(torch.tensor(1.0), UP, None, DOWN),
        RuntimeError,
        "mlp: input must have at least one dimension",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    call, kind, message = BAD[name]
    with pytest.raises(kind, match=message):
        call()
