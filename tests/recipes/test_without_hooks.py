"""Proves that recipes call a hook for no tensor that an op which they know saves (csrc/python/
savers.h): what is held, what backward computes and what others observe is as it is with hooks. The
way with hooks is forced by a pair of hooks around the scope, which must get every tensor.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import memopt
import memopt.functional as M
from memopt._extension import _C
from memopt.live_bytes import LiveBytes
from tests.recipes.support import FEATURES, gradients, leaf

ROWS = 6
SHAPE = (2, 4, ROWS, FEATURES)
X, OTHER = leaf(*SHAPE), leaf(*SHAPE, seed=1)
SQUARE = leaf(FEATURES, FEATURES, seed=2)
KERNEL = leaf(3, 4, 3, 3, seed=3)
W, B = leaf(FEATURES, seed=4), leaf(FEATURES, seed=5)
LEAVES = [X, OTHER, SQUARE, KERNEL, W, B]
TARGET = torch.zeros(2 * 4 * ROWS, dtype=torch.long)


def flat(y: Tensor) -> Tensor:
    return y.view(-1, FEATURES)


def batched(y: Tensor) -> Tensor:
    return y.view(-1, ROWS, FEATURES)


# By the name of the node whose op saves something: how it reads a tensor.
SAVERS: dict[str, Callable[[Tensor], Tensor]] = {
    "AddmmBackward0": lambda y: torch.addmm(B, flat(y), SQUARE),
    "MmBackward0": lambda y: flat(y) @ SQUARE,
    "BmmBackward0": lambda y: torch.bmm(batched(y), batched(y).transpose(1, 2)),
    "BaddbmmBackward0": lambda y: torch.baddbmm(B, batched(y), batched(y).mT @ batched(OTHER)),
    "ConvolutionBackward0": lambda y: F.conv2d(y, KERNEL),
    "MulBackward0": lambda y: y * OTHER,
    "DivBackward0": lambda y: OTHER / (y + 3.0),
    "PowBackward0": lambda y: y.pow(3),
    "ExpBackward0": lambda y: y.exp(),
    "RsqrtBackward0": lambda y: y.exp().rsqrt(),
    "TanhBackward0": lambda y: y.tanh(),
    "ReluBackward0": lambda y: y.relu(),
    "SigmoidBackward0": lambda y: y.sigmoid(),
    "SiluBackward0": lambda y: F.silu(y),
    "WhereBackward0": lambda y: torch.where(y.detach() > 0, y, OTHER),
    "EmbeddingBackward0": lambda y: F.embedding(TARGET, SQUARE) * flat(y),
    "SoftmaxBackward0": lambda y: y.softmax(-1) * y,
    "LogSoftmaxBackward0": lambda y: y.log_softmax(-1) * y,
    "NllLossBackward0": lambda y: F.nll_loss(flat(y), TARGET),
    "ScaledDotProductFlashAttentionForCpuBackward0": lambda y: F.scaled_dot_product_attention(
        y, y, OTHER
    ),
    "linear": lambda y: F.linear(y, SQUARE, B),
    "a view": lambda y: y.transpose(-1, -2) @ OTHER,
    "a slice": lambda y: y[:, 1:, 2:] * OTHER[:, 1:, 2:],
    "detached": lambda y: y.detach() * OTHER,
    "several": lambda y: (y * OTHER).sum() + F.linear(y, SQUARE).exp().sum() + (y @ SQUARE).sum(),
}

MADE: dict[str, Callable[[], Tensor]] = {
    "gelu": lambda: M.gelu(X),
    "layer_norm": lambda: M.layer_norm(X, (FEATURES,), W, B),
    "no recipe": lambda: X + OTHER,
}


def to_outer_hooks(run: Callable[[], Any]) -> Any:
    with saved_tensors_hooks(lambda t: t.detach(), lambda t: t):
        return run()


def in_scope(run: Callable[[], Any]) -> Any:
    with memopt.recipes():
        return run()


def left_and_packed(run: Callable[[], Tensor]) -> tuple[int, int]:
    packs = _C.packs()
    with LiveBytes() as live:
        result = run()
    del result
    return live.left, _C.packs() - packs


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("saver", SAVERS)
def test_without_a_hook_the_same_is_held_and_computed(saver: str, made: str) -> None:
    def run() -> Tensor:
        return SAVERS[saver](MADE[made]()).square().sum()

    def half() -> Tensor:
        return SAVERS[saver](MADE[made]())

    live = _C.live_handles()
    without, packs = left_and_packed(lambda: in_scope(half))
    hooked, hooked_packs = left_and_packed(lambda: to_outer_hooks(lambda: in_scope(half)))
    assert without == hooked
    assert packs == 0
    assert hooked_packs > 0
    expected = gradients(run, LEAVES, recipes=False)
    for actual in (
        gradients(run, LEAVES, recipes=True),
        to_outer_hooks(lambda: gradients(run, LEAVES, recipes=True)),
    ):
        for a, e in zip(actual, expected, strict=True):
            assert (a is None) == (e is None)
            assert a is None or torch.equal(a, e)
    assert _C.live_handles() == live


def test_the_ops_of_these_tests_are_those_that_are_known() -> None:
    """Each name above is the node of its own op, somewhere in the graph."""
    for name, saver in SAVERS.items():
        if not name.endswith("0"):
            continue
        names, waiting = set(), [saver(X * 1).grad_fn]
        while waiting:
            node = waiting.pop()
            if node is not None:
                names.add(node.name())
                waiting += [following for following, _ in node.next_functions]
        assert name in names


@pytest.mark.parametrize("saver", ["MmBackward0", "MulBackward0", "SiluBackward0"])
def test_an_output_is_freed_and_recomputed_without_a_hook(saver: str) -> None:
    packs = _C.packs()
    with memopt.recipes():
        y = M.layer_norm(X, (FEATURES,), W, B)
        storage, expected = StorageWeakRef(y.untyped_storage()), y.detach().clone()
        result = SAVERS[saver](y)
        del y
    assert storage.expired()
    assert _C.packs() == packs
    node = result.grad_fn
    assert node is not None
    assert torch.equal(node._saved_self.view(SHAPE), expected)
    with pytest.raises(RuntimeError, match="already been set"):
        node._raw_saved_self.register_hooks(lambda t: t, lambda t: t)


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
            result = flat(dropped) @ SQUARE
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
        result = flat(dropped) @ SQUARE
    assert result.grad_fn is not None
    assert torch.equal(result.grad_fn._saved_self, flat(dropped))
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
        result = y.sin()
        del y
    assert storage.expired()
    assert _C.packs() == packs + 1
    assert result.grad_fn is not None


def test_hooks_are_on_again_after_an_op_that_raises() -> None:
    with memopt.recipes():
        y = M.gelu(X)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            torch.mm(flat(y), flat(y))
        packs = _C.packs()
        y.sin()
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
        mapped = torch.vmap(lambda row: (row * row).sum())(flat(y))
        storage = StorageWeakRef(y.untyped_storage())
        del y
    assert torch.equal(
        torch.autograd.grad(mapped.sum(), X)[0],
        torch.autograd.grad(torch.vmap(lambda row: (row * row).sum())(flat(M.gelu(X))).sum(), X)[0],
    )
    del mapped
    assert storage.expired()


@pytest.mark.parametrize("made", ["gelu", "layer_norm"])
def test_the_copy_that_autocast_makes_is_freed_without_a_hook(made: str) -> None:
    def run() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.linear(MADE[made](), SQUARE)

    without, packs = left_and_packed(lambda: in_scope(run))
    hooked, _ = left_and_packed(lambda: to_outer_hooks(lambda: in_scope(run)))
    assert without == hooked
    assert packs == 0
    expected = gradients(lambda: run().float().sum(), LEAVES, recipes=False)
    actual = gradients(lambda: run().float().sum(), LEAVES, recipes=True)
    for a, e in zip(actual, expected, strict=True):
        assert e is None or torch.equal(a, e)  # type: ignore[arg-type]


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

    for a, e in zip(in_scope(run), run(), strict=True):
        assert torch.equal(a, e)


def test_a_region_inside_the_scope_has_its_hook_on_everything() -> None:
    def region(x: Tensor) -> Tensor:
        return F.linear(M.gelu(x), SQUARE).exp()

    packs = _C.packs()
    memopt.checkpoint(region, X)
    alone = _C.packs() - packs
    with memopt.recipes():
        result = memopt.checkpoint(region, X)
    assert _C.packs() - packs >= 2 * alone > 0
    assert torch.equal(
        torch.autograd.grad(result.sum(), X)[0], torch.autograd.grad(region(X).sum(), X)[0]
    )


def test_compiled_autograd_runs_recipes() -> None:
    from torch._dynamo import compiled_autograd

    def run() -> Tensor:
        return F.linear(M.gelu(X), SQUARE).square().sum()

    expected = gradients(run, LEAVES, recipes=False)
    loss = in_scope(run)
    with compiled_autograd._enable(lambda graph: graph):
        loss.backward()
    for tensor, e in zip(LEAVES, expected, strict=True):
        assert e is None or torch.equal(tensor.grad, e)  # type: ignore[arg-type]
        tensor.grad = None


def test_a_converted_block_calls_no_hook() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.act = nn.LayerNorm(FEATURES), nn.GELU()
            self.up, self.down = nn.Linear(FEATURES, 32), nn.Linear(32, FEATURES)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)
            y = F.scaled_dot_product_attention(y, y, y)
            return x + self.down(self.act(self.up(y)))

    model = nn.Sequential(Block(), Block())
    memopt.convert(model)
    x = X.detach()
    model(x)  # looks modules up
    without, packs = left_and_packed(lambda: model(x))
    hooked, _ = left_and_packed(lambda: to_outer_hooks(lambda: model(x)))
    assert packs == 0
    assert without == hooked
