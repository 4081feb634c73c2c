"""Proves: dropout keeps exactly the elements that its rule names (Philox4x32-10 by the published
known answers, one seed and offset a call, the element's index), whatever the dtype, layout, number
of threads or instruction set; p = 0, p = 1 and special values are as in PyTorch; bad arguments
raise an error that names them.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from memopt.functional import dropout
from tests.support.forks import run_in_forks
from tests.support.philox import KNOWN_ANSWERS, dropout_bits, keep_mask, philox4x32_10, scaled
from tests.support.shapes import COLS, LAYOUTS, lazily_negated, misaligned, random_normal

from .test_cpu_capability import RUNNABLE

ops = torch.ops.memopt
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def normal(*size: int, dtype: torch.dtype = torch.float32, device: object = "cpu") -> Tensor:
    return random_normal(*size).to(device=device, dtype=dtype)


def state_of(seed: int, offset: int, device: object = "cpu") -> Tensor:
    return torch.tensor([seed, offset], device=device)


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_reference_gives_the_published_answers(counter, key, words) -> None:
    """The measuring stick itself."""
    assert tuple(philox4x32_10(torch.tensor([counter]), key)[0].tolist()) == words


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS[:1])
def test_kernel_gives_the_published_answers(counter, key, words, device: torch.device) -> None:
    """Read off bit by bit: an element is dropped at exactly those p that exceed its 16 bits."""
    x = torch.ones(8, dtype=torch.float64, device=device)
    found = torch.zeros(8, dtype=torch.int64, device=device)
    for bit in reversed(range(16)):
        trial = found + (1 << bit)
        for element in range(8):
            threshold = int(trial[element])
            kept = ops._dropout_backward(x, state_of(0, 0, device), threshold / 65536)[element]
            if kept != 0:
                found[element] = threshold
    expected = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    assert found.tolist() == expected


@every_dtype
@pytest.mark.parametrize("size", [*COLS, 512, 513, 70000])
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_keeps_what_the_rule_names(
    dtype: torch.dtype, size: int, p: float, device: torch.device
) -> None:
    x = normal(size, dtype=dtype, device=device)
    output, state = ops._dropout_forward(x, p)
    expected = scaled(x, keep_mask(state, size, p), p)
    assert torch.equal(output, expected)
    assert torch.equal(ops._dropout_backward(x, state, p), output)


@pytest.mark.parametrize(
    ("seed", "offset"),
    [(0, 0), (-1, -4), (0x299F31D0A4093822, 4 * 0x05A308D3243F6A88), (1 << 32, 1 << 34), (7, 4)],
)
def test_all_64_bits_of_seed_and_offset_count(seed: int, offset: int, device: torch.device) -> None:
    x = torch.ones(1000, device=device)
    output = ops._dropout_backward(x, state_of(seed, offset, device), 0.5)
    assert torch.equal(output != 0, keep_mask(state_of(seed, offset), 1000, 0.5).to(device))


def test_group_numbers_beyond_32_bits() -> None:
    """The rule itself; 2^35 elements are too many for a test of the kernels."""
    bits = dropout_bits(state_of(1, 0), 16, first=(1 << 35) - 8)
    later = dropout_bits(state_of(1, 0), 8, first=1 << 35)
    assert torch.equal(bits[8:], later)
    assert not torch.equal(later, dropout_bits(state_of(1, 0), 8))


@every_dtype
def test_mask_does_not_depend_on_the_dtype(dtype: torch.dtype, device: torch.device) -> None:
    output = ops._dropout_backward(
        torch.ones(3000, dtype=dtype, device=device), state_of(5, 8, device), 0.3
    )
    assert torch.equal(output != 0, keep_mask(state_of(5, 8), 3000, 0.3).to(device))


@every_dtype
def test_number_of_threads(dtype: torch.dtype, restore_num_threads: None) -> None:
    x = normal(300_007, dtype=dtype)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        torch.manual_seed(3)
        results.append(dropout(x, 0.1))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@every_dtype
def test_an_element_does_not_depend_on_the_others(dtype: torch.dtype, device: torch.device) -> None:
    """The first n elements of a tensor are those of the tensor of n elements."""
    state = state_of(11, 4, device)
    whole = ops._dropout_backward(normal(5000, dtype=dtype, device=device), state, 0.2)
    for size in (1, 7, 8, 9, 63, 511, 513, 4097):
        x = normal(5000, dtype=dtype, device=device)[:size].clone()
        assert torch.equal(ops._dropout_backward(x, state, 0.2), whole[:size])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layout_changes_no_bit(layout: str, dtype: torch.dtype, device: torch.device) -> None:
    """Elements are numbered as in the contiguous tensor."""
    x, grad = normal(6, 10, 129, dtype=dtype, device=device), normal(6, 10, 129, device=device)
    grad = grad.to(dtype)
    results = []
    for change in (lambda t: t, LAYOUTS[layout]):
        leaf = change(x).detach().requires_grad_()
        torch.manual_seed(1)
        output = dropout(leaf, 0.4)
        assert output.stride() == torch.nn.functional.dropout(leaf).stride()
        results.append((output, *torch.autograd.grad(output, leaf, change(grad))))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_lazily_negated_and_expanded(device: torch.device) -> None:
    x = normal(5, 130, device=device)
    state = state_of(2, 0, device)
    expected = ops._dropout_backward(x, state, 0.5)
    assert torch.equal(ops._dropout_backward(lazily_negated(x), state, 0.5), expected)
    row = x[:1].expand(5, 130)
    expected = ops._dropout_backward(row.contiguous(), state, 0.5)
    assert torch.equal(ops._dropout_backward(row, state, 0.5), expected)


@pytest.mark.parametrize("elements", [1, 3, 8, 63])
def test_alignment(elements: int, device: torch.device) -> None:
    for dtype in DTYPES:
        x = normal(5001, dtype=dtype, device=device)
        state = state_of(9, 12, device)
        expected = ops._dropout_backward(x, state, 0.5)
        assert torch.equal(ops._dropout_backward(misaligned(x, elements), state, 0.5), expected)


@every_dtype
def test_special_values_as_in_pytorch(dtype: torch.dtype, device: torch.device) -> None:
    """Multiplied by 0 or the scale: a dropped infinity or NaN is NaN, a dropped -1 is -0."""
    values = [math.inf, -math.inf, math.nan, 0.0, -0.0, -1.0, torch.finfo(dtype).max]
    x = torch.tensor(values, dtype=dtype, device=device).repeat(40)
    output, state = ops._dropout_forward(x, 0.5)
    keep = keep_mask(state, x.numel(), 0.5).to(device)
    expected = x * (keep.to(dtype) * 2)
    torch.testing.assert_close(output, expected, rtol=0, atol=0, equal_nan=True)
    ours, torchs = output.nan_to_num(), expected.nan_to_num()
    assert torch.equal(ours.signbit(), torchs.signbit())


@every_dtype
def test_p_of_one_multiplies_by_zero_as_pytorch(dtype: torch.dtype, device: torch.device) -> None:
    x = torch.tensor([1.0, -1.0, math.inf, -math.inf, math.nan], dtype=dtype, device=device)
    ours, torchs = dropout(x, 1.0), F.dropout(x, 1.0)
    torch.testing.assert_close(ours, torchs, rtol=0, atol=0, equal_nan=True)
    leaf = normal(1000, dtype=dtype, device=device).requires_grad_()
    output = dropout(leaf, 1.0)
    output.sum().backward()
    assert not output.any()
    assert not leaf.grad.any()


def test_p_of_zero_and_eval_are_the_identity(device: torch.device) -> None:
    """The tensor itself, and nothing is drawn."""
    x = normal(10, device=device).requires_grad_()
    before = torch.get_rng_state()
    assert dropout(x, 0.5, training=False) is x
    assert dropout(x, 0.0) is x
    assert dropout(x, 1.0, training=False) is x
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(ops.dropout(x, 0.0), x)


@pytest.mark.parametrize("p", [-0.1, 1.1, math.nan, math.inf])
@pytest.mark.parametrize("training", [True, False])
def test_bad_p_is_named(p: float, training: bool, device: torch.device) -> None:
    x = torch.zeros(3, device=device)
    message = r"dropout: p must be between 0 and 1, got "
    with pytest.raises(ValueError, match=message + ("nan" if p != p else str(p))):
        dropout(x, p, training)
    with pytest.raises(ValueError, match=message):
        ops.dropout(x, p)
    with pytest.raises(ValueError, match=message):
        ops._dropout_forward(x, p)
    with pytest.raises(ValueError, match=r"dropout backward: p must be"):
        ops._dropout_backward(x, state_of(0, 0, device), p)


def test_bad_input_is_named(device: torch.device) -> None:
    with pytest.raises(RuntimeError, match="dropout: input must have dtype"):
        dropout(torch.zeros(3, dtype=torch.int32, device=device))
    with pytest.raises(RuntimeError, match="dropout: input must be a dense"):
        dropout(torch.eye(3, device=device).to_sparse())
    x = torch.zeros(3, device=device)
    for state in (torch.zeros(2), torch.zeros(3, dtype=torch.int64), torch.zeros(2, 2).long()):
        with pytest.raises(RuntimeError, match=r"rng_state must be an int64 tensor \[seed, off"):
            ops._dropout_backward(x, state.to(device), 0.5)
    with pytest.raises(RuntimeError, match="rng_state must be on grad_output's device"):
        ops._dropout_backward(x, torch.zeros(2, dtype=torch.int64, device="meta"), 0.5)


def test_autocast_leaves_the_dtype_alone(device: torch.device) -> None:
    x = normal(100, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        assert dropout(x).dtype == F.dropout(x).dtype == torch.float32


def test_vmap_and_forward_mode(device: torch.device) -> None:
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.grad(lambda x: dropout(x).sum())(normal(3, device=device))


def test_meta_runs_without_memory() -> None:
    huge = torch.empty(1, 8, device="meta").expand(1 << 50, 8).requires_grad_()
    output = dropout(huge)
    output.backward(torch.empty(1, 8, device="meta").expand(1 << 50, 8))
    assert output.shape == huge.shape
    assert huge.grad.shape == huge.shape


CAPABILITY_PROGRAM = """
import hashlib, torch, memopt
digest = hashlib.sha256()
for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
    for size in (1, 7, 33, 129, 513, 4099, 70001):
        x = (1 + torch.arange(size) % 1000).to(dtype)
        for p in (0.1, 0.5, 0.9, 1.0):
            torch.manual_seed(size)
            output, state = torch.ops.memopt._dropout_forward(x, p)
            assert torch.equal(torch.ops.memopt._dropout_backward(x, state, p), output)
            digest.update(output.double().numpy().tobytes())
print(digest.hexdigest())
"""


@pytest.mark.slow
def test_every_instruction_set_gives_the_same_bits(child_environment: dict[str, str]) -> None:
    """Also where stores go past the cache."""
    settings = [
        {"MEMOPT_CPU_CAPABILITY": capability, "MEMOPT_CPU_CACHE_BYTES": str(cache_bytes)}
        for capability in RUNNABLE
        for cache_bytes in (0, 1 << 60)
    ]
    digests = set(run_in_forks(CAPABILITY_PROGRAM, settings, child_environment))
    assert len(digests) == 1
