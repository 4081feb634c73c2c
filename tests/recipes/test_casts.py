"""Proves: a recipe goes through the cast of an output that autocast makes for a matrix product. The
copy is made again with the output's bits and converted, once for all that saved one; and only where
the copy is provably nothing but that.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import memopt
import memopt.functional as M
from tests.recipes.support import (
    FEATURES,
    assert_same_gradients,
    gradients,
    kept_bytes,
    leaf,
    scope,
)
from tests.support.record_ops import RecordOps

pytestmark = pytest.mark.usefixtures("collector_off")

X = leaf(6, FEATURES)
W, B = leaf(FEATURES, seed=1), leaf(FEATURES, seed=2)
LINEARS = [leaf(FEATURES, FEATURES, seed=3 + i) for i in range(3)]
LEAVES = [X, W, B, *LINEARS]
COPY = X.numel() * 2
LOW = torch.bfloat16


def norm(x: Tensor) -> Tensor:
    return M.layer_norm(x, (FEATURES,), W, B)


def under_autocast(run: Callable[[], Tensor], cache: bool = True) -> Callable[[], Tensor]:
    def inside() -> Tensor:
        with torch.autocast("cpu", LOW, cache_enabled=cache):
            return run().float().square().sum()

    return inside


def linear(x: Tensor) -> Tensor:
    return F.linear(x, LINEARS[0])


def dropped(run: Callable[[], Tensor]) -> int:
    """Bytes that recipes spare."""
    return kept_bytes(run, recipes=False) - kept_bytes(run)


WHAT: dict[str, tuple[Callable[[], Tensor], int]] = {
    "norm": (lambda: linear(norm(X)), COPY),
    "rms_norm": (lambda: linear(M.rms_norm(X, (FEATURES,), W)), COPY),
    "gelu": (lambda: linear(M.gelu(X)), COPY),
    "dropout of gelu": (lambda: linear(M.dropout(M.gelu(X), 0.5)), COPY),
    # The norm's own output is what GELU's node saves.
    "dropout of gelu of norm": (
        lambda: linear(M.dropout(M.gelu(norm(X)), 0.5)),
        COPY + 2 * COPY,
    ),
    "gelu_dropout": (lambda: linear(M.gelu_dropout(X, 0.5)), COPY),
    "swiglu": (lambda: linear(M.swiglu(X, X * 2)), COPY),
    "a view, as Conv1D makes": (
        lambda: torch.addmm(B, norm(X).view(-1, FEATURES), LINEARS[0]),
        COPY,
    ),
    "sizes in between": (lambda: linear(norm(X).view(2, 3, -1).flatten(0, 1)), COPY),
    "three dimensions": (lambda: linear(norm(X.view(2, 3, -1))), COPY),
    "by hand": (lambda: torch.mm(norm(X).to(LOW), LINEARS[0].to(LOW)), COPY),
}


@pytest.mark.parametrize("what", WHAT)
@pytest.mark.parametrize("cache", [True, False], ids=["weight cache", "no cache"])
def test_same_bits_and_no_copy_kept(what: str, cache: bool) -> None:
    run, spared = WHAT[what]
    assert_same_gradients(under_autocast(run, cache), LEAVES)
    assert dropped(under_autocast(run, cache)) == spared


def q_k_v() -> Tensor:
    h = norm(X)
    q, k, v = (F.linear(h, weight) for weight in LINEARS)
    return q * k.sigmoid() + v


def test_one_restore_for_all_linears() -> None:
    """Autocast copies the tensor for each of them."""
    run = under_autocast(q_k_v)
    assert_same_gradients(run, LEAVES)
    assert dropped(run) == 3 * COPY
    with memopt.recipes():
        loss = run()
    with RecordOps() as record:
        torch.autograd.grad(loss, LEAVES)
    ops = [str(op) for op in record.ops]
    assert ops.count("memopt._norm_forward.default") == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_any_conversion(dtype: torch.dtype) -> None:
    """And several of one output."""

    def run() -> Tensor:
        y = norm(X)
        low = torch.mm(y.to(dtype), LINEARS[0].to(dtype)).float()
        return (low + torch.mm(y, LINEARS[1])).square().sum()

    assert_same_gradients(run, LEAVES)
    size = torch.empty((), dtype=dtype).element_size()
    assert dropped(run) == X.nbytes + X.numel() * size


def test_of_a_16_bit_output() -> None:
    def run() -> Tensor:
        return torch.mm(M.gelu(X.to(LOW)).float(), LINEARS[0]).sum()

    assert_same_gradients(run, LEAVES)
    assert dropped(run) == X.nbytes


def test_the_graph_kept_and_used_twice() -> None:
    run = under_autocast(q_k_v)
    expected = gradients(run, LEAVES, recipes=False)
    with memopt.recipes():
        loss = run()
    for _ in range(2):
        again = torch.autograd.grad(loss, LEAVES, retain_graph=True)
        assert all(torch.equal(a, e) for a, e in zip(again, expected, strict=True))
    loss.backward()
    parts = [torch.autograd.grad(run(), tensor)[0] for tensor in LEAVES]
    for tensor, e, part in zip(LEAVES, expected, parts, strict=True):
        assert torch.equal(tensor.grad, e)
        assert torch.equal(part, e)
        tensor.grad = None


def test_create_graph() -> None:
    def second() -> Tensor:
        grads = torch.autograd.grad(under_autocast(q_k_v)(), LEAVES[:4], create_graph=True)
        return torch.stack([g.square().sum() for g in grads]).sum()

    assert_same_gradients(second, LEAVES)


def test_inside_a_region() -> None:
    def run() -> Tensor:
        return memopt.checkpoint(under_autocast(q_k_v)).sum()

    assert_same_gradients(run, LEAVES)


def test_backward_under_another_autocast() -> None:
    """PyTorch's products run in its dtype; what they read is forward's."""
    results = []
    for recipes in (False, True):
        with scope(recipes):
            loss = under_autocast(q_k_v)()
        with torch.autocast("cpu", torch.float16):
            results.append(torch.autograd.grad(loss, LEAVES))
    assert all(torch.equal(a, e) for a, e in zip(*results, strict=True))


class ToCopy(torch.autograd.Function):
    """Its node is called like a cast's, almost."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:  # type: ignore[override]
        return (x * 2).to(LOW)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad.float() * 2


def written(y: Tensor) -> Tensor:
    with torch.no_grad():
        y.add_(1)
    return y


# Saved tensors that look like casts of an output and are none, or not all of one.
OTHERS: dict[str, Callable[[], Tensor]] = {
    "copy written in place": lambda: norm(X).to(LOW).add_(1),
    "copy written without a graph": lambda: written(norm(X).to(LOW)),
    "output written before": lambda: written(norm(X)).to(LOW),
    "output written before, with a graph": lambda: norm(X).add_(1).to(LOW),
    "of rows": lambda: norm(X)[:4].to(LOW),
    "of one row, expanded": lambda: norm(X)[:1].expand(6, -1).to(LOW),
    "transposed": lambda: norm(X).view(2, 3, -1).transpose(0, 1).to(LOW).reshape(6, -1),
    "scaled": lambda: (norm(X) * 2).to(LOW),
    "by a function of one's own": lambda: ToCopy.apply(norm(X)),
    "in another memory format": lambda: (
        norm(X.view(1, 3, 2, FEATURES))
        .to(LOW, memory_format=torch.channels_last)
        .reshape(6, FEATURES)
    ),
    "of the sum": lambda: M.add_layer_norm(X, X * 2, (FEATURES,), W, B)[1].to(LOW),
}


@pytest.mark.parametrize("other", OTHERS)
def test_what_is_no_cast_of_an_output_is_kept(other: str) -> None:
    def run() -> Tensor:
        return torch.mm(OTHERS[other](), LINEARS[0].to(LOW)).float().square().sum()

    assert_same_gradients(run, LEAVES)
    assert dropped(run) == 0


def test_written_after_it_was_saved() -> None:
    """The copy in memory is not what backward reads. (PyTorch without recipes raises an error.)"""
    expected = gradients(under_autocast(lambda: linear(norm(X))), LEAVES, recipes=False)
    with memopt.recipes():
        y = norm(X)
        low = y.to(LOW)
        loss = torch.mm(low, LINEARS[0].to(LOW).t()).float().square().sum()
        with torch.no_grad():
            low.add_(1)
            y.add_(1)
    for a, e in zip(torch.autograd.grad(loss, LEAVES[:4]), expected[:4], strict=True):
        assert torch.equal(a, e)


def test_output_written_between_two_casts() -> None:
    """Each linear gets the gradient of what it read."""

    def run() -> Tensor:
        y = norm(X)
        first = torch.mm(y.to(LOW), LINEARS[0].to(LOW))
        second = torch.mm(written(y).to(LOW), LINEARS[1].to(LOW))
        return (first * second).float().sum()

    assert_same_gradients(run, LEAVES)


def test_nothing_stays_alive() -> None:
    """Nor does a graph of which no backward is asked."""
    live = memopt._extension._C.live_handles()
    with memopt.recipes():
        for _ in range(300):
            under_autocast(q_k_v)()
    assert memopt._extension._C.live_handles() == live
