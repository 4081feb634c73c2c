"""Proves what memopt's nodes in PyTorch's graph are for autograd: an edge for each argument, names,
saved tensors that go with the graph or after its backward, also where the node saves its own output
or a hook throws, gradients that stay undefined, and PyTorch's own errors; under compiled autograd
the gradients are the same.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

import memopt.functional as M

FEATURES = 8


def leaf(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).requires_grad_()


X, RESIDUAL = leaf(6, FEATURES), leaf(6, FEATURES, seed=1)
WEIGHT, BIAS = leaf(FEATURES, seed=2), leaf(FEATURES, seed=3)
WORDS, TARGET = leaf(11, FEATURES, seed=4), torch.arange(6)

# The output or outputs of one node each, and its arguments.
CALLS: dict[str, tuple[Any, list[Tensor]]] = {
    "layer_norm": (lambda: M.layer_norm(X, (FEATURES,), WEIGHT, BIAS), [X, WEIGHT, BIAS]),
    "add_layer_norm": (
        lambda: M.add_layer_norm(X, RESIDUAL, (FEATURES,), WEIGHT, BIAS),
        [X, RESIDUAL, WEIGHT, BIAS],
    ),
    "gelu": (lambda: M.gelu(X), [X]),
    "gelu_linear": (lambda: M.gelu_linear(X, WORDS, None), [X, WORDS]),
    "mlp": (lambda: M.mlp(X, WORDS, None, leaf(3, 11), None), [X, WORDS]),
    "cross_entropy": (lambda: M.cross_entropy(X, TARGET), [X]),
    "linear_cross_entropy": (lambda: M.linear_cross_entropy(X, WORDS, TARGET), [X, WORDS]),
    "each row's loss": (
        lambda: M.linear_cross_entropy(X, WORDS, TARGET, reduction="none"),
        [X, WORDS],
    ),
}


def first(made: Tensor | tuple[Tensor, ...]) -> Tensor:
    return made[0] if isinstance(made, tuple) else made


def node_of(tensor: Tensor, name: str) -> Any:
    """The node of this name behind a tensor."""
    node: Any = tensor.grad_fn
    while node is not None and name not in node.name():
        node = node.next_functions[0][0]
    assert node is not None
    return node


@pytest.mark.parametrize("call", CALLS)
def test_a_second_backward_has_pytorchs_error(call: str) -> None:
    run, arguments = CALLS[call]
    loss = first(run()).sum()
    kept = torch.autograd.grad(loss, arguments, retain_graph=True)
    again = torch.autograd.grad(loss, arguments)
    for one, other in zip(kept, again, strict=True):
        assert torch.equal(one, other)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(loss, arguments)


@pytest.mark.parametrize("call", CALLS)
def test_compiled_autograd_has_the_same_gradients(call: str) -> None:
    from torch._dynamo import compiled_autograd

    run, arguments = CALLS[call]
    expected = torch.autograd.grad(first(run()).sum(), arguments)
    loss = first(run()).sum()
    with compiled_autograd._enable(lambda graph: graph):
        actual = torch.autograd.grad(loss, arguments)
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other)


def test_an_edge_stands_for_each_argument_and_none_for_what_is_not_given() -> None:
    node = node_of(M.layer_norm(X * 1, (FEATURES,), None, BIAS), "NormOp")
    edges = [following and following.name() for following, _ in node.next_functions]
    assert edges == ["MulBackward0", None, "torch::autograd::AccumulateGrad"]
    frozen = node_of(M.layer_norm(X, (FEATURES,), WEIGHT.detach(), BIAS), "NormOp")
    assert frozen.next_functions[1] == (None, 0)


@pytest.mark.parametrize(
    ("call", "name"),
    [("gelu", "ActivationOp"), ("layer_norm", "NormOp"), ("mlp", "Mlp")],
)
def test_a_name_says_the_op(call: str, name: str) -> None:
    node = first(CALLS[call][0]()).grad_fn
    assert node is not None
    assert node.name() == f"memopt::autograd::{node.name().split('memopt::autograd::', 1)[1]}"
    assert name in node.name()


@pytest.mark.parametrize("how", ["dropped", "backward", "a hook throws"])
def test_an_output_that_its_own_node_saves_is_freed(how: str) -> None:
    """The sum of add_layer_norm is an output and is saved: no cycle keeps it."""

    def refuse(tensor: Tensor) -> Tensor:
        packed.append(StorageWeakRef(tensor.untyped_storage()))
        raise KeyError("no")

    packed: list[StorageWeakRef] = []
    gc.disable()
    try:
        x = X * 1
        if how == "a hook throws":
            with pytest.raises(KeyError), saved_tensors_hooks(refuse, lambda tensor: tensor):
                M.add_layer_norm(x, RESIDUAL, (FEATURES,))
        else:
            normed, total = M.add_layer_norm(x, RESIDUAL, (FEATURES,))
            packed.append(StorageWeakRef(total.untyped_storage()))
            if how == "backward":
                normed.sum().backward(inputs=[RESIDUAL], retain_graph=True)
            del normed, total
        del x
        assert packed
        assert all(storage.expired() for storage in packed)
    finally:
        gc.enable()
        RESIDUAL.grad = None


def test_backward_lets_go_of_what_was_saved_while_the_output_lives() -> None:
    x = X * 1
    storage = StorageWeakRef(x.untyped_storage())
    result = M.gelu(x)
    del x
    assert not storage.expired()
    result.sum().backward(inputs=[X])
    assert storage.expired()
    X.grad = None


class Nothing(torch.autograd.Function):
    """Gives its argument no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> None:
        return None


@pytest.mark.parametrize("call", CALLS)
def test_no_gradient_of_the_output_is_none_of_the_arguments(call: str) -> None:
    run, arguments = CALLS[call]
    found = torch.autograd.grad(
        Nothing.apply(first(run())).sum(),  # type: ignore[no-untyped-call]
        arguments,
        allow_unused=True,
    )
    assert found == (None,) * len(arguments)


def test_nodes_are_older_than_what_follows_them() -> None:
    """Autograd runs the youngest node first, by the number that it got before its forward."""
    before = X * 1
    normed = M.layer_norm(before, (FEATURES,), WEIGHT, BIAS)
    after = normed * 1
    numbers = [t.grad_fn._sequence_nr() for t in (before, normed, after)]  # type: ignore[union-attr]
    assert numbers == sorted(numbers)
    assert len(set(numbers)) == 3


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_anomaly_mode_shows_the_forward_call() -> None:
    with torch.autograd.detect_anomaly(check_nan=True):
        loss = M.gelu(X * float("nan")).sum()
        with (
            pytest.warns(UserWarning, match=r"test_anomaly_mode_shows_the_forward_call"),
            pytest.raises(RuntimeError, match="returned nan values"),
        ):
            loss.backward()


def test_a_transform_is_refused_by_pytorchs_error() -> None:
    """Of the ops themselves: memopt.functional goes to PyTorch's functions there."""
    op = torch.ops.memopt.activation
    with pytest.raises(RuntimeError, match="with functorch transforms"):
        torch.func.grad(lambda x: op(x, "gelu").sum())(X.detach())


def test_modules_still_train_after_an_error_in_backward() -> None:
    layer = nn.Linear(FEATURES, FEATURES)
    x = layer(X.detach())
    result = M.gelu(x)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()
    M.gelu(layer(X.detach())).sum().backward()
    assert layer.weight.grad is not None
