"""Proves: arguments and results of any structure pass through a region: positional and keyword,
nested containers, NamedTuples, dataclasses, registered nodes, None and other non-tensors; results
are the very objects that the function returned; tensors that were one object are one object in the
recompute.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import OrderedDict
from typing import Any, NamedTuple

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from memopt._checkpoint import checkpoint, checkpoint_wrapper, is_recomputing
from tests.checkpoint.support import step_results
from tests.support.bits import assert_same_bits


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Batch:
    """Not known to torch.utils._pytree: passes by reference."""

    tensor: Tensor
    name: str = "batch"


# What comes out of the leaves' sum, in each kind of container that a forward may return.
RESULTS = {
    "tensor": lambda t: t,
    "list": lambda t: [t, t * 2],
    "nested tuple": lambda t: (t, (t * 2, [t * 3])),
    "dict": lambda t: {"a": t, "b": {"c": t * 2}},
    "OrderedDict": lambda t: OrderedDict(a=t),
    "NamedTuple": lambda t: Pair(t, None),
    "dataclass": lambda t: Batch(t * 2),
    "with non-tensors": lambda t: (None, t, 3, "text", [True, None]),
    "one-tuple": lambda t: (t,),
    "None": lambda t: None,
    "int": lambda t: 7,
    "empty": lambda t: (),
}


@pytest.mark.parametrize("make", RESULTS.values(), ids=RESULTS.keys())
def test_results_are_the_objects_that_the_function_returned(make) -> None:
    returned = []

    def function(x: Tensor) -> Any:
        returned.append(make(x.exp()))
        return returned[-1]

    x = torch.randn(3, requires_grad=True)
    result = checkpoint(function, x)
    assert result is returned[0]
    for actual, expected in zip(_tensors(result), _tensors(make(x.exp())), strict=True):
        assert_same_bits(
            torch.autograd.grad(actual.sum(), x, retain_graph=True),
            torch.autograd.grad(expected.sum(), x, retain_graph=True),
        )


def _tensors(result: Any) -> list[Tensor]:
    leaves = pytree.tree_leaves(vars(result) if isinstance(result, Batch) else result)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


leaves = st.one_of(
    st.sampled_from(["trained", "constant", "shared", "integer"]),
    st.none(),
    st.integers(-3, 3),
    st.text(max_size=2),
)
trees = st.recursive(
    leaves,
    lambda children: st.one_of(
        st.lists(children, max_size=3),
        st.tuples(children, children),
        st.dictionaries(st.sampled_from("abc"), children, max_size=3),
        st.builds(Pair, children, children),
    ),
    max_leaves=8,
)


@given(args=st.lists(trees, max_size=3), kwargs=st.dictionaries(st.sampled_from("xyz"), trees))
def test_any_nested_arguments(args: list[Any], kwargs: dict[str, Any]) -> None:
    """Every tensor of every container is seen in the recompute, with its gradient and identity."""
    torch.manual_seed(0)
    shared = torch.randn(2, requires_grad=True)
    trained: list[Tensor] = [shared]

    def tensor_for(leaf: object) -> object:
        if leaf == "trained":
            trained.append(torch.randn(2, requires_grad=True))
            return trained[-1]
        if leaf == "shared":
            return shared
        return {"constant": torch.randn(2), "integer": torch.arange(2)}.get(str(leaf), leaf)

    args, kwargs = pytree.tree_map(tensor_for, (args, kwargs))
    seen: list[Any] = []

    def function(*args: Any, **kwargs: Any) -> list[Tensor]:
        seen.append((args, kwargs))
        return [
            leaf.exp() * leaf * (i + 1)
            for i, leaf in enumerate(pytree.tree_leaves((args, kwargs)))
            if isinstance(leaf, Tensor)
        ]

    expected = step_results(lambda: [*function(*args, **kwargs), shared.sin()], trained)
    actual = step_results(lambda: [*checkpoint(function, *args, **kwargs), shared.sin()], trained)
    assert_same_bits(actual, expected)
    first, *again = seen[1:]
    for other in again:
        flat, spec = pytree.tree_flatten(first)
        other_flat, other_spec = pytree.tree_flatten(other)
        assert spec == other_spec
        assert [type(leaf) for leaf in flat] == [type(leaf) for leaf in other_flat]
        assert all(a is b for a, b in zip(flat, other_flat, strict=True) if isinstance(a, Tensor))


def test_the_same_tensor_twice_is_one_object_in_the_recompute() -> None:
    """Attention modules ask `query is key` to choose their path."""
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    x = torch.randn(2, 3, 4, requires_grad=True)
    tensors = [x, *attention.parameters()]
    assert_same_bits(
        step_results(lambda: checkpoint(attention, x, x, x)[0], tensors),
        step_results(lambda: attention(x, x, x)[0], tensors),
    )
    identical = []
    checkpoint(lambda a, b: (identical.append(a is b[0]), a.exp())[1], x, [x]).sum().backward()
    assert identical == [True, True]


def test_a_parameter_stays_a_parameter_in_the_recompute() -> None:
    weight = nn.Parameter(torch.randn(3))
    kinds = []
    checkpoint(lambda w: (kinds.append(type(w)), w.exp())[1], weight).sum().backward()
    assert kinds == [nn.Parameter, nn.Parameter]


def test_unknown_objects_pass_by_reference_and_their_tensors_get_gradients() -> None:
    batch = Batch(torch.randn(3, requires_grad=True))
    seen = []

    def function(batch: Batch, *, option: object) -> Tensor:
        seen.append((batch, option))
        return batch.tensor.exp()

    option = object()
    checkpoint(function, batch, option=option).sum().backward()
    assert [(b is batch, o is option) for b, o in seen] == [(True, True)] * 2
    assert torch.equal(batch.tensor.grad, batch.tensor.detach().exp())


def test_function_may_take_its_containers_apart() -> None:
    """The recompute gets containers of its own."""
    x = torch.randn(3, requires_grad=True)

    def function(tensors: list[Tensor], *, more: dict[str, Tensor]) -> Tensor:
        return tensors.pop().exp() * more.pop("x").sin()

    tensors, more = [x], {"x": x}
    checkpoint(function, tensors, more=more).sum().backward()
    assert tensors == []
    assert more == {}
    (expected,) = torch.autograd.grad((x.exp() * x.sin()).sum(), x)
    assert torch.equal(x.grad, expected)


def test_no_tensor_among_the_arguments() -> None:
    weight = torch.randn(3, requires_grad=True)
    checkpoint(lambda n, name=None: weight.exp() * n, 2, name="x").sum().backward()
    assert torch.equal(weight.grad, 2 * weight.detach().exp())


def test_keywords_with_any_name() -> None:
    """memopt's own parameters have no names that a function's keyword could collide with."""
    x = torch.randn(3, requires_grad=True)

    def function(**kwargs: Tensor) -> Tensor:
        return sum(value.exp() for value in kwargs.values())

    names = ("args", "kwargs", "owner", "region", "module", "offload_to_cpu", "self")
    checkpoint(functools.partial(function, fn=x), **dict.fromkeys(names, x)).sum().backward()
    assert torch.allclose(x.grad, 8 * x.detach().exp())


def test_inference_tensors_are_taken_as_constants() -> None:
    with torch.inference_mode():
        constant = torch.randn(3)
    x = torch.randn(3, requires_grad=True)
    checkpoint(lambda x, c: x.exp() + c, x, constant).sum().backward()
    assert torch.equal(x.grad, x.detach().exp())


def test_tensor_subclass_arguments() -> None:
    class Tagged(Tensor):
        pass

    x = torch.randn(3).as_subclass(Tagged).requires_grad_()
    kinds = []

    def function(x: Tensor) -> Tensor:
        kinds.append(type(x))
        return x.exp()

    checkpoint(function, x).sum().backward()
    assert kinds == [Tagged, Tagged]
    assert torch.equal(x.grad, x.detach().exp())


def test_sparse_arguments() -> None:
    adjacency = torch.eye(3).to_sparse()
    x = torch.randn(3, 2, requires_grad=True)
    checkpoint(lambda a, x: torch.sparse.mm(a, x).exp(), adjacency, x).sum().backward()
    assert torch.equal(x.grad, x.detach().exp())


def test_wrapped_module_takes_and_gives_what_it_did() -> None:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, batch: dict[str, list[Tensor]], *, flag: bool) -> Pair:
            hidden = self.linear(batch["x"][0]).tanh() if flag else batch["x"][0]
            return Pair(hidden, {"recomputing": is_recomputing()})

    module = checkpoint_wrapper(Module())
    result = module({"x": [torch.randn(1, 2)]}, flag=True)
    assert isinstance(result, Pair)
    assert result.second == {"recomputing": False}
    result.first.sum().backward()
    assert module.linear.weight.grad is not None
