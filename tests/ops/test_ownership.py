"""Proves: nothing is written over that somebody else may hold. Every op, in every kind of linear
and mlp, gives the gradients of the plain run inside selective checkpoints and under a dispatch mode
that keeps every tensor it sees and compares them at the end; and where nobody watches, results are
written over what is ours alone, so that no buffer is allocated for them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import memopt
import memopt.functional as M
from tests.support.cases import OP_CASES
from tests.support.mlp import LEVELS, VARIANTS, fused, make_tensors
from tests.support.shapes import FLOAT32

Step = Callable[[], tuple[Callable[[], Tensor], list[Tensor]]]


def of_case(case: Any) -> Step:
    def make() -> tuple[Callable[[], Tensor], list[Tensor]]:
        call = case.make_call((6, 16), FLOAT32, torch.device("cpu")).leaves()
        leaves = [t for t in call.given.values() if t.requires_grad]

        def run() -> Tensor:
            outputs = case.memopt(call)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            return sum((output * (i + 1)).sin().sum() for i, output in enumerate(outputs))

        return run, leaves

    return make


def of_linear(front: Callable[..., Tensor | tuple[Tensor, ...]], *shapes: Any) -> Step:
    """`shapes` of its tensors; a list of shapes is a list of tensors, None is None."""

    def make() -> tuple[Callable[[], Tensor], list[Tensor]]:
        torch.manual_seed(0)

        def tensor(shape: Any) -> Any:
            if shape is None:
                return None
            if isinstance(shape, list):
                return [tensor(one) for one in shape]
            return torch.randn(shape).requires_grad_()

        arguments = [tensor(shape) for shape in shapes]

        def run() -> Tensor:
            # The input is no leaf, so that a checkpoint has something to hold.
            outputs = front(arguments[0].sin(), *arguments[1:])
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            return sum(output.cos().sum() for output in outputs)

        return run, [t for t in tree_leaves(arguments) if t is not None]

    return make


def of_mlp(variant: Any, recompute: str, frozen: str) -> Step:
    def make() -> tuple[Callable[[], Tensor], list[Tensor]]:
        tensors = make_tensors(variant, torch.device("cpu"), torch.float32, (2, 3))
        for name, tensor in tensors.items():
            if name.startswith(frozen):
                tensor.requires_grad_(False)

        def run() -> Tensor:
            torch.manual_seed(1)  # of the dropouts
            return fused(variant, tensors, recompute).sin().sum()

        return run, [t for t in tensors.values() if t.requires_grad]

    return make


X, W, B = (2, 3, 8), (5, 8), (5,)
STEPS: dict[str, Step] = {
    **{str(case): of_case(case) for case in OP_CASES},
    "layer_norm_linear": of_linear(M.layer_norm_linear, X, (8,), (8,), [W, W, W], [B, None, B]),
    "rms_norm_linear": of_linear(M.rms_norm_linear, X, (8,), [W, W], [None, B]),
    "gelu_linear": of_linear(M.gelu_linear, X, W, B),
    "activation_linear": of_linear(functools.partial(M.activation_linear, activation="silu"), X, W),
    "swiglu_linear": of_linear(M.swiglu_linear, X, X, W, B),
    "gated_packed_linear": of_linear(M.gated_packed_linear, (2, 3, 16), W, B),
    **{
        f"mlp {variant} {recompute} frozen {frozen or 'nothing'}": of_mlp(
            variant, recompute, frozen or "nothing"
        )
        for variant in VARIANTS
        for recompute in LEVELS
        for frozen in ("", "input", "norm", "up", "down")
        if variant.norm != "none" or frozen != "norm"
    },
}
every_step = pytest.mark.parametrize("make", STEPS.values(), ids=STEPS)


def gradients(run: Callable[[], Tensor], leaves: list[Tensor]) -> list[Tensor | None]:
    torch.manual_seed(0)
    return list(torch.autograd.grad(run(), leaves, allow_unused=True))


def assert_same(actual: list[Tensor | None], expected: list[Tensor | None]) -> None:
    for ours, plain in zip(actual, expected, strict=True):
        assert (ours is None) == (plain is None)
        assert ours is None or torch.equal(ours, plain)


class Hostile(TorchDispatchMode):
    """Keeps every tensor that it sees, and what it held; compares at the end. Results of ops that
    say in their schema that they write are PyTorch's own business, and are taken anew.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        writes = func._schema.is_mutable and not str(func).startswith("memopt.")
        for tensor in tree_leaves((args, kwargs, result)):
            if isinstance(tensor, Tensor) and (writes or id(tensor) not in self.kept):
                self.kept[id(tensor)] = (tensor, tensor.detach().clone())
        return result

    def changed(self) -> int:
        return sum(
            not torch.equal(tensor.nan_to_num(), before.nan_to_num())
            for tensor, before in self.kept.values()
        )


@every_step
def test_a_mode_that_keeps_every_tensor_finds_none_changed(make: Step) -> None:
    run, leaves = make()
    expected = gradients(run, leaves)
    with Hostile() as hostile:
        actual = gradients(run, leaves)
    assert len(hostile.kept) > 0
    assert hostile.changed() == 0
    assert_same(actual, expected)


def save(names: str) -> Callable[..., Any]:
    """A policy that saves the results of the operators with one of these words in their names."""

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        policies = torch.utils.checkpoint.CheckpointPolicy
        wanted = any(name in str(op) for name in names.split())
        return policies.MUST_SAVE if wanted else policies.PREFER_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, policy)


@every_step
@pytest.mark.parametrize("names", ["mm", "memopt", "mm memopt add mul sin"])
@pytest.mark.parametrize("way", [memopt.checkpoint, torch_checkpoint], ids=["memopt", "torch"])
def test_gradients_inside_a_selective_checkpoint(make: Step, names: str, way: Any) -> None:
    run, leaves = make()
    expected = gradients(run, leaves)
    assert_same(
        gradients(lambda: way(run, use_reentrant=False, context_fn=save(names)), leaves), expected
    )


# The steps that draw no random numbers: PyTorch's batching of random ops needs a choice.
LINEARS = [
    name for name in STEPS if "linear" in name or (name.startswith("mlp") and "none" in name)
]
batchable = pytest.mark.parametrize(
    "name",
    [name for name in LINEARS if "dropout" not in name and "T5" not in name and "BERT" not in name],
)


@batchable
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_batched_gradients_equal_those_of_a_loop(name: str) -> None:
    run, leaves = STEPS[name]()
    x = leaves[0]
    vectors = torch.randn(3)
    loss = run()
    loop = [torch.autograd.grad(loss, leaves, v, retain_graph=True) for v in vectors]
    batched = torch.autograd.grad(loss, leaves, vectors, is_grads_batched=True)
    for i, grads in enumerate(loop):
        for one, all_of_them in zip(grads, batched, strict=True):
            torch.testing.assert_close(all_of_them[i], one)
    assert x.grad is None


@batchable
def test_mutation_of_saved_tensors_is_allowed_where_pytorch_allows_it(name: str) -> None:
    run, leaves = STEPS[name]()
    expected = gradients(run, leaves)
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        loss = run()
        with torch.no_grad():
            for leaf in leaves:
                leaf.mul_(2)
        actual = list(torch.autograd.grad(loss, leaves))
    assert_same(actual, expected)


def weights() -> dict[str, Tensor]:
    torch.manual_seed(0)
    shapes = {"n": (8,), "b": (8,), "w": (5, 8), "down": (8, 5)}
    return {name: torch.randn(shape).requires_grad_() for name, shape in shapes.items()}


FUNCTIONS: dict[str, Callable[[Tensor, dict[str, Tensor]], Any]] = {
    "layer_norm_linear": lambda x, p: M.layer_norm_linear(
        x, p["n"], p["b"], [p["w"], p["w"]], [None, None]
    ),
    "rms_norm_linear": lambda x, p: M.rms_norm_linear(x, p["n"], p["w"]),
    "gelu_linear": lambda x, p: M.gelu_linear(x, p["w"]),
    "swiglu_linear": lambda x, p: M.swiglu_linear(x, x.cos(), p["w"]),
    "mlp": lambda x, p: M.mlp(
        x, p["w"], None, p["down"], norm="layer_norm", norm_weight=p["n"], residual=True
    ),
}
every_function = pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)


@every_function
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_equals_a_loop_in_outputs_and_gradients(function: Any) -> None:
    parameters, x = weights(), torch.randn(4, 3, 8)

    def loss(outputs: Any) -> Tensor:
        return sum(output.sin().sum() for output in tree_leaves(outputs))

    outputs = torch.vmap(lambda one: function(one, parameters))(x)
    rows = [tree_leaves(function(one, parameters)) for one in x]
    for i, output in enumerate(tree_leaves(outputs)):
        torch.testing.assert_close(output, torch.stack([row[i] for row in rows]))
    used = [
        p
        for p in parameters.values()
        if torch.autograd.grad(loss(rows), [p], retain_graph=True, allow_unused=True)[0] is not None
    ]
    expected = torch.autograd.grad(loss(rows), used)
    for ours, theirs in zip(torch.autograd.grad(loss(outputs), used), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@every_function
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*jit.*:DeprecationWarning")
def test_jit_trace(function: Any) -> None:
    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = torch.nn.ParameterDict(weights())

        def forward(self, x: Tensor) -> Any:
            return function(x, dict(self.parts.items()))

    module = Module()
    parameters = dict(module.parts.items())
    traced = torch.jit.trace(module, (torch.randn(3, 8),), check_trace=False)
    y = torch.randn(3, 8)
    for ours, theirs in zip(
        tree_leaves(traced(y)), tree_leaves(function(y, parameters)), strict=True
    ):
        assert torch.equal(ours, theirs)


def private_ops(run: Callable[[], object]) -> list[str]:
    """The private ops that `run` called, as the profiler names them."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        run()
    return [event.name for event in profiled.events() if event.name.startswith("memopt::_")]


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("layer_norm_linear", "memopt::_norm_backward_"),
        ("gelu_linear", "memopt::_activation_backward_"),
        ("swiglu_linear", "memopt::_gated_backward_"),
    ],
)
def test_where_nobody_watches_the_gradient_is_written_over_the_incoming_one(
    name: str, op: str
) -> None:
    run, leaves = STEPS[name]()
    loss = run()
    assert op in private_ops(lambda: torch.autograd.grad(loss, leaves))


def test_a_weight_that_is_shared_with_the_gradient_is_not_written() -> None:
    """The gradient that comes in belongs to the caller, also where a linear is the identity."""
    x, w = torch.randn(4, 8, requires_grad=True), torch.eye(8, requires_grad=True)
    y = M.gelu_linear(x, w)
    grad = torch.randn(4, 8)
    before = grad.clone()
    y.backward(grad)
    assert torch.equal(grad, before)
    assert torch.equal(w, torch.eye(8))
    expected = torch.autograd.grad(F.linear(F.gelu(x), w), x, grad)[0]
    torch.testing.assert_close(x.grad, expected)
