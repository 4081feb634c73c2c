"""Proves: memopt.compile holds less for backward than torch.compile, the gradients stay, and it
works with what torch.compile works with.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import memopt
from tests.compile.support import blocks, gradients, sample, step_bytes

slow = pytest.mark.slow  # Inductor compiles C++


def loss_of(model: Callable[..., Tensor], x: Tensor) -> Callable[[], Tensor]:
    return lambda: model(x).square().mean()


def assert_close_gradients(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(actual) == list(expected)
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-4, atol=1e-6, msg=name)


@slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_holds_less_and_has_the_gradients(dynamic: bool) -> None:
    model, x = blocks(), sample()
    plain = torch.compile(model, dynamic=dynamic, fullgraph=True)
    before = step_bytes(loss_of(plain, x), model)
    torch.compiler.reset()
    ours = memopt.compile(model, dynamic=dynamic, fullgraph=True)
    after = step_bytes(loss_of(ours, x), model)
    assert after.held < 0.8 * before.held
    assert after.most <= before.most
    expected = gradients(loss_of(model, x), model)
    assert_close_gradients(gradients(loss_of(ours, x), model), expected)
    if dynamic:
        y = sample(3, 40)
        assert_close_gradients(
            gradients(loss_of(ours, y), model), gradients(loss_of(model, y), model)
        )
