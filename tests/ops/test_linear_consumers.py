"""Proves, op by op as the dispatcher sees them, that linears behind a norm or an activation do for
backward only what gradients ask for: with frozen weights beside trainable ones (LoRA), a frozen
input, frozen weights, a bias alone. A product of matrices is named by its shape, so that each test
says which ones run and shows that no other does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import memopt.functional as M
from memopt.memory.saved import SavedTensors
from tests.support.record_ops import RecordOps

ROWS, FEATURES, OUT, RANK = 12, 8, 6, 2
MEMOPT = torch.ops.memopt


@dataclass(frozen=True)
class Front:
    """What stands before the linears, with its parameters; `op` is run in its backward."""

    parameters: int
    run: Callable[..., Tensor]
    """Of the input, the parameters, a weight and a bias."""
    forward: object
    backward: object
    """Not the one that writes over the incoming gradient: a dispatch mode is watching."""

    def __call__(self, input: Tensor, *parameters: Tensor | None) -> Tensor:
        return self.run(input, *parameters)


FRONTS = {
    "layer_norm": Front(
        2, M.layer_norm_linear, MEMOPT._norm_forward.default, MEMOPT._norm_backward.default
    ),
    "rms_norm": Front(
        1, M.rms_norm_linear, MEMOPT._norm_forward.default, MEMOPT._norm_backward.default
    ),
    "gelu": Front(
        0, M.gelu_linear, MEMOPT._activation_forward.default, MEMOPT._activation_backward.default
    ),
}
every_front = pytest.mark.parametrize("front", FRONTS.values(), ids=FRONTS.keys())


def leaf(*shape: int, trains: bool = True) -> Tensor:
    return torch.randn(shape).requires_grad_(trains)


def parameters_of(front: Front, trains: bool = True) -> list[Tensor]:
    return [leaf(FEATURES, trains=trains) for _ in range(front.parameters)]


def backward(*outputs: Tensor) -> RecordOps:
    """The ops of a backward from all outputs."""
    grads = [torch.ones_like(output) for output in outputs]
    with RecordOps() as ops:
        torch.autograd.backward(outputs, grads)
    return ops


def products(ops: RecordOps) -> list[tuple[int, int, int]]:
    """(n, k, m) of each product of an n by k and a k by m matrix, in order."""
    mm = torch.ops.aten.mm.default
    assert not any("bmm" in str(op) or "addmm" in str(op) for op in ops.ops)
    found = [args[:2] for op, args in ops.calls if op == mm]
    return [(a.shape[0], a.shape[1], b.shape[1]) for a, b in found]


def sums(ops: RecordOps) -> int:
    """How many sums over rows ran beside the front's kernel: those of biases."""
    return ops.ops.count(torch.ops.aten.sum.dim_IntList)


def again(front: Front, ops: RecordOps) -> list[bool]:
    """For each run of the front's backward, whether it wrote the output again."""
    return [
        bool(arguments.get("recompute_output", False))
        for arguments in ops.arguments_of(front.backward)
    ]


# Products of the backward: of W, (OUT, FEATURES), and of A, (RANK, FEATURES).
INPUT_W, INPUT_A = (ROWS, OUT, FEATURES), (ROWS, RANK, FEATURES)
WEIGHT_W, WEIGHT_A = (OUT, ROWS, FEATURES), (RANK, ROWS, FEATURES)


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_beside_a_frozen_weight_only_the_adapters_gets_a_gradient(name: str) -> None:
    """LoRA's first halves, W n(x) and A n(x), with W and its bias frozen."""
    front, x = FRONTS[name], leaf(ROWS, FEATURES)
    parameters = parameters_of(front, trains=False)
    frozen, bias = leaf(OUT, FEATURES, trains=False), leaf(OUT, trains=False)
    adapter = leaf(RANK, FEATURES)
    with SavedTensors(exclude=[*parameters, frozen, bias, adapter]) as saved:
        outputs = front(x, *parameters, [frozen, adapter], [bias, None])
    statistics = ROWS * 4 * (2 if name == "layer_norm" else 1)
    assert saved.bytes == x.nbytes + statistics
    ops = backward(*outputs)
    assert sorted(products(ops)) == sorted([INPUT_W, INPUT_A, WEIGHT_A])
    assert again(front, ops) == [True]
    assert sums(ops) == 0
    assert frozen.grad is None
    assert adapter.grad is not None


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_a_linear_that_no_loss_uses_costs_nothing(name: str) -> None:
    front, x = FRONTS[name], leaf(ROWS, FEATURES)
    weights = [leaf(OUT, FEATURES), leaf(RANK, FEATURES)]
    y, _ = front(x, *parameters_of(front), weights, [leaf(OUT), leaf(RANK)])
    ops = backward(y)
    assert sorted(products(ops)) == sorted([INPUT_W, WEIGHT_W])
    assert sums(ops) == 1
    assert weights[1].grad is None


@every_front
def test_a_frozen_input_gets_no_product(front: Front) -> None:
    """The front runs forward again, and its backward not at all."""
    x, parameters = leaf(ROWS, FEATURES, trains=False), parameters_of(front, trains=False)
    weight, bias = leaf(OUT, FEATURES), leaf(OUT)
    with SavedTensors(exclude=[*parameters, weight, bias]) as saved:
        y = front(x, *parameters, weight, bias)
    assert saved.bytes == x.nbytes
    ops = backward(y)
    assert products(ops) == [WEIGHT_W]
    assert again(front, ops) == []
    assert ops.ops.count(front.forward) == 1
    assert sums(ops) == 1


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_a_frozen_input_in_front_of_trainable_norm_parameters(name: str) -> None:
    """The norm's parameters need the product; the input still gets no gradient."""
    front, x = FRONTS[name], leaf(ROWS, FEATURES, trains=False)
    parameters = parameters_of(front)
    ops = backward(front(x, *parameters, leaf(OUT, FEATURES), leaf(OUT)))
    assert products(ops) == [INPUT_W, WEIGHT_W]
    (arguments,) = ops.arguments_of(front.backward)
    assert list(arguments["output_mask"]) == ([False] + [True] * front.parameters + [False])[:3]
    assert x.grad is None


@every_front
def test_frozen_weights_get_no_product_and_the_output_is_not_written_again(front: Front) -> None:
    x, parameters = leaf(ROWS, FEATURES), parameters_of(front)
    ops = backward(front(x, *parameters, leaf(OUT, FEATURES, trains=False), leaf(OUT)))
    assert products(ops) == [INPUT_W]
    assert again(front, ops) == [False]
    assert ops.ops.count(front.forward) == 0
    assert sums(ops) == 1
    assert x.grad is not None


@every_front
def test_where_only_the_bias_trains_there_is_nothing_but_its_sum(front: Front) -> None:
    x, parameters = leaf(ROWS, FEATURES, trains=False), parameters_of(front, trains=False)
    weight, bias = leaf(OUT, FEATURES, trains=False), leaf(OUT)
    with SavedTensors() as saved:
        y = front(x, *parameters, weight, bias)
    assert saved.tensors == []
    ops = backward(y)
    assert products(ops) == []
    assert sums(ops) == 1
    assert not any("memopt" in str(op) for op in ops.ops)
    assert torch.equal(bias.grad, torch.full((OUT,), float(ROWS)))


@every_front
def test_where_nothing_trains_nothing_is_recorded(front: Front) -> None:
    x, parameters = leaf(ROWS, FEATURES, trains=False), parameters_of(front, trains=False)
    with SavedTensors() as saved:
        y = front(x, *parameters, leaf(OUT, FEATURES, trains=False), None)
    assert not y.requires_grad
    assert saved.tensors == []
