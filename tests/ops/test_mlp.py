"""Proves: mlp equals, in every bit of its output and gradients and for every `recompute`,
memopt's ops one after another, whatever asks for gradients; and its dropouts are the same again in
backward.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import memopt.functional as M
from memopt import checkpoint
from tests.support.bits import assert_same_bits
from tests.support.mlp import (
    LEVELS,
    Variant,
    apart,
    every_level,
    every_variant,
    fused,
    gradients,
    make_tensors,
)


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
        with pytest.raises(
            RuntimeError, match="create_graph=True asks for input, which was not saved"
        ):
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
        actual = fused(variant, tensors, recompute)
        expected = apart(variant, {**tensors, "input": tensors["input"].bfloat16()})
    assert actual.dtype == torch.bfloat16
    assert torch.equal(actual, expected)
    assert_same_bits(gradients(actual, tensors), gradients(expected, tensors))


@every_level
def test_a_float32_residual_under_autocast_stays(recompute: str, device: torch.device) -> None:
    plain = Variant("plain", norm="layer_norm", dropout=0.1)
    tensors = make_tensors(plain, device, torch.float32)
    with torch.autocast(device.type, torch.bfloat16):
        branch = fused(plain, tensors, recompute)
        actual = fused(replace(plain, residual=True), tensors, recompute)
    assert (branch.dtype, actual.dtype) == (torch.bfloat16, torch.float32)
    expected = branch + tensors["input"]
    assert torch.equal(actual, expected)
    assert_same_bits(gradients(actual, tensors), gradients(expected, tensors))


LAYOUTS = {
    "transposed": lambda x: x.mT.contiguous().mT,
    "expanded": lambda x: x[:1].expand(x.shape),
    "sliced": lambda x: torch.cat([x, x], dim=-1)[..., ::2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bias", [False, True])
def test_levels_agree_for_inputs_of_any_strides(layout: str, bias: bool) -> None:
    """Whichever way at::linear multiplies them; for few rows the ways differ in bits."""
    variant = Variant("strided", activation="relu_squared", bias=bias)
    tensors = make_tensors(variant, torch.device("cpu"), torch.float32, (2, 3))
    tensors["input"] = LAYOUTS[layout](tensors["input"].detach()).requires_grad_()
    expected = gradients(fused(variant, tensors, "none"), tensors)
    for recompute in LEVELS:
        assert_same_bits(gradients(fused(variant, tensors, recompute), tensors), expected)


@every_level
@pytest.mark.parametrize("forward", [None, torch.bfloat16], ids=["plain", "bfloat16"])
def test_backward_called_under_another_autocast(
    forward: torch.dtype | None, recompute: str, device: torch.device
) -> None:
    """It runs in forward's dtypes."""
    variant = Variant("dropped", norm="layer_norm", activation_dropout=0.1, dropout=0.1)
    tensors = make_tensors(variant, device, torch.float32)
    with torch.autocast(device.type, forward, enabled=forward is not None):
        y = fused(variant, tensors, recompute)
    other = torch.float16 if forward else torch.bfloat16
    for create_graph in (False, True):
        plain, inside = (autograd_under(dtype, y, tensors, create_graph) for dtype in (None, other))
        assert_same_bits(inside, plain)


def autograd_under(
    dtype: torch.dtype | None, y: Tensor, tensors: dict[str, Tensor], create_graph: bool
) -> dict[str, Tensor]:
    with torch.autocast(y.device.type, dtype, enabled=dtype is not None):
        grads = torch.autograd.grad(
            y, list(tensors.values()), torch.ones_like(y), True, create_graph=create_graph
        )
    return dict(zip(tensors, grads, strict=True))


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
