"""Proves: with chunks, forward and backward hold the inner tensors of one chunk. The peak by the
allocator's count is a formula: output, gradient of the input, sums of the parameters' gradients,
and what one chunk's backward takes. The rows are kept once, and an enclosing region drops them.
"""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt._checkpoint import checkpoint
from memopt.memory.allocator import LiveBytes
from tests.support.allocator import allocated_by

H, FEATURES, ROWS = 16, 64, 256
SHAPES = [(ROWS,), (4, ROWS // 4)]


def mlp(dtype: torch.dtype) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(H, FEATURES, bias=False), nn.Tanh(), nn.Linear(FEATURES, H, bias=False)
    ).to(dtype)


def formula(chunks: int, itemsize: int) -> int:
    """With rows c of a chunk and one product w = H * FEATURES, numbers at the peak of backward: of
    tanh its input's gradient, its output's, and its output; of a product the new gradient of its
    weight beside the two sums.
    """
    c, w = math.ceil(ROWS / chunks), H * FEATURES
    of_tanh = 3 * c * FEATURES + 2 * w
    second_product = 2 * c * FEATURES + 3 * w
    first_product = c * FEATURES + c * H + 3 * w
    return itemsize * (2 * ROWS * H + max(of_tanh, second_product, first_product))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("chunks", [2, 3, 8, 32])
def test_peak_of_forward_and_backward(
    chunks: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    module = mlp(dtype)
    x = torch.randn(*shape, H, dtype=dtype, requires_grad=True)
    grad = torch.randn(*shape, H, dtype=dtype)

    def step() -> None:
        checkpoint(module, x, chunks=chunks).backward(grad)
        x.grad = None
        module.zero_grad()

    assert allocated_by(step) == formula(chunks, x.element_size())


@pytest.mark.parametrize("with_gradients", [False, True])
@pytest.mark.parametrize("chunks", [2, 8])
def test_peak_of_forward(chunks: int, with_gradients: bool) -> None:
    """The output, and two inner tensors of a chunk."""
    module = mlp(torch.float32)
    x = torch.randn(ROWS, H, requires_grad=with_gradients)

    def forward() -> None:
        with torch.set_grad_enabled(with_gradients):
            checkpoint(module, x, chunks=chunks)

    c = ROWS // chunks
    assert allocated_by(forward) == 4 * (ROWS * H * (chunks > 1) + 2 * c * FEATURES)


def test_frozen_weights_take_nothing() -> None:
    """And of an input without a gradient none is made."""
    module = mlp(torch.float32).requires_grad_(False)
    module[2].requires_grad_(True)
    x = torch.randn(ROWS, H)
    grad = torch.randn(ROWS, H)

    def step() -> None:
        checkpoint(module, x, chunks=8).backward(grad)
        module.zero_grad()

    c, w = ROWS // 8, H * FEATURES
    in_recompute = ROWS * H + 2 * c * FEATURES + w
    in_backward = ROWS * H + c * FEATURES + 2 * w
    assert allocated_by(step) == 4 * max(in_recompute, in_backward)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward_keeps_the_rows_once(shape: tuple[int, ...]) -> None:
    module = mlp(torch.float32)
    x = torch.randn(*shape, H, requires_grad=True)
    kept = memopt.saved_bytes(lambda x: checkpoint(module, x * 2, chunks=4), x)
    assert kept == 4 * ROWS * H


def test_a_region_around_drops_the_rows() -> None:
    module = mlp(torch.float32)
    x = torch.randn(ROWS, H, requires_grad=True)

    def block(x: Tensor) -> Tensor:
        return checkpoint(module, x.sin().cos(), chunks=4)

    assert memopt.saved_bytes(lambda x: checkpoint(block, x.exp()), x) == 4 * ROWS * H


def test_a_prediction_knows_the_chunks() -> None:
    """The peak that anatomy predicts without values is the measured one, to the byte."""
    model = nn.Sequential(*(mlp(torch.float32) for _ in range(2)))
    x = torch.randn(4, ROWS // 4, H)
    peaks = []
    for chunks in (None, 4):
        for module in model:
            memopt.checkpoint_wrapper(module, chunks=chunks)
        both = [
            memopt.anatomy(model, x, loss=Tensor.sum, measure=measure).peak.total
            for measure in (False, True)
        ]
        assert both[0] == both[1]
        peaks.append(both[0])
    assert peaks[1] < peaks[0]


def test_the_first_step_under_autocast_takes_what_others_do() -> None:
    """The probe of rows cast the weights into autocast's cache, which kept them to the end of the
    first forward.
    """

    def most(module: nn.Module) -> int:
        x = torch.randn(4, ROWS // 4, H, requires_grad=True)
        with LiveBytes() as live, torch.autocast("cpu", dtype=torch.bfloat16):
            loss = checkpoint(module, x, chunks=64).square().mean()
            scratch = torch.zeros(1 << 16)
        (loss + scratch[0]).backward()
        return live.most

    most(mlp(torch.float32))
    module = mlp(torch.float32)
    first, second = most(module), most(module)
    assert first == second


def test_a_probe_leaves_no_references_to_parameters() -> None:
    """Those of PyTorch's tensors without memory stayed until the collector ran, and parameters that
    something refers to cannot be swapped (torch.utils.swap_tensors).
    """
    x = torch.randn(4, 8, H)

    def converted() -> nn.Module:
        model = nn.Sequential(mlp(torch.float32), mlp(torch.float32))
        memopt.convert(model, x, checkpoint=True, chunks=2)
        return model

    converted()  # what is imported once
    gc.collect()
    gc.disable()
    try:
        assert not any(weakref.getweakrefcount(p) for p in converted().parameters())
    finally:
        gc.enable()
