"""Proves: memopt.compile needs less than torch.compile, the gradients stay, and it works with what
torch.compile works with.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import memopt
from benchmarks.compile import Block
from memopt._checkpoint import checkpoint_wrapper
from tests.compile.support import blocks, gradients, no_kernels, sample, step_bytes

slow = pytest.mark.slow  # Inductor compiles C++


def loss_of(model: Callable[..., Tensor], x: Tensor) -> Callable[[], Tensor]:
    return lambda: model(x).square().mean()


def assert_close_gradients(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(actual) == list(expected)
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-4, atol=1e-6, msg=name)


@slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_needs_less_and_has_the_gradients(dynamic: bool) -> None:
    model, x = blocks(1, width=16), sample(width=16)
    with no_kernels():
        plain = torch.compile(model, dynamic=dynamic, fullgraph=True)
        before = step_bytes(loss_of(plain, x), model)
    ours = memopt.compile(model, dynamic=dynamic, fullgraph=True, budget=0.8)
    after = step_bytes(loss_of(ours, x), model)
    assert after.held < 0.8 * before.held
    assert after.most <= 0.8 * before.most
    expected = gradients(loss_of(model, x), model)
    assert_close_gradients(gradients(loss_of(ours, x), model), expected)
    if dynamic:
        y = sample(3, 40, 16)
        assert_close_gradients(
            gradients(loss_of(ours, y), model), gradients(loss_of(model, y), model)
        )


@slow
@pytest.mark.thorough
@pytest.mark.usefixtures("minimum_cut")
def test_graph_breaks_and_autocast() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Block(width=16), Block(width=16)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            torch._dynamo.graph_break()
            return self.second(x)

    model, x = Broken(), sample(width=16)

    def loss(model: Callable[..., Tensor]) -> Callable[[], Tensor]:
        def run() -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return model(x).float().square().mean()

        return run

    with no_kernels():
        plain = step_bytes(loss(torch.compile(model)), model)
    ours = memopt.compile(model)
    assert step_bytes(loss(ours), model).held < plain.held
    expected = gradients(loss(model), model)
    for name, actual in gradients(loss(ours), model).items():
        torch.testing.assert_close(actual, expected[name], rtol=0.1, atol=2e-3, msg=name)


@slow
@pytest.mark.usefixtures("minimum_cut")
def test_dropout_is_the_same_in_backward() -> None:
    """y = dropout(x w): its gradient is nonzero where y is, by the factor that y has."""
    x, weight = sample(width=64), nn.Parameter(torch.eye(64))
    dropped = memopt.compile(lambda x: nn.functional.dropout(x @ weight, 0.5), fullgraph=True)
    leaf = x.clone().requires_grad_()
    y = dropped(leaf)
    (gradient,) = torch.autograd.grad(y.sum(), leaf)
    assert 0.4 < (y == 0).float().mean() < 0.6
    torch.testing.assert_close(gradient, (y != 0) * 2.0)


@slow
def test_regions_inside() -> None:
    plain, x = blocks(), sample()
    model = copy.deepcopy(plain)
    for block in model:
        checkpoint_wrapper(block)
    ours = memopt.compile(model, fullgraph=True)
    held = step_bytes(loss_of(ours, x), model).held
    assert held < 3 * x.nbytes + 4096  # the blocks' inputs, and not what is inside
    assert_close_gradients(gradients(loss_of(ours, x), model), gradients(loss_of(plain, x), plain))


@slow
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_modes(mode: str) -> None:
    """What they ask for on a GPU (CUDA graphs, tuned templates) the CPU leaves out."""
    model, x = blocks(1, width=16), sample(width=16)
    ours = memopt.compile(model, mode=mode)
    assert_close_gradients(gradients(loss_of(ours, x), model), gradients(loss_of(model, x), model))


@slow
def test_options_of_ones_own_and_a_model_compiled_in_place() -> None:
    model, x = blocks(1, width=16), sample(width=16)
    expected = gradients(loss_of(model, x), model)
    model.compile(options={**memopt.compile.options(), "epilogue_fusion": False})
    assert_close_gradients(gradients(loss_of(model, x), model), expected)


@slow
def test_a_copy_is_compiled_too() -> None:
    model, x = blocks(1, width=16), sample(width=16)
    compiled = memopt.compile(model)
    copied = copy.deepcopy(compiled)
    assert copied._orig_mod is not model
    with no_kernels():
        held = [step_bytes(loss_of(m, x), m).held for m in (compiled, copied)]
    assert held[0] == held[1]
