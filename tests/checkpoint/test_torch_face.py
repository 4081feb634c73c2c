"""Proves: memopt.checkpoint stands where torch.utils.checkpoint.checkpoint(use_reentrant=False)
does in programs that lean on fine points of it: derivatives taken inside the
region, triple derivatives of nested regions, the user's hooks inside, registered containers,
results of the transformers library. PyTorch's own function runs through the same tests.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from memopt._checkpoint import checkpoint, checkpoint_wrapper
from tests.checkpoint.support import (
    CountCalls,
    collector_disabled,
    every_way,
    live_objects,
    live_tensors_and_regions,
    mlp,
    plain,
    step_results,
)
from tests.support.bits import assert_same_bits


@pytest.fixture
def x() -> Tensor:
    return torch.randn(4, requires_grad=True)


@every_way
@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("create_graph", [True, False])
def test_derivatives_taken_inside_the_region(
    way: Callable[..., Any], early_stop: bool, create_graph: bool, x: Tensor
) -> None:
    """The recompute's own backward opens tensors that were saved in this very recompute."""

    def force(x: Tensor) -> Tensor:
        energy = (x.sin() * x.exp()).sum()
        (slope,) = torch.autograd.grad(energy, x, create_graph=create_graph)
        return slope.exp() * x

    assert_same_bits(
        step_results(lambda: way(force, x, early_stop=early_stop), [x]),
        step_results(lambda: force(x), [x]),
    )


@every_way
def test_backward_called_inside_the_region_adds_to_leaves_again(
    way: Callable[..., Any], x: Tensor
) -> None:
    """Whatever a function does in forward it does again in the recompute."""
    inner = torch.ones(4, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        (inner.exp() * 2).sum().backward()
        return x.exp().sin()

    way(function, x).sum().backward()
    assert torch.equal(inner.grad, 4 * inner.detach().exp())
    assert_same_bits([x.grad], torch.autograd.grad(x.exp().sin().sum(), x))


@every_way
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_triple_derivatives_of_nested_regions_and_their_graph_dies(
    way: Callable[..., Any], depth: int, x: Tensor
) -> None:
    def nested(region: Callable[..., Any], depth: int) -> Callable[[Tensor], Tensor]:
        if depth == 0:
            return lambda x: x.sin() * x.exp()
        inner = nested(region, depth - 1)
        return lambda x: region(inner, x * 0.5).tanh().exp()

    def third(region: Callable[..., Any]) -> tuple[Tensor, ...]:
        y = nested(region, depth)(x)
        for _ in range(2):
            (y,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return torch.autograd.grad(y.sum(), x)

    expected = third(plain)
    with collector_disabled():
        third(way)
        before = live_tensors_and_regions()
        assert_same_bits(third(way), expected)
        assert live_tensors_and_regions() == before


@every_way
def test_a_graph_that_nobody_differentiated_dies(way: Callable[..., Any], x: Tensor) -> None:
    with collector_disabled():
        before = live_tensors_and_regions()
        y = way(lambda x: way(torch.exp, x.sin()).cos(), x)
        storage = StorageWeakRef(y.untyped_storage())
        del y
        assert storage.expired()
        assert live_tensors_and_regions() == before


@every_way
def test_grad_fns_that_outlive_their_output_can_be_read(way: Callable[..., Any], x: Tensor) -> None:
    node = way(lambda x: x.exp().sin(), x).grad_fn
    assert torch.equal(node._saved_self, x.detach().exp())
    assert torch.equal(node.next_functions[0][0]._saved_result, x.detach().exp())


@every_way
def test_a_graph_whose_tensors_are_freed_says_so(way: Callable[..., Any], x: Tensor) -> None:
    y = way(lambda x, *_: x.exp().sin(), x, None, 3, "text", True)
    node = y.grad_fn
    y.sum().backward()
    with pytest.raises(RuntimeError, match="freed"):
        _ = node._saved_self
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()


@every_way
def test_hooks_of_the_user_inside_the_region(way: Callable[..., Any], x: Tensor) -> None:
    """Their product is what the region saves; only what backward reads goes through unpack."""
    packed, unpacked = CountCalls(), CountCalls()

    def function(x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: packed(t) * 2, lambda t: unpacked(t) / 2
        ):
            y = x.exp()
        return y.sin()

    y = way(function, x)
    y.sum().backward()
    assert unpacked.calls == 1
    assert_same_bits([x.grad], torch.autograd.grad(x.exp().sin().sum(), x))


@every_way
def test_a_parameter_used_inside_and_outside_gets_one_gradient(
    way: Callable[..., Any], x: Tensor
) -> None:
    fired: list[Tensor] = []
    scale = nn.Parameter(torch.randn(4))
    handle = scale.register_hook(lambda grad: fired.append(grad.clone()))
    (way(lambda x, scale: (x * scale).exp(), x, scale) * scale).sum().backward()
    handle.remove()
    y = (x * scale).exp() * scale
    assert_same_bits(fired, torch.autograd.grad(y.sum(), scale))


@dataclasses.dataclass
class Node:
    """Known to torch.utils._pytree: its tensors are tracked."""

    tensor: Tensor
    factor: float


pytree.register_pytree_node(
    Node,
    lambda node: ([node.tensor], node.factor),
    lambda leaves, factor: Node(*leaves, factor),
    serialized_type_name="memopt.tests.Node",
)


def test_registered_containers_are_taken_apart(x: Tensor) -> None:
    """Also inside others; their tensors are checked, and get gradients."""
    hidden = torch.randn(4, requires_grad=True)

    def function(x: Tensor, nodes: list[Node]) -> Node:
        return Node((x * nodes[0].tensor * nodes[0].factor).exp(), nodes[0].factor)

    results = [
        step_results(lambda way=way: way(function, x, [Node(hidden, 2.0)]), [x, hidden])
        for way in (plain, checkpoint)
    ]
    assert_same_bits(results[1], results[0])
    written = torch.ones(4)
    result = checkpoint(function, x, [Node(written, 2.0)])
    assert isinstance(result, Node)
    written.add_(1)
    with pytest.raises(RuntimeError, match="positional argument 1 of region"):
        result.tensor.sum().backward()


def test_model_outputs_of_transformers(x: Tensor) -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = mlp(4)

        def forward(self, inputs: Any) -> Any:
            hidden = self.layers(inputs.last_hidden_state)
            return outputs.BaseModelOutput(hidden, hidden_states=(hidden, hidden.exp()))

    model = Model()
    tensors = [x, *model.parameters()]

    def call() -> Any:
        output = model(outputs.BaseModelOutput(x.sin()))
        assert isinstance(output, outputs.BaseModelOutput)
        assert output.hidden_states[0] is output[0]
        return output.last_hidden_state * output.hidden_states[1]

    expected = step_results(call, tensors)
    checkpoint_wrapper(model)
    assert_same_bits(step_results(call, tensors), expected)


@every_way
def test_two_thousand_regions_deep(way: Callable[..., Any], x: Tensor) -> None:
    """One graph, with keywords and a frozen argument; nothing recurses, and nothing stays."""
    shift = torch.ones(4)

    def deep(region: Callable[..., Any]) -> Tensor:
        y = x
        for _ in range(2000):
            y = region(lambda x, *, shift: (x + shift).sin(), y, shift=shift)
        return y

    expected = step_results(lambda: deep(plain), [x])
    with collector_disabled():
        before = live_objects(Tensor)
        results = step_results(lambda: deep(way), [x])
        assert_same_bits(results, expected)
        assert live_objects(Tensor) - before == len(results)
