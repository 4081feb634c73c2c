"""Proves: what memopt's own kernels allocate and free inside themselves is predicted to the byte,
whatever order their arguments are in; of large tensors, and of what draws random numbers, within
its bound.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import memopt.functional as MF
from memopt.memory.scratch import measured
from tests.memory.test_operators import ROUNDING, Compare, laid_out

WIDTH = 96
Call = Callable[[Callable[..., Tensor], Tensor, Tensor], Tensor]
"""Calls an op with what makes an input of a shape, a weight and a bias."""
CALLS: dict[str, Call] = {
    "layer_norm": lambda x, w, b: MF.layer_norm(x(6, 40, WIDTH), (WIDTH,), w, b),
    "rms_norm": lambda x, w, b: MF.rms_norm(x(6, 40, WIDTH), (WIDTH,), w),
    "add_layer_norm": lambda x, w, b: MF.add_layer_norm(
        x(6, 40, WIDTH), x(6, 40, WIDTH), (WIDTH,), w, b
    )[0],
    "group_norm": lambda x, w, b: MF.group_norm(x(6, WIDTH, 40), 8, w, b),
    "batch_norm": lambda x, w, b: MF.batch_norm(x(6, WIDTH, 40), None, None, w, b, training=True),
    "group_norm, silu": lambda x, w, b: MF.group_norm(x(6, WIDTH, 40), 8, w, b, activation="silu"),
    "batch_norm, relu": lambda x, w, b: MF.batch_norm(
        x(6, WIDTH, 40), None, None, w, b, training=True, activation="relu"
    ),
    "group_norm, silu, of an input without a gradient": lambda x, w, b: MF.group_norm(
        x(6, WIDTH, 40).detach(), 8, w, b, activation="silu"
    ),
    "gelu": lambda x, w, b: MF.gelu(x(6, 40, WIDTH)),
    "swiglu": lambda x, w, b: MF.swiglu(x(6, 40, WIDTH), x(6, 40, WIDTH)),
    "swiglu_packed": lambda x, w, b: MF.swiglu_packed(x(6, 40, WIDTH)),
    "dropout": lambda x, w, b: MF.dropout(x(6, 40, WIDTH), 0.1),
    "cross_entropy": lambda x, w, b: MF.cross_entropy(x(60, WIDTH), torch.arange(60)),
}
DRAWS = frozenset(("dropout",))
LAYOUTS = ("contiguous", "transposed", "sliced", "expanded")


def in_layout(tensor: Tensor, layout: str) -> Tensor:
    if layout == "sliced":
        return torch.cat([tensor, tensor], -1)[..., : tensor.shape[-1]]
    if layout == "expanded":
        return tensor[:1].expand(tensor.shape)
    return laid_out(tensor, layout)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("is_small", [True, False])
def test_kernels(
    name: str, layout: str, dtype: torch.dtype, is_small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_small:
        monkeypatch.setattr(measured, "_SMALL", 0)
    weight, bias = (torch.ones(WIDTH, dtype=dtype, requires_grad=True) for _ in range(2))

    def make(*shape: int) -> Tensor:
        return in_layout(torch.randn(shape).to(dtype), layout).detach().requires_grad_()

    for of_gradient in ("contiguous", "transposed", "expanded"):
        with Compare() as mode:
            result = CALLS[name](make, weight, bias)
            ones = torch.ones_like(result, memory_format=torch.contiguous_format)
            result.backward(in_layout(ones, of_gradient) if result.dim() else ones)
        for found in mode.found:
            assert found.real <= found.known + found.margin + ROUNDING, found
            assert found.known <= found.real + ROUNDING, found
            assert not found.margin or not is_small or name in DRAWS, found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [40, 300])
@pytest.mark.parametrize("frozen", ["", "weight", "bias"])
def test_head_in_chunks(dtype: torch.dtype, rows: int, frozen: str) -> None:
    """The logits of a chunk, and blocks of what sums the gradients of weight and bias."""
    words, features = 49999, 16
    given = {"linear_weight": torch.randn(words, features), "linear_bias": torch.randn(words)}
    given = {
        name: t.to(dtype).requires_grad_(not frozen or frozen not in name)
        for name, t in given.items()
    }
    x = torch.randn(rows, features).to(dtype).requires_grad_()
    with Compare() as mode:
        MF.linear_cross_entropy(x, target=torch.arange(rows), **given).backward()
    assert any(found.known for found in mode.found)
    for found in mode.found:
        assert found.known - ROUNDING <= found.real <= found.known + found.margin + ROUNDING, found
