"""Proves of dropout, gelu_dropout, dropout_add_layer_norm and dropout_add_rms_norm: their decisions
are one mask for one seed, so as random as test_dropout_random.py proves of dropout's; they are the
same in forward, in a checkpoint's recompute and in a compiled backward; no compiler merges calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from memopt.functional import (
    dropout,
    dropout_add_layer_norm,
    dropout_add_rms_norm,
    gelu_dropout,
)
from tests.checkpoint.support import REGIONS, plain
from tests.ops.test_dropout_random import (
    SIZE,
    assert_rate,
    assert_uncorrelated,
)

# Each a function of x whose result is 0, or the residual, where x is dropped.
COLS = 1024


def _sum_of_layer_norm(x: Tensor, p: float) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    output, total = dropout_add_layer_norm(rows, torch.zeros_like(rows), p, rows.shape[-1:])
    return (total + 0 * output).reshape(x.shape)


def _sum_of_rms_norm(x: Tensor, p: float) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    output, total = dropout_add_rms_norm(rows, torch.zeros_like(rows), p, rows.shape[-1:])
    return (total + 0 * output).reshape(x.shape)


FUNCTIONS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "dropout": dropout,
    "gelu_dropout": gelu_dropout,
    "dropout_add_layer_norm": _sum_of_layer_norm,
    "dropout_add_rms_norm": _sum_of_rms_norm,
}
every_op = pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)


def kept(function: Callable, p: float, size: int = SIZE, device: object = "cpu") -> Tensor:
    ones = torch.ones(size // COLS, COLS, device=device)
    return (function(ones, p) != 0).flatten()


@every_op
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_decisions_are_dropouts_for_the_same_seed(
    function: Callable, p: float, device: torch.device
) -> None:
    torch.manual_seed(7)
    expected = [dropout(torch.ones(SIZE, device=device), p) != 0 for _ in range(2)]
    torch.manual_seed(7)
    for mask in expected:
        assert torch.equal(kept(function, p, device=device), mask)


@every_op
def test_rate_and_independence_of_calls_neighbours_and_seeds(
    function: Callable, device: torch.device
) -> None:
    p = 0.3
    torch.manual_seed(1)
    a, b = kept(function, p, device=device), kept(function, p, device=device)
    torch.manual_seed(2)
    c = kept(function, p, device=device)
    for mask in (a, b, c):
        assert_rate(int(mask.sum()), SIZE, p)
        for lag in (1, 8, 16, COLS):
            assert_uncorrelated(mask[lag:], mask[:-lag], p)
    for one, other in ((a, b), (a, c), (b, c)):
        assert_uncorrelated(one, other, p)
    torch.manual_seed(1)
    assert torch.equal(kept(function, p, device=device), a)


@every_op
def test_with_and_without_grad_the_same_mask(function: Callable, device: torch.device) -> None:
    x = torch.ones(10, 100, device=device)
    torch.manual_seed(0)
    expected = function(x, 0.5)
    torch.manual_seed(0)
    assert torch.equal(function(x.requires_grad_(), 0.5), expected)


@every_op
def test_what_is_drawn_does_not_depend_on_size_or_grad(
    function: Callable, device: torch.device
) -> None:
    later = []
    for x in (torch.ones(1, 3), torch.ones(99, 99), torch.ones(1, 3, requires_grad=True)):
        torch.manual_seed(0)
        function(x.to(device), 0.5)
        later.append(torch.rand(5, device=device))
    torch.manual_seed(0)
    function(torch.ones(0, 3, device=device, requires_grad=True), 0.5)
    later.append(torch.rand(5, device=device))
    assert all(torch.equal(t, later[0]) for t in later)


@every_op
@pytest.mark.parametrize("region", REGIONS, ids=lambda region: region.__name__)
def test_checkpoint_draws_the_same_mask_again(
    function: Callable, region, device: torch.device
) -> None:
    weight = torch.randn(16, 16, device=device)

    def body(x: Tensor) -> Tensor:
        return function(function(x.sin(), 0.3) @ weight, 0.5).cos()

    results = []
    for way in (plain, region):
        x = torch.linspace(-1, 1, 160, device=device).reshape(10, 16).requires_grad_()
        torch.manual_seed(5)
        output = way(body, x)
        torch.rand(3, device=device)  # whoever draws in between
        output.sum().backward()
        results.append((output.detach(), x.grad))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@every_op
@pytest.mark.parametrize("backend", ["aot_eager", "aot_eager_decomp_partition"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_forward_and_backward_have_eagers_mask(
    function: Callable, backend: str, dynamic: bool, fresh_compiler: None, device: torch.device
) -> None:
    def around(x: Tensor) -> Tensor:
        return function(x * 2, 0.5) + 1

    graph = torch.compile(around, backend=backend, fullgraph=True, dynamic=dynamic)
    x = torch.linspace(-1, 2, 40 * 33, device=device).reshape(40, 33).requires_grad_()
    for _ in range(3):
        torch.manual_seed(6)
        expected = around(x)
        torch.manual_seed(6)
        output = graph(x)
        (grad,) = torch.autograd.grad(output.sin().sum(), x)
        if device.type == "cpu":  # random.h: the same numbers
            assert torch.equal(output, expected)
            assert torch.equal(grad, torch.autograd.grad(expected.sin().sum(), x)[0])
        else:  # a graph's mask is not eager's, but one in forward and backward
            assert not grad[output == 1].any()
    assert not torch.equal(graph(x), graph(x))


@every_op
@pytest.mark.parametrize("backend", ["aot_eager_decomp_partition", "inductor"])
@pytest.mark.slow
def test_compilers_do_not_merge_calls(
    function: Callable, backend: str, fresh_compiler: None, device: torch.device
) -> None:
    """Two drops of one tensor are two masks, and each comes back in backward."""

    def twice(x: Tensor) -> tuple[Tensor, Tensor]:
        return function(x, 0.5), function(x, 0.5)

    graph = torch.compile(twice, backend=backend, fullgraph=True)
    x = torch.ones(10, 100, device=device, requires_grad=True)
    a, b = graph(x)
    assert not torch.equal(a, b)
    (grad,) = torch.autograd.grad((a + 3 * b).sum(), x)
    slope = float(grad[(a != 0) & (b != 0)].max()) / 4
    torch.testing.assert_close(grad, slope * ((a != 0).float() + 3 * (b != 0).float()))
    with torch.no_grad():
        a, b = graph(x)
    assert not torch.equal(a, b)


@every_op
def test_compiled_checkpoint(
    function: Callable, fresh_compiler: None, device: torch.device
) -> None:
    """The region's recompute is in the backward graph, and draws the same numbers there."""

    def body(x: Tensor) -> Tensor:
        return function(x.sin(), 0.5).exp()

    def region(x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(body, x, use_reentrant=False)

    graph = torch.compile(region, backend="aot_eager_decomp_partition", fullgraph=True)
    x = torch.linspace(0.1, 1, 990, device=device).reshape(10, 99).requires_grad_()
    output = graph(x)
    (grad,) = torch.autograd.grad(output.sum(), x)
    keep = output.detach() != 1
    assert 300 < int(keep.sum()) < 700
    assert torch.equal(grad != 0, keep)
