"""Proves: whatever is done with the graph (kept, differentiated in parts, twice, by several
threads, under autocast, in regions and around them), gradients inside memopt.recipes() have the
bits of those without; an output is made once per backward for all its readers and goes after the
last.
"""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import memopt
import memopt.functional as M
from memopt._extension import _C
from memopt.memory.allocator import LiveBytes
from tests.recipes.support import FEATURES, assert_same_gradients, gradients, leaf
from tests.support.record_ops import RecordOps

pytestmark = pytest.mark.usefixtures("collector_off")

X = leaf(6, FEATURES)
W, B = leaf(FEATURES, seed=1), leaf(FEATURES, seed=2)
LINEARS = [leaf(FEATURES, FEATURES, seed=3 + i) for i in range(3)]
LEAVES = [X, W, B, *LINEARS]


def norm(x: Tensor) -> Tensor:
    return M.layer_norm(x, (FEATURES,), W, B)


def block(x: Tensor) -> Tensor:
    h = norm(x)
    q, k, v = (F.linear(h, linear) for linear in LINEARS)
    return x + M.dropout(M.gelu(q * k.sigmoid() + v), 0.3)


def model() -> Tensor:
    return F.linear(M.gelu(norm(block(block(X)))), LINEARS[0]).square().mean()


def counted(loss: Tensor, leaves: list[Tensor]) -> dict[str, int]:
    with RecordOps() as record:
        torch.autograd.grad(loss, leaves)
    names = [str(op) for op in record.ops]
    return {name: names.count(name) for name in set(names)}


def test_a_model() -> None:
    assert_same_gradients(model, LEAVES)


def test_made_once_for_all_its_readers() -> None:
    with memopt.recipes():
        h = norm(X)
        loss = torch.stack([F.linear(h, linear).sum() for linear in LINEARS]).sum()
    del h
    assert counted(loss, LEAVES)["memopt._norm_forward.default"] == 1


def test_a_chain_is_made_once_each() -> None:
    with memopt.recipes():
        loss = F.linear(M.dropout(M.gelu(norm(X)), 0.5), LINEARS[0]).square().sum()
    ops = counted(loss, LEAVES[:4])
    assert ops["memopt._norm_forward.default"] == 1
    assert ops["memopt._activation_forward.default"] == 1
    assert ops["memopt._dropout_backward.default"] == 2  # again, and backward


def test_dropped_after_the_last_reader() -> None:
    """Two layers in a row: their outputs are not there at the same time."""
    x = leaf(512, FEATURES)
    one = 512 * FEATURES * 4
    with memopt.recipes():
        y = x
        for linear in LINEARS:
            y = F.linear(M.gelu(y), linear)
    grad = torch.ones_like(y)
    with LiveBytes() as live:
        torch.autograd.grad(y, [x, *LINEARS], grad)
    weights = len(LINEARS) * 4 * FEATURES**2
    # The gradient that comes in, the one that goes out, and one output.
    assert live.most <= 3 * one + weights


def test_graphs_that_are_kept() -> None:
    with memopt.recipes():
        torch.manual_seed(1)
        loss = model()
    first = torch.autograd.grad(loss, LEAVES, retain_graph=True)
    second = torch.autograd.grad(loss, LEAVES, retain_graph=True)
    expected = gradients(model, LEAVES, recipes=False)
    for a, b, e in zip(first, second, expected, strict=True):
        assert torch.equal(a, e)
        assert torch.equal(b, e)


@pytest.mark.parametrize("wanted", [[X], [W, B], LINEARS[:1], LINEARS[1:], [LINEARS[2], X]])
def test_partial_backwards(wanted: list[Tensor]) -> None:
    live = _C.live_handles()
    for keep in (True, False):
        results = []
        for recipes in (False, True):
            torch.manual_seed(1)
            with memopt.recipes() if recipes else torch.enable_grad():
                loss = model()
            results.append(torch.autograd.grad(loss, wanted, retain_graph=keep))
            if keep:
                results[-1] += torch.autograd.grad(loss, LEAVES)
            del loss
        for a, e in zip(*results, strict=True):
            assert torch.equal(a, e)
    assert _C.live_handles() == live


def test_a_graph_that_is_never_differentiated_dies() -> None:
    """Also where an op saves its own output, which has the op's node for its history."""
    live = _C.live_handles()
    with memopt.recipes():
        y = M.gelu(X).sigmoid().softmax(0).tanh().exp().expm1()
    assert _C.live_handles() > live
    del y
    assert _C.live_handles() == live


def test_a_partial_backward_leaves_no_output_behind() -> None:
    x = leaf(512, FEATURES)
    with memopt.recipes():
        h = M.gelu(x)
        a, b = F.linear(h, LINEARS[0]).sum(), F.linear(h, LINEARS[1]).sum()
    del h
    with LiveBytes() as live:
        torch.autograd.grad(a, LINEARS[0], retain_graph=True)
    assert live.left == 0
    torch.autograd.grad(a + b, [x, *LINEARS[:2]])


def test_a_reader_after_the_op_has_been_differentiated() -> None:
    """The op's node is freed by then; the recipe holds what it reads itself."""
    results = []
    for recipes in (False, True):
        with memopt.recipes() if recipes else torch.enable_grad():
            h = M.gelu(X)
            a, b = F.linear(h, LINEARS[0]).sum(), F.linear(h.detach(), LINEARS[1]).sum()
        first = torch.autograd.grad(a, [X, LINEARS[0]])
        results.append((*first, *torch.autograd.grad(b, LINEARS[1])))
    for a, e in zip(*results, strict=True):
        assert torch.equal(a, e)


def test_gradients_of_gradients() -> None:
    def run() -> Tensor:
        y = F.linear(M.gelu(norm(X)), LINEARS[0]).square().sum()
        grads = torch.autograd.grad(y, [X, W, LINEARS[0]], create_graph=True)
        return torch.stack([g.square().sum() for g in grads]).sum()

    assert_same_gradients(run, LEAVES[:4])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype: torch.dtype) -> None:
    def run() -> Tensor:
        with torch.autocast("cpu", dtype):
            return model().float()

    assert_same_gradients(run, LEAVES)
    expected = gradients(run, LEAVES, recipes=False)
    # Backward inside autocast makes the outputs as forward did.
    torch.manual_seed(1)
    with memopt.recipes():
        loss = run()
    with torch.autocast("cpu", dtype):
        actual = torch.autograd.grad(loss, LEAVES)
    with torch.autocast("cpu", dtype):
        torch.manual_seed(1)
        with torch.autocast("cpu", dtype):
            loss = model().float()
        again = torch.autograd.grad(loss, LEAVES)
    for a, e, f in zip(actual, again, expected, strict=True):
        assert torch.equal(a, e)
        assert a.dtype == f.dtype


def test_batched_gradients() -> None:
    results = []
    for recipes in (False, True):
        with memopt.recipes() if recipes else torch.enable_grad():
            y = F.linear(M.gelu(X).t(), LINEARS[0][:, :6]).t()
        vectors = torch.eye(y.numel())[:3].view(3, *y.shape)
        results.append(torch.autograd.grad(y, LINEARS[0], vectors, is_grads_batched=True))
    assert torch.equal(results[0][0], results[1][0])


def test_inside_a_transform_of_torch_func_it_does_nothing() -> None:
    """PyTorch forbids saved-tensor hooks there, and the transforms inside a scope of such hooks."""

    def loss(weight: Tensor) -> Tensor:
        with memopt.recipes():
            return F.linear(F.gelu(F.linear(X, weight)), LINEARS[0]).sum()

    weight = LINEARS[1].detach()
    expected = weight.clone().requires_grad_()
    F.linear(F.gelu(F.linear(X, expected)), LINEARS[0]).sum().backward()
    torch.testing.assert_close(torch.func.grad(loss)(weight), expected.grad)
    for tensor in LEAVES:
        tensor.grad = None


REGIONS = {
    "memopt": memopt.checkpoint,
    "torch": lambda f, *args: torch_checkpoint(f, *args, use_reentrant=False),
    "reentrant": lambda f, *args: torch_checkpoint(f, *args, use_reentrant=True),
}


@pytest.mark.parametrize("kind", REGIONS)
def test_regions_inside(kind: str) -> None:
    def run() -> Tensor:
        y = REGIONS[kind](block, norm(X))
        return F.linear(M.gelu(REGIONS[kind](block, y)), LINEARS[0]).square().mean()

    assert_same_gradients(run, LEAVES)


@pytest.mark.parametrize("kind", REGIONS)
def test_regions_around(kind: str) -> None:
    def inside(x: Tensor) -> Tensor:
        with memopt.recipes():
            return F.linear(M.gelu(block(x)), LINEARS[0])

    def run() -> Tensor:
        return REGIONS[kind](inside, REGIONS[kind](inside, X)).square().mean()

    def plain(x: Tensor) -> Tensor:
        return F.linear(M.gelu(block(x)), LINEARS[0])

    live = _C.live_handles(), _C.live_regions()
    expected = gradients(lambda: plain(plain(X)).square().mean(), LEAVES, recipes=False)
    for a, e in zip(gradients(run, LEAVES, recipes=False), expected, strict=True):
        if kind == "reentrant":  # which adds up the parameters' gradients in another order
            torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-4)
        else:
            assert torch.equal(a, e)
    assert_same_gradients(run, LEAVES)
    assert (_C.live_handles(), _C.live_regions()) == live


def test_a_region_around_runs_once_more_and_not_twice() -> None:
    runs = []

    def inside(x: Tensor) -> Tensor:
        runs.append(1)
        with memopt.recipes():
            return F.linear(M.gelu(norm(x)), LINEARS[0])

    loss = memopt.checkpoint(inside, X).sum()
    torch.autograd.grad(loss, LEAVES[:4])
    assert len(runs) == 2


def test_threads_have_scopes_of_their_own() -> None:
    expected = gradients(model, LEAVES, recipes=False)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(5):
                with memopt.recipes():
                    # Each thread's generator is the same one: no dropout here.
                    loss = F.linear(M.gelu(norm(X)), LINEARS[0]).square().mean()
                grads = torch.autograd.grad(loss, LEAVES[:4])
                for a, e in zip(grads, plain, strict=True):
                    assert torch.equal(a, e)
        except BaseException as error:  # handed to the main thread
            failures.append(error)

    plain = torch.autograd.grad(F.linear(M.gelu(norm(X)), LINEARS[0]).square().mean(), LEAVES[:4])
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(expected) == len(LEAVES)


def test_one_graph_differentiated_by_several_threads() -> None:
    with memopt.recipes():
        h = M.gelu(norm(X))
        losses = [F.linear(h, linear).square().sum() for linear in LINEARS]
    expected = [
        torch.autograd.grad(F.linear(M.gelu(norm(X)), linear).square().sum(), linear)[0]
        for linear in LINEARS
    ]
    results: dict[int, Tensor] = {}

    def work(i: int) -> None:
        for _ in range(20):
            (results[i],) = torch.autograd.grad(losses[i], LINEARS[i], retain_graph=True)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, e in enumerate(expected):
        assert torch.equal(results[i], e)


def test_what_a_recipe_reads_must_not_be_written() -> None:
    x = X * 1
    with memopt.recipes():
        loss = F.linear(M.gelu(x), LINEARS[0]).sum()
    x.add_(1)
    with pytest.raises(RuntimeError, match="must not be written in place"):
        loss.backward()


def test_compiled_functions_step_aside() -> None:
    torch._dynamo.reset()

    def f(x: Tensor) -> Tensor:
        with memopt.recipes():
            return F.linear(M.gelu(norm(x)), LINEARS[0]).square().sum()

    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
    expected = torch.autograd.grad(f(X), LEAVES[:4])
    for a, e in zip(torch.autograd.grad(compiled(X), LEAVES[:4]), expected, strict=True):
        assert torch.equal(a, e)
    with memopt.recipes():
        outside = torch.compile(lambda x: f(x), backend="aot_eager")(X)
    for a, e in zip(torch.autograd.grad(outside, LEAVES[:4]), expected, strict=True):
        assert torch.equal(a, e)


def test_an_exception_leaves_the_scope() -> None:
    top = torch._C._autograd._top_saved_tensors_default_hooks
    live = _C.live_handles()

    def fails() -> None:
        with memopt.recipes():
            M.gelu(X)
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        fails()
    assert top(True) is None
    assert _C.live_handles() == live
    scope = memopt.recipes()
    with scope, scope, memopt.recipes():
        loss = F.linear(M.gelu(X), LINEARS[0]).sum()
    assert top(True) is None
    loss.backward()
    for tensor in LEAVES:
        tensor.grad = None
