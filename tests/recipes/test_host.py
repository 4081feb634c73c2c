"""Proves: memopt.saved_tensors("cpu") copies each storage of an activation once, whichever views
of it are saved, and no parameter and nothing small; device memory is given back; writes are found.
Without an accelerator CPU tensors are taken for its own.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import memopt
from memopt.memory.saved import SavedTensors
from tests.checkpoint.support import Watch
from tests.recipes.model import FEATURES, LEAVES, B, W, X, model


def test_built_in_policies_of_a_host_without_an_accelerator_keep() -> None:
    with memopt.saved_tensors("cpu"):
        y = (X * 2).exp()
    storage = y.untyped_storage().data_ptr()
    assert y.grad_fn is not None
    assert y.grad_fn._saved_result.untyped_storage().data_ptr() == storage


def test_host_copies_activations_and_no_parameter(watch: Watch) -> None:
    frozen = nn.Parameter(torch.randn(FEATURES, FEATURES), requires_grad=False)
    trained = nn.Parameter(torch.randn(FEATURES, FEATURES))
    with memopt.saved_tensors("cpu"):
        x = X * 1
        y = F.linear(F.linear(x, frozen), trained)
        loss = (y @ frozen.t()).sum() + (x @ trained.t()).sum()
    # x, the input of the second linear; not the parameters, nor views of them.
    one = X.numel() * 4
    assert watch.to_host == (2, 2 * one)
    expected = torch.autograd.grad(
        (F.linear(F.linear(X * 1, frozen), trained) @ frozen.t()).sum() + (X @ trained.t()).sum(),
        [X, trained],
    )
    for a, e in zip(torch.autograd.grad(loss, [X, trained]), expected, strict=True):
        assert torch.equal(a, e)


def test_host_frees_the_device_memory(watch: Watch) -> None:
    with memopt.saved_tensors("cpu"):
        x = X * 1
        y = W * x
        storage = StorageWeakRef(x.untyped_storage())
        del x
    assert storage.expired()
    assert torch.equal(torch.autograd.grad(y.sum(), W)[0], X.detach().sum(0))


VIEWS = {
    "the same": lambda t: t,
    "transposed": lambda t: t.t(),
    "a slice": lambda t: t[:, 3:7],
    "rows": lambda t: t[4:],
    "expanded": lambda t: t[:1].expand(16, FEATURES),
    "as complex": lambda t: torch.view_as_complex(t.view(16, -1, 2)),
    "detached": lambda t: t.detach(),
}


@pytest.mark.parametrize("first", VIEWS)
@pytest.mark.parametrize("second", VIEWS)
def test_host_copies_a_storage_once(watch: Watch, first: str, second: str) -> None:
    def run() -> tuple[list[Tensor], list[Tensor]]:
        x = X.detach() * 1
        views = [VIEWS[name](x) for name in (first, second)]
        weights = [torch.ones_like(view).requires_grad_() for view in views]
        return weights, [(w * view).abs().sum() for w, view in zip(weights, views, strict=True)]

    weights, losses = run()
    expected = [torch.autograd.grad(loss, w)[0] for loss, w in zip(losses, weights, strict=True)]
    before = Watch()
    weights, products = [], []
    x = X.detach() * 1
    with memopt.saved_tensors("cpu"):
        for name in (first, second):
            view = VIEWS[name](x)
            weights.append(torch.ones_like(view).requires_grad_())
            products.append(weights[-1] * view)
    assert before.to_host == (1, X.numel() * 4)
    del x, view  # what something else holds does not have to come back
    losses = [product.abs().sum() for product in products]
    actual = torch.autograd.grad([*losses], weights)
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a, e)
    assert before.to_device == (1, X.numel() * 4)  # once for both in one backward


def test_host_copies_again_what_was_written_between(watch: Watch) -> None:
    x = X.detach() * 1
    with memopt.saved_tensors("cpu"):
        first = W * x
        x.mul_(2)
        second = B * x
    assert watch.to_host[0] == 2
    assert torch.equal(torch.autograd.grad(second.sum(), B)[0], x.sum(0))
    with pytest.raises(RuntimeError, match="must not be written in place"):
        torch.autograd.grad(first.sum(), W)


@pytest.mark.parametrize("elements", [8, 256])
def test_host_leaves_small_tensors(watch: Watch, elements: int) -> None:
    w = torch.ones(elements, requires_grad=True)
    with memopt.saved_tensors("cpu"):
        loss = (w * torch.randn(elements)).sum()
    assert watch.to_host[0] == (elements * 4 >= 1024)
    loss.backward()


def test_host_of_a_region_s_arguments(watch: Watch) -> None:
    with memopt.saved_tensors("cpu"):
        y = memopt.checkpoint(lambda x: x.exp().sin(), X * 1)
    assert watch.to_host == (1, X.numel() * 4)
    assert torch.equal(torch.autograd.grad(y.sum(), X)[0], X.exp().cos() * X.exp())


def test_a_recipe_reads_what_another_fate_holds(watch: Watch) -> None:
    """Of the layer norm only what waits on the host is held, and nothing of the GELU."""
    with SavedTensors(exclude=LEAVES) as kept, memopt.saved_tensors("cpu"), memopt.recipes():
        loss = model()
    assert kept.bytes < X.numel() * 4  # small things: statistics
    assert watch.to_host[0] > 0
    expected = torch.autograd.grad(model(), LEAVES)
    for a, e in zip(torch.autograd.grad(loss, LEAVES), expected, strict=True):
        assert torch.equal(a, e)
