"""Proves: the logits of linear_cross_entropy never exist as a whole, by exact bytes; frozen tensors
cost nothing; gradients are scaled in place only where they are the node's alone.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from memopt.memory.saved import SavedTensors
from tests.support.allocator import allocated_by
from tests.support.bits import assert_same_bits
from tests.support.losses import classes_of, eager, head, ours

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.mark.parametrize("frozen", list(itertools.product([True, False], repeat=3))[:-1])
def test_frozen_tensors_get_and_cost_nothing(frozen: tuple[bool, ...]) -> None:
    tensors = head(40, 8, 64)
    for tensor, is_frozen in zip(tensors.values(), frozen, strict=True):
        tensor.requires_grad_(not is_frozen)
    target = classes_of(40, 64)
    with SavedTensors() as saved:
        loss = ours(tensors, target)
    trained = [tensor for tensor in tensors.values() if tensor.requires_grad]
    assert saved.bytes == sum(tensor.nbytes for tensor in trained), (
        "saved are the gradients that are asked for alone"
    )
    if trained:
        every = head(40, 8, 64)
        expected = torch.autograd.grad(ours(every, target), list(every.values()))
        kept = [g for g, is_frozen in zip(expected, frozen, strict=True) if not is_frozen]
        assert_same_bits(torch.autograd.grad(loss, trained), kept, "gradients")


ROWS, FEATURES, WORDS, CHUNK = 256, 64, 4096, 32


def peak_bytes(
    dtype: torch.dtype,
    loss: Any,
    reduction: str = "mean",
    sizes: tuple[int, int, int] = (ROWS, FEATURES, WORDS),
) -> int:
    """The most that forward and backward hold, without the gradients that are left."""
    tensors = head(*sizes, dtype)
    target = classes_of(sizes[0], sizes[2])

    def step() -> None:
        for tensor in tensors.values():
            tensor.grad = None
        loss(tensors, target, reduction=reduction).sum().backward()

    return allocated_by(step) - sum(tensor.nbytes for tensor in tensors.values())


def bytes_in_products(dtype: torch.dtype, chunk: int, features: int, words: int) -> int:
    """What PyTorch's products of a chunk allocate inside: copies in float32, on processors with
    AVX-512 that multiply no numbers of 16 bits. On others the bounds below hold without.
    """
    if not torch.cpu._is_avx512_supported() or torch.cpu._is_avx512_bf16_supported():
        return 0
    x, weight, logits = (
        torch.ones(shape, dtype=dtype)
        for shape in ((chunk, features), (words, features), (chunk, words))
    )
    block = min(words, (2 << 20) // (features * dtype.itemsize))
    return max(
        allocated_by(lambda: torch.mm(x, weight.t(), out=logits)),
        allocated_by(lambda: torch.mm(logits, weight, out=x)),
        allocated_by(lambda: torch.mm(logits[:, :block].t(), x, out=weight[:block])),
    )


def test_bytes_of_a_bfloat16_head() -> None:
    """A chunk's logits, a byte for each element of the weight's sum, a block of products, the
    statistics of rows and the bias's sum in float32."""
    block = min(2 << 20, 2 * WORDS * FEATURES)
    formula = 2 * CHUNK * WORDS + WORDS * FEATURES + block + 8 * ROWS + 4 * WORDS
    peak = peak_bytes(torch.bfloat16, lambda t, y, **k: ours(t, y, chunk=CHUNK, **k))
    inside = bytes_in_products(torch.bfloat16, CHUNK, FEATURES, WORDS)
    assert formula <= peak <= 1.1 * formula + inside
    whole = peak_bytes(torch.bfloat16, lambda t, y, **k: eager(**t, target=y, **k))
    assert peak - inside < whole / 4


def test_bytes_of_a_float32_head() -> None:
    formula = 4 * CHUNK * WORDS + 8 * ROWS + 4 * WORDS
    peak = peak_bytes(torch.float32, lambda t, y, **k: ours(t, y, chunk=CHUNK, **k))
    assert formula <= peak <= 1.1 * formula
    assert peak < peak_bytes(torch.float32, lambda t, y, **k: eager(**t, target=y, **k)) / 10


@pytest.mark.parametrize(
    ("dtype", "rows", "features", "chunk"),
    [
        (torch.float32, 1024, 4, 256),
        (torch.float32, 400, 4, 128),
        (torch.float64, 1024, 4, 128),
        (torch.bfloat16, 1024, 8, 256),
        # A second chunk of 33 rows: their logits take 66 bytes a class, the sum's byte 64.
        (torch.bfloat16, 161, 64, 128),
        (torch.bfloat16, 160, 64, 160),
    ],
)
def test_default_chunks(dtype: torch.dtype, rows: int, features: int, chunk: int) -> None:
    """A quarter of the rows, at least 128, and no more than take 1 KiB a class; all of them where
    the sum of a bfloat16 weight's gradient would take more than the other rows' logits. Counted.
    """
    words = 49999
    formula = dtype.itemsize * chunk * words
    if dtype == torch.bfloat16:  # a block of products, or of the bias's sum in float32
        formula += (words * features if chunk < rows else 0) + (2 << 20)
    peak = peak_bytes(dtype, ours, sizes=(rows, features, words))
    inside = bytes_in_products(dtype, chunk, features, words)
    assert formula <= peak <= 1.05 * formula + inside


def test_rows_losses_save_four_bytes_a_row() -> None:
    tensors = head(40, 8, 64)
    with SavedTensors() as saved:
        ours(tensors, classes_of(40, 64), reduction="none")
    reads = [*tensors.values(), classes_of(40, 64)]
    assert saved.bytes == sum(tensor.nbytes for tensor in reads) + 4 * 40


def test_scaled_backward_and_a_second_one(device: torch.device) -> None:
    """A loss that is multiplied, with retain_graph and without: the same gradients."""
    for dtype in DTYPES:
        tensors = head(30, 8, 65, dtype, device)
        target, wanted = classes_of(30, 65, device), list(tensors.values())
        loss = ours(tensors, target, chunk=8) * 3
        first = torch.autograd.grad(loss, wanted, retain_graph=True)
        before = [gradient.clone() for gradient in first]
        for gradient in first:
            gradient.zero_()  # the user's own
        second = torch.autograd.grad(loss, wanted)
        assert_same_bits(second, before, str(dtype))
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            torch.autograd.grad(loss, wanted)


def test_gradients_that_a_hook_keeps_are_not_written_over() -> None:
    tensors = head(30, 8, 65)
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = ours(tensors, classes_of(30, 65))
    copies = [tensor.clone() for tensor in kept]
    (loss * 3).backward()
    assert_same_bits(kept, copies, "what the hook kept")


def test_backward_of_a_scaled_loss_holds_no_second_gradient() -> None:
    """Accumulation divides each loss: the node's own gradients are scaled where they are."""
    scaled = peak_bytes(torch.float32, lambda t, y, **k: ours(t, y, chunk=CHUNK, **k) / 4)
    plain = peak_bytes(torch.float32, lambda t, y, **k: ours(t, y, chunk=CHUNK, **k))
    assert scaled <= plain + 64
