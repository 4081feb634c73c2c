"""Proves: dropout's decisions look random (rate, neighbours, rows, calls; with fixed seeds, so that
the same numbers are judged in every run) and obey PyTorch's generator (seeds, state, fork_rng).
Where else a mask must be the same: test_dropout_masks.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import memopt
from memopt.functional import dropout
from tests.support.opchecks import opcheck
from tests.support.philox import dropout_bits

ops = torch.ops.memopt
SIZE = 1 << 20

# A test statistic that is standard normal if the numbers are random: 5 is passed once in 2 million
# draws. The seeds are fixed, so that a pass stays one.
SIGMAS = 5.0


def kept(p: float, size: int = SIZE, device: object = "cpu") -> Tensor:
    return dropout(torch.ones(size, device=device), p) != 0


def assert_rate(kept_count: int, size: int, p: float) -> None:
    deviation = (kept_count - size * (1 - p)) / math.sqrt(size * p * (1 - p))
    assert abs(deviation) < SIGMAS


def assert_uncorrelated(a: Tensor, b: Tensor, p: float) -> None:
    """a and b: decisions. The product of centred ones has mean 0 and variance (p (1 - p))^2."""
    centred = (a.double() - (1 - p)) * (b.double() - (1 - p))
    deviation = float(centred.sum()) / (p * (1 - p) * math.sqrt(centred.numel()))
    assert abs(deviation) < SIGMAS


@pytest.mark.parametrize("p", [0.001, 0.1, 0.3, 0.5, 0.9, 0.999])
def test_rate(p: float, device: torch.device) -> None:
    mask = kept(p, device=device)
    assert_rate(int(mask.sum()), SIZE, p)
    for place in range(8):  # of each element of a group
        assert_rate(int(mask[place::8].sum()), SIZE // 8, p)


@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize("lag", [1, 2, 3, 4, 7, 8, 16, 128, 512, 1024, 4096])
def test_neighbours_and_rows_are_independent(p: float, lag: int, device: torch.device) -> None:
    mask = kept(p, device=device)
    assert_uncorrelated(mask[lag:], mask[:-lag], p)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_calls_are_independent(p: float, device: torch.device) -> None:
    masks = [kept(p, device=device) for _ in range(4)]
    for i in range(4):
        for j in range(i):
            assert_uncorrelated(masks[i], masks[j], p)
            assert_uncorrelated(masks[i][1:], masks[j][:-1], p)


def test_seeds_and_offsets_one_apart_are_independent(device: torch.device) -> None:
    x = torch.ones(SIZE, device=device)
    states = [(0, 0), (1, 0), (0, 4), (1 << 32, 0), (0, 1 << 34)]
    masks = [
        ops._dropout_backward(x, torch.tensor(state, device=device), 0.5) != 0 for state in states
    ]
    for i in range(len(masks)):
        for j in range(i):
            assert_uncorrelated(masks[i], masks[j], 0.5)


def test_16_bits_are_uniform() -> None:
    """Chi-square of the high and the low byte, 255 degrees of freedom each."""
    bits = dropout_bits(torch.tensor([2, 4]), SIZE)
    for byte in (bits & 255, bits >> 8):
        counts = torch.bincount(byte, minlength=256).double()
        chi_square = float(((counts - SIZE / 256) ** 2).sum() / (SIZE / 256))
        assert abs(chi_square - 255) < SIGMAS * math.sqrt(2 * 255)


def test_expectation_is_the_input(device: torch.device) -> None:
    x = torch.ones(SIZE, device=device, dtype=torch.float64)
    for p in (0.1, 0.5, 0.9):
        mean = float(dropout(x, p).mean())
        assert abs(mean - 1) < SIGMAS * math.sqrt(p / (1 - p) / SIZE)


def test_seed_decides_and_state_can_be_put_back(device: torch.device) -> None:
    torch.manual_seed(1)
    a, b = kept(0.5, 1000, device), kept(0.5, 1000, device)
    torch.manual_seed(1)
    assert torch.equal(kept(0.5, 1000, device), a)
    assert torch.equal(kept(0.5, 1000, device), b)
    torch.manual_seed(2)
    assert not torch.equal(kept(0.5, 1000, device), a)
    assert not torch.equal(a, b)
    get, put = (
        (torch.cuda.get_rng_state, torch.cuda.set_rng_state)
        if device.type == "cuda"
        else (torch.get_rng_state, torch.set_rng_state)
    )
    state = get()
    c = kept(0.5, 1000, device)
    put(state)
    assert torch.equal(kept(0.5, 1000, device), c)
    with torch.random.fork_rng():
        d = kept(0.5, 1000, device)
    assert torch.equal(kept(0.5, 1000, device), d)


def test_cuda_offset_advances_as_pytorchs(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("the CPU's generator has no offset")
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    before = generator.get_offset()
    _, state = ops._dropout_forward(torch.ones(5, device=device), 0.5)
    assert state.tolist() == [generator.initial_seed(), before]
    assert generator.get_offset() == before + 4


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def test_dynamic_shapes_never_recompile(fresh_compiler: None, device: torch.device) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    graph = torch.compile(lambda x: dropout(x), backend=counter, fullgraph=True, dynamic=True)
    compilations = 0
    for rows in (4, 5, 6, 31):
        graph(torch.ones(rows, 33, device=device, requires_grad=True)).sum().backward()
        compilations = compilations or counter.frame_count
    assert counter.frame_count == compilations


def test_eval_mode_compiles_to_nothing(fresh_compiler: None, device: torch.device) -> None:
    module = memopt.nn.Dropout(0.5).eval()
    x = torch.ones(5, device=device)
    assert torch.equal(torch.compile(module, backend="aot_eager", fullgraph=True)(x), x)


@pytest.mark.parametrize("name", ["dropout", "_dropout_forward"])
@pytest.mark.parametrize("size", [(4, 10), (0, 3)], ids=str)
def test_opcheck(name: str, size: tuple[int, ...], device: torch.device) -> None:
    op = getattr(ops, name).default
    assert torch.Tag.nondeterministic_seeded in op.tags
    for requires_grad in (False, name == "dropout"):
        x = torch.randn(size, device=device).requires_grad_(requires_grad)
        opcheck(op, (x, 0.5), {}, random=True)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck_of_the_backward_op(requires_grad: bool, device: torch.device) -> None:
    x = torch.randn(4, 10, device=device, requires_grad=requires_grad)
    state = torch.tensor([3, 8], device=device)
    torch.library.opcheck(ops._dropout_backward.default, (x, state, 0.5))
