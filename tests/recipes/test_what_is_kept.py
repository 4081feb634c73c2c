"""Proves which tensors memopt.recipes() keeps: an output of an op never where its inputs are kept
anyway, whoever saves it and whichever view of it; and always where a recipe would save nothing or
could not be right. Bytes are counted exactly.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import memopt.functional as M
from tests.recipes.support import FEATURES, assert_same_gradients, kept_bytes, leaf

pytestmark = pytest.mark.usefixtures("collector_off")

ROWS = 6
ONE = ROWS * FEATURES * 4  # a float32 activation

X, UP = leaf(ROWS, FEATURES), leaf(ROWS, FEATURES, seed=1)
WIDE = leaf(ROWS, 2 * FEATURES, seed=2)
W, B = leaf(FEATURES, seed=3), leaf(FEATURES, seed=4)
LINEAR = leaf(FEATURES, FEATURES, seed=5)
LEAVES = [X, UP, WIDE, W, B, LINEAR]
PARAMETERS = [W, B, LINEAR]

# An op, what its own node keeps, and the rows of statistics or the state beside.
OPS: dict[str, tuple[Callable[[], Tensor], int]] = {
    "gelu": (lambda: M.gelu(X), ONE),
    "gelu tanh": (lambda: M.gelu(X, "tanh"), ONE),
    "silu": (lambda: M.silu(X), ONE),
    "relu": (lambda: M.relu(X), ONE),
    "quick_gelu": (lambda: M.quick_gelu(X), ONE),
    "relu_squared": (lambda: M.relu_squared(X), ONE),
    "sigmoid": (lambda: M.sigmoid(X), ONE),
    "swiglu": (lambda: M.swiglu(X, UP), 2 * ONE),
    "geglu": (lambda: M.geglu(X, UP, "tanh"), 2 * ONE),
    "swiglu_packed": (lambda: M.swiglu_packed(WIDE), 2 * ONE),
    "interleaved": (lambda: M.geglu_packed(WIDE, interleaved=True), 2 * ONE),
    "layer_norm": (lambda: M.layer_norm(X, (FEATURES,), W, B), ONE + 8 * ROWS),
    "layer_norm, plain": (lambda: M.layer_norm(X, (FEATURES,)), ONE + 8 * ROWS),
    "layer_norm_gelu": (lambda: M.layer_norm_gelu(X, (FEATURES,), W, B), ONE + 8 * ROWS),
    "rms_norm": (lambda: M.rms_norm(X, (FEATURES,), W), ONE + 4 * ROWS),
    "zero-centred": (
        lambda: M.rms_norm(X, (FEATURES,), W, zero_centered_weight=True),
        ONE + 4 * ROWS,
    ),
    "add_layer_norm": (lambda: M.add_layer_norm(X, UP, (FEATURES,), W, B)[0], ONE + 8 * ROWS),
    "add_rms_norm": (lambda: M.add_rms_norm(X, UP, (FEATURES,), W)[0], ONE + 4 * ROWS),
    "activation_dropout": (lambda: M.activation_dropout(X, 0.3, activation="silu"), ONE + 16),
    "dropout_add_layer_norm": (
        lambda: M.dropout_add_layer_norm(X, UP, 0.3, (FEATURES,), W, B)[0],
        ONE + 8 * ROWS + 16,
    ),
    "dropout_add_rms_norm": (
        lambda: M.dropout_add_rms_norm(X, UP, 0.3, (FEATURES,), W)[0],
        ONE + 4 * ROWS + 16,
    ),
    "dropout of something kept": (lambda: M.dropout(M.gelu(X), 0.5), ONE + 16),
}
every_op = pytest.mark.parametrize("name", OPS)


@every_op
def test_a_linear_behind_does_not_keep_the_output(name: str) -> None:
    op, own = OPS[name]
    assert kept_bytes(lambda: F.linear(op(), LINEAR), PARAMETERS) == own
    if name != "dropout of something kept":
        assert kept_bytes(lambda: F.linear(op(), LINEAR), PARAMETERS, recipes=False) == own + ONE
    assert_same_gradients(lambda: F.linear(op(), LINEAR).square().sum(), LEAVES)


CONSUMERS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda y: y.square(),
    "a view": lambda y: y.view(2, -1, FEATURES) @ LINEAR,
    "transposed": lambda y: y.t().matmul(X),
    "a slice": lambda y: F.linear(y[1:4, 2:], LINEAR[:, 2:]),
    "every second column": lambda y: y[:, ::2].square(),
    "flipped dimensions": lambda y: y.unflatten(1, (4, 4)).transpose(1, 2).square(),
    "expanded": lambda y: y[:1].expand(5, FEATURES).square(),
    "detached": lambda y: y.detach() * LINEAR[:ROWS],
    "three linears": lambda y: sum(F.linear(y, LINEAR * i).sum() for i in range(3)),  # type: ignore[arg-type,return-value]
    "softmax's input": lambda y: F.cross_entropy(y, torch.zeros(ROWS, dtype=torch.long)),
}


@pytest.mark.parametrize("consumer", CONSUMERS)
def test_any_consumer_and_any_view(consumer: str) -> None:
    assert_same_gradients(
        lambda: CONSUMERS[consumer](M.layer_norm(X, (FEATURES,), W, B)).square().sum(), LEAVES
    )
    if consumer in ("a view", "a slice", "detached", "three linears"):
        kept = kept_bytes(
            lambda: CONSUMERS[consumer](M.layer_norm(X, (FEATURES,), W, B)), PARAMETERS
        )
        # `three linears` makes weights of its own.
        weights = 3 * 4 * FEATURES**2 if consumer == "three linears" else 0
        assert kept == ONE + 8 * ROWS + weights


def test_recipes_chain() -> None:
    def run() -> Tensor:
        y = M.dropout(M.gelu(M.layer_norm(X, (FEATURES,), W, B)), 0.1)
        return F.linear(M.dropout(F.relu(M.silu(y)) * 0 + y, 0.0), LINEAR)

    def chain() -> Tensor:
        return F.linear(M.dropout(M.gelu(M.layer_norm(X, (FEATURES,), W, B)), 0.1), LINEAR)

    assert kept_bytes(chain, PARAMETERS) == ONE + 8 * ROWS + 16
    assert_same_gradients(lambda: chain().square().sum(), LEAVES)
    assert_same_gradients(lambda: run().square().sum(), LEAVES)


def test_a_recipe_that_would_save_nothing_is_not_used() -> None:
    """Nothing keeps the linear's output, which dropout reads; to keep dropout's costs the same."""

    def run() -> Tensor:
        return F.linear(M.dropout(F.linear(X, LINEAR), 0.5), LINEAR)

    assert kept_bytes(run, PARAMETERS) == 2 * ONE + 16  # X, dropout's output
    assert_same_gradients(lambda: run().square().sum(), LEAVES)

    def kept_by_another() -> Tensor:
        y = F.linear(X, LINEAR)
        return y.sin() + F.linear(M.dropout(y, 0.5), LINEAR)

    assert kept_bytes(kept_by_another, PARAMETERS) == 2 * ONE + 16  # X, y
    assert_same_gradients(lambda: kept_by_another().square().sum(), LEAVES)


def test_an_up_that_its_own_node_does_not_keep() -> None:
    """A gated unit whose gate is frozen does not keep up, so its output has no recipe."""
    gate = X.detach()
    assert kept_bytes(lambda: F.linear(M.swiglu(gate, UP), LINEAR), PARAMETERS) == 2 * ONE
    assert_same_gradients(lambda: F.linear(M.swiglu(gate, UP), LINEAR).square().sum(), LEAVES)


def test_written_in_place_it_is_kept() -> None:
    def run() -> Tensor:
        y = M.gelu(X)
        return F.linear(y.add_(1), LINEAR)

    assert kept_bytes(run, PARAMETERS) == 2 * ONE
    assert_same_gradients(lambda: run().square().sum(), LEAVES)

    def through_a_view() -> Tensor:
        y = M.gelu(X)
        y[0].mul_(2)
        return F.linear(y, LINEAR)

    assert_same_gradients(lambda: through_a_view().square().sum(), LEAVES)


def test_input_written_in_place_before_the_output_is_saved() -> None:
    """The op's own node can then no longer differentiate; a frozen norm in front of it is fine."""
    x = leaf(ROWS, FEATURES, seed=8)
    weight = leaf(FEATURES, FEATURES, seed=9)

    def run() -> Tensor:
        h = x * 2
        y = M.gelu(h)
        h.add_(1)
        return F.linear(y, weight)

    assert kept_bytes(run, [weight]) == 2 * ONE
    expected = torch.autograd.grad(run().sum(), weight)
    from memopt import recipes

    with recipes():
        loss = run().sum()
    assert torch.equal(torch.autograd.grad(loss, weight)[0], expected[0])


def test_views_of_another_dtype_are_kept() -> None:
    def run() -> Tensor:
        return torch.view_as_complex(M.gelu(X).unflatten(1, (-1, 2))).abs()

    assert kept_bytes(run) >= 2 * ONE
    assert_same_gradients(lambda: run().sum(), LEAVES)


def test_without_a_graph_nothing_is_remembered() -> None:
    with torch.no_grad():
        assert kept_bytes(lambda: F.linear(M.gelu(X), LINEAR)) == 0
    frozen = X.detach()
    assert kept_bytes(lambda: F.linear(M.gelu(frozen), LINEAR), PARAMETERS) == ONE


@pytest.mark.parametrize("shape", [(0, FEATURES), (1, FEATURES), (2, 3, FEATURES)], ids=str)
def test_empty_and_batched(shape: tuple[int, ...]) -> None:
    x = leaf(*shape)
    assert_same_gradients(
        lambda: F.linear(M.gelu(M.layer_norm(x, (FEATURES,), W, B)), LINEAR).sum(), [x, W, LINEAR]
    )


def test_inputs_of_any_strides() -> None:
    x = leaf(FEATURES, ROWS).t()
    base = leaf(ROWS, 3 * FEATURES)
    for strided in (lambda: x, lambda: base[:, FEATURES : 2 * FEATURES], lambda: base[:, ::3]):
        for op in (M.gelu, lambda t: M.layer_norm(t, (FEATURES,), W, B)):
            run = lambda op=op, s=strided: F.linear(op(s() * 1), LINEAR).square().sum()  # noqa: E731
            assert_same_gradients(run, [base, W, LINEAR])
            direct = lambda op=op, s=strided: F.linear(op(s()), LINEAR).square().sum()  # noqa: E731
            assert_same_gradients(direct, [base, W, LINEAR])


def test_an_alias_of_another_dtype_is_not_taken_for_the_input() -> None:
    """Both lie on the same elements, and both are held."""
    x = leaf(ROWS, FEATURES, dtype=torch.bfloat16)
    scale = torch.ones((), dtype=torch.float16, requires_grad=True)
    linear = leaf(FEATURES, FEATURES, seed=5, dtype=torch.bfloat16)

    def run() -> Tensor:
        y = M.gelu(x)
        other = x.detach().view(torch.float16) * scale
        return F.linear(y, linear).float().sum() + other.float().sum()

    assert_same_gradients(run, [x, linear, scale])


def write_an_alias() -> Tensor:
    y = M.gelu(X).data
    return y.mul_(2)


def write_an_alias_by_set() -> Tensor:
    y = torch.empty(0).set_(M.gelu(X).detach())
    return y.mul_(2)


@pytest.mark.parametrize("write", [write_an_alias, write_an_alias_by_set])
def test_an_alias_that_counts_its_own_writes(write: Callable[[], Tensor]) -> None:
    assert_same_gradients(lambda: F.linear(write(), LINEAR).sum(), [LINEAR])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_kept() -> None:
    parts = [leaf(2, FEATURES), leaf(3, FEATURES, seed=1)]

    def run() -> Tensor:
        nested = torch.nested.as_nested_tensor(parts)
        return torch.nested.to_padded_tensor(nested * nested, 0.0).sum()

    assert_same_gradients(run, parts)


@pytest.mark.parametrize("op", [M.relu, lambda h: M.dropout(h, 1e-9)], ids=["relu", "dropout"])
def test_chains_as_long_as_no_stack(op: Callable[[Tensor], Tensor]) -> None:
    gc.collect()  # so many calls run the collector, which would take other tests' handles meanwhile
    x = leaf(4)

    def run() -> Tensor:
        h = M.gelu(x)
        for _ in range(20_000):
            h = op(h)
        return (h * h).sum()

    assert_same_gradients(run, [x])
