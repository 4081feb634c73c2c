"""Proves memopt.compat.fairscale: FairScale's names at its module paths are memopt's own, and what
FairScale's tests of checkpoint_wrapper assert holds through them. (What its users reported broken
is in tests/checkpoint/test_fairscale.py, of the same functions.)
"""

from __future__ import annotations

import importlib
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt.compat.fairscale.nn.checkpoint.checkpoint_activations import (
    checkpoint_wrapper,
    disable_checkpointing,
    enable_checkpointing,
    enable_recomputing,
    is_checkpointing,
    is_recomputing,
)
from tests.checkpoint.support import CountCalls, step_results
from tests.support.bits import assert_same_bits

OURS = {
    "nn": ["checkpoint_wrapper"],
    "nn.checkpoint": ["checkpoint_wrapper", "is_checkpointing", "is_recomputing"],
    "nn.checkpoint.checkpoint_activations": [
        "checkpoint_wrapper",
        "disable_checkpointing",
        "is_checkpointing",
        "is_recomputing",
    ],
    "nn.misc": ["checkpoint_wrapper"],
    "nn.misc.checkpoint_activations": ["checkpoint_wrapper"],
}


@pytest.mark.parametrize(
    ("path", "name"), [(path, n) for path, names in OURS.items() for n in names]
)
def test_names_are_where_fairscale_has_them(path: str, name: str) -> None:
    module = importlib.import_module(f"memopt.compat.fairscale.{path}")
    found = getattr(module, name)
    assert found.__module__.startswith("memopt._checkpoint.")
    public = {"disable_checkpointing": "disable"}.get(name, name)
    assert found is getattr(memopt.checkpoint, public, None) or found is getattr(memopt, public)
    assert name in module.__all__


def test_contexts_set_what_the_predicates_say() -> None:
    elsewhere: list[bool] = []

    def look() -> None:
        elsewhere.extend((is_checkpointing(), is_recomputing()))

    with enable_checkpointing():
        assert (is_checkpointing(), is_recomputing()) == (True, False)
        with enable_recomputing():
            assert (is_checkpointing(), is_recomputing()) == (True, True)
            thread = threading.Thread(target=look)
            thread.start()
            thread.join()
        assert (is_checkpointing(), is_recomputing()) == (True, False)
        with pytest.raises(ArithmeticError), enable_recomputing():
            raise ArithmeticError
    assert (is_checkpointing(), is_recomputing()) == (False, False)
    assert elsewhere == [False, False]


@pytest.mark.parametrize("around", [enable_checkpointing, enable_recomputing])
def test_regions_inside_the_contexts(around: Any) -> None:
    """Gradients are those of the plain run; the flags are as in a region that is nested there."""
    seen: list[tuple[bool, bool]] = []

    class Looks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append((is_checkpointing(), is_recomputing()))
            return x.exp().sin()

    x = torch.randn(4, requires_grad=True)
    with around():
        y = checkpoint_wrapper(Looks())(x)
    y.sum().backward()
    first = (True, False) if around is enable_checkpointing else (False, True)
    assert seen == [first, (False, True)]
    (expected,) = torch.autograd.grad(x.exp().sin().sum(), x)
    assert torch.equal(x.grad, expected)


class Convolutions(nn.Module):
    """Takes a keyword argument; gives one tensor or two."""

    def __init__(self, two: bool, wrapped: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.two = two
        stacks = [
            nn.Sequential(nn.Conv2d(channels, 5, 3), nn.ReLU(), nn.Conv2d(5, 5, 3))
            for channels in (1, 3)
        ]
        self.first, self.second = (
            checkpoint_wrapper(stack) if wrapped >> number & 1 else stack
            for number, stack in enumerate(stacks)
        )

    def forward(self, one: Tensor, other: Tensor) -> Any:
        outputs = self.first(one), self.second(other)
        return outputs if self.two else outputs[0] + outputs[1]


@pytest.mark.parametrize("two", [False, True])
@pytest.mark.parametrize("wrapped", [1, 2, 3])
def test_several_inputs_and_outputs(two: bool, wrapped: int) -> None:
    one, other = torch.rand(2, 1, 12, 12), torch.rand(2, 3, 12, 12)

    def results(wrapped: int) -> list[Tensor | None]:
        model = Convolutions(two, wrapped)
        return step_results(lambda: model(one, other=other), model.parameters())

    assert_same_bits(results(wrapped), results(0))


def test_inside_disable_checkpointing_there_is_one_forward() -> None:
    module = checkpoint_wrapper(nn.Sequential(CountCalls(), nn.Linear(2, 2), nn.Tanh()))
    for context, calls in ((torch.enable_grad(), 2), (disable_checkpointing(), 1)):
        module[0].calls = 0
        with context:
            module(torch.randn(3, 2)).sum().backward()
        assert module[0].calls == calls


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.BatchNorm2d])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_step_leaves_the_same_state(norm: type[nn.Module], dtype: torch.dtype) -> None:
    """Weights and running statistics after one step of SGD."""
    states = []
    for wrap in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 2), norm(2)).to(dtype)
        if wrap:
            model = checkpoint_wrapper(model)
        x = torch.rand(2, 2, 2, 2).to(dtype).requires_grad_()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(x).square().sum().backward()
        optimizer.step()
        states.append(model.state_dict())
    assert list(states[0]) == list(states[1])
    assert_same_bits(states[0].values(), states[1].values())


def test_the_forward_counter_of_before_041() -> None:
    module = checkpoint_wrapper(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), False, True)
    loss = module(torch.randn(3, 2)).sum()
    assert module[0]._checkpoint_fwd_counter == 1
    loss.backward()
    assert module[0]._checkpoint_fwd_counter == 0
