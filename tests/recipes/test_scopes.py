"""Proves: scopes may be left by generators, in any order, and a thread cannot leave what another
has entered; afterwards no hooks and no registry are there.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import memopt
import memopt.functional as M
from tests.recipes.support import FEATURES, assert_same_gradients, kept_bytes, leaf

pytestmark = pytest.mark.usefixtures("collector_off")

X = leaf(4, FEATURES)
LINEAR = leaf(FEATURES, FEATURES, seed=1)


def is_open() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def assert_closed() -> None:
    assert not is_open()
    junk = [torch.randn(FEATURES) for _ in range(100)]  # over what a scope may have freed
    assert_same_gradients(lambda: F.linear(M.gelu(X), LINEAR).sum(), [X, LINEAR])
    assert len(junk) == 100


def in_a_thread(work: Callable[[], object]) -> list[BaseException]:
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # handed to the main thread
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised


def suspended() -> Iterator[None]:
    with memopt.recipes():
        yield


def test_left_twice() -> None:
    scope = memopt.recipes()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"a scope must be left once, by the"):
            scope.__exit__(None, None, None)
        with scope:
            assert is_open()
    assert_closed()


def test_left_by_another_thread() -> None:
    scope = memopt.recipes()
    scope.__enter__()
    (error,) = in_a_thread(lambda: scope.__exit__(None, None, None))
    assert "by the thread that entered it" in str(error)
    assert is_open()
    scope.__exit__(None, None, None)
    assert_closed()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_generator_that_another_thread_drops() -> None:
    """That thread cannot leave the scope, which stays open where it was entered."""

    def work() -> None:
        generators = [suspended()]
        next(generators[0])
        assert in_a_thread(generators.clear) == []
        assert is_open()

    assert in_a_thread(work) == []
    assert_closed()


def test_one_object_in_several_threads() -> None:
    scope = memopt.recipes()
    entered, left = threading.Barrier(2), threading.Barrier(2)

    def work() -> None:
        with scope:
            entered.wait()
            loss = F.linear(M.gelu(X), LINEAR).sum()
            left.wait()
        assert not is_open()
        torch.autograd.grad(loss, [X, LINEAR])

    thread = threading.Thread(target=work)
    thread.start()
    with scope:
        entered.wait()
        left.wait()
    thread.join()
    assert_closed()


def test_scopes_left_in_the_order_of_their_entering() -> None:
    first, second = memopt.recipes(), memopt.recipes()
    between = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
    for scope in (first, between, second):
        scope.__enter__()
    for scope in (first, between, second):
        scope.__exit__(None, None, None)
    del first, second, between
    gc.collect()
    assert_closed()
    assert kept_bytes(lambda: F.linear(M.gelu(X), LINEAR), [LINEAR]) == X.numel() * 4


SCOPES = {
    "recipes": lambda directory: memopt.recipes(),
    "offload": lambda directory: memopt.offload("disk", directory=directory, min_bytes=1),
    "saved_tensors": lambda directory: memopt.saved_tensors("recipe"),
}


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev, torch.func.hessian])
def test_a_reverse_mode_transform_inside_is_refused_by_name(
    transform: Callable[..., Any], scope: str, tmp_path: Path
) -> None:
    with (
        pytest.raises(RuntimeError, match=r"^saved_tensors: torch.func.grad, vjp"),
        SCOPES[scope](tmp_path),
    ):
        transform(lambda x: M.gelu(x).sum())(X.detach())
    assert_closed()


def test_other_errors_pass_a_scope() -> None:
    with pytest.raises(RuntimeError, match=r"^mine: torch.func, saved$"), memopt.recipes():
        raise RuntimeError("mine: torch.func, saved")
    assert_closed()


@pytest.mark.parametrize("scope", SCOPES)
def test_forward_mode_and_vmap_inside(scope: str, tmp_path: Path) -> None:
    """Tangents may be zeros that have no memory."""

    def loss() -> torch.Tensor:
        def of_rows(x: torch.Tensor) -> torch.Tensor:
            return F.linear(M.layer_norm(x, (FEATURES,)), LINEAR).sin()

        _, tangent = torch.func.jvp(
            lambda x: F.linear(x, LINEAR).sin(), (X,), (torch.ones_like(X),)
        )
        rows = torch.func.vmap(lambda x: F.linear(x.sin(), LINEAR))(X)
        return (tangent + rows + of_rows(X)).square().sum()

    def inside() -> torch.Tensor:
        with SCOPES[scope](tmp_path):
            return loss()

    leaves = [X, LINEAR]
    expected = torch.autograd.grad(loss(), leaves)
    for got, wanted in zip(torch.autograd.grad(inside(), leaves), expected, strict=True):
        assert torch.equal(got, wanted)
