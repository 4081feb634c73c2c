"""Proves that nobody notices where recipes call no hook (test_without_hooks.py): recipes read what
nodes hold without one; writes in place are found; other people's hooks, modes, transforms,
functions of Python, threads, regions, second derivatives and compiled autograd get what they got.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import memopt
import memopt.functional as M
from memopt._extension import _C
from tests.recipes.support import FEATURES, gradients, leaf

X, OTHER = leaf(24, FEATURES), leaf(24, FEATURES, seed=1)
SQUARE = leaf(FEATURES, FEATURES, seed=2)
LEAVES = [X, OTHER, SQUARE]


def in_recipes(run: Any) -> Any:
    with memopt.recipes():
        return run()


def test_a_tensor_that_a_node_holds_without_a_hook_is_there_for_recipes() -> None:
    """A dropout does not save its input. Its output has a recipe while another node holds that."""

    def run(of_a_living_node: bool) -> int:
        x = (X * 2).detach().requires_grad_()
        with memopt.recipes():
            other = x * OTHER
            if not of_a_living_node:
                del other
            dropped = M.dropout(x, 0.5)
            storage = StorageWeakRef(dropped.untyped_storage())
            result = dropped @ SQUARE
            del dropped
        gone = storage.expired()
        del result
        return gone

    assert run(True)
    assert not run(False)


def test_an_input_written_since_is_not_read_by_a_recipe() -> None:
    x = X.detach().clone()
    with memopt.recipes():
        loss = (x * OTHER).sum()
        dropped = M.dropout(x.requires_grad_(), 0.5)
        with torch.no_grad():
            x.add_(1)
        result = dropped @ SQUARE
    assert result.grad_fn is not None
    assert torch.equal(result.grad_fn._saved_self, dropped)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_write_to_an_output_after_it_was_saved_raises() -> None:
    for made in (lambda: M.gelu(X), lambda: X * 2):
        with memopt.recipes():
            y = made()
            loss = (y * OTHER).sum()
        y.detach().add_(1)
        if y.grad_fn is not None and "Mul" in y.grad_fn.name():
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
        else:  # recomputed from X, as it was saved
            expected = torch.autograd.grad((F.gelu(X) * OTHER).sum(), OTHER)[0]
            torch.testing.assert_close(torch.autograd.grad(loss, OTHER)[0], expected)


def test_a_function_of_python_still_meets_its_recipe() -> None:
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
            ctx.save_for_backward(a, b)
            return a * b

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            a, b = ctx.saved_tensors
            return grad * b, grad * a

    packs = _C.packs()
    with memopt.recipes():
        y = M.gelu(X)
        storage = StorageWeakRef(y.untyped_storage())
        loss = Product.apply(y, OTHER).sum()
        del y
    assert storage.expired()
    assert _C.packs() == packs + 2
    expected = torch.autograd.grad((M.gelu(X) * OTHER).sum(), (X, OTHER))
    for a, e in zip(torch.autograd.grad(loss, (X, OTHER)), expected, strict=True):
        assert torch.equal(a, e)


def test_an_op_that_is_not_known_meets_hooks() -> None:
    packs = _C.packs()
    with memopt.recipes():
        y = M.gelu(X)
        storage = StorageWeakRef(y.untyped_storage())
        result = y.sinh()
        del y
    assert storage.expired()
    assert _C.packs() == packs + 1
    assert result.grad_fn is not None


def test_hooks_are_on_again_after_an_op_that_raises() -> None:
    with memopt.recipes():
        y = M.gelu(X)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            torch.mm(y, y)
        packs = _C.packs()
        y.sinh()
    assert _C.packs() == packs + 1


def test_hooks_inside_the_scope_get_every_tensor() -> None:
    seen: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor.detach()

    with memopt.recipes():
        y = M.gelu(X)
        with saved_tensors_hooks(note, lambda t: t):
            (y * OTHER).sum()
            M.silu(y)
        (y * OTHER).sum()
    assert [t.data_ptr() for t in seen] == [OTHER.data_ptr(), y.data_ptr(), y.data_ptr()]


def test_hooks_around_the_scope_get_every_tensor_without_a_recipe() -> None:
    seen: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        seen.append(tensor.data_ptr())
        return tensor.detach()

    with saved_tensors_hooks(note, lambda t: t), memopt.recipes():
        loss = (M.gelu(X) * OTHER).sum()
    assert sorted(seen) == sorted([X.data_ptr(), OTHER.data_ptr()])
    loss.backward()
    X.grad = OTHER.grad = None


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_a_mode_takes_the_way_with_hooks() -> None:
    def run() -> Tensor:
        return F.linear(M.gelu(X), SQUARE).square().sum()

    expected = gradients(run, LEAVES, recipes=False)
    packs = _C.packs()
    with memopt.recipes(), Passing():
        loss = run()
    assert _C.packs() > packs
    loss.backward()
    for tensor, e in zip(LEAVES, expected, strict=True):
        assert e is None or torch.equal(tensor.grad, e)  # type: ignore[arg-type]
        tensor.grad = None


def test_a_subclass_takes_the_way_with_hooks() -> None:
    class Marked(Tensor):
        pass

    y = X.detach().as_subclass(Marked).requires_grad_()
    with memopt.recipes():
        loss = (y * OTHER).sum()
    assert torch.equal(torch.autograd.grad(loss, y)[0], OTHER)


def test_a_transform_inside_the_scope() -> None:
    with memopt.recipes():
        y = M.gelu(X)
        mapped = torch.vmap(lambda row: (row * row).sum())(y)
        storage = StorageWeakRef(y.untyped_storage())
        del y
    assert torch.equal(
        torch.autograd.grad(mapped.sum(), X)[0],
        torch.autograd.grad(torch.vmap(lambda row: (row * row).sum())(M.gelu(X)).sum(), X)[0],
    )
    del mapped
    assert storage.expired()


def test_another_thread_is_in_no_scope() -> None:
    """A thread that computes with an output of this one saves as PyTorch does."""
    with memopt.recipes():
        y = M.gelu(X)
        results: list[Tensor] = []
        thread = threading.Thread(target=lambda t: results.append(t * OTHER), args=(y,))
        thread.start()
        thread.join()
        assert (y * OTHER).grad_fn._raw_saved_self is not None  # type: ignore[union-attr]
    storage = StorageWeakRef(y.untyped_storage())
    del y
    assert not storage.expired()
    assert torch.equal(torch.autograd.grad(results[0].sum(), OTHER)[0], M.gelu(X).detach())


def test_a_graph_is_differentiated_twice_and_its_gradient_again() -> None:
    def run() -> list[Tensor]:
        loss = (F.linear(M.gelu(X), SQUARE).tanh() * OTHER).sum()
        first = torch.autograd.grad(loss, [X, SQUARE], create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), [X, SQUARE, OTHER])
        return [*first, *second]

    for a, e in zip(in_recipes(run), run(), strict=True):
        assert torch.equal(a, e)


def test_a_region_inside_the_scope_gets_everything() -> None:
    def region(x: Tensor) -> Tensor:
        return F.linear(M.gelu(x), SQUARE).exp()

    live = _C.live_handles()
    result = memopt.checkpoint(region, X)
    alone = _C.live_handles() - live
    del result
    with memopt.recipes():
        result = memopt.checkpoint(region, X)
    assert _C.live_handles() - live >= alone > 0
    assert torch.equal(
        torch.autograd.grad(result.sum(), X)[0], torch.autograd.grad(region(X).sum(), X)[0]
    )


def test_compiled_autograd_runs_recipes() -> None:
    from torch._dynamo import compiled_autograd

    def run() -> Tensor:
        return F.linear(M.gelu(X), SQUARE).square().sum()

    expected = gradients(run, LEAVES, recipes=False)
    loss = in_recipes(run)
    with compiled_autograd._enable(lambda graph: graph):
        loss.backward()
    for tensor, e in zip(LEAVES, expected, strict=True):
        assert e is None or torch.equal(tensor.grad, e)  # type: ignore[arg-type]
        tensor.grad = None
