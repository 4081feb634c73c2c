"""Proves: what a model shares with others stays what it was for them, before and after convert and
revert: to the bit, in class, attributes and identity. An attribute that is set on either of a
module and its double is set on both.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from tests.convert import modules
from tests.convert.support import memopt_ops, one_step, state

STATELESS: dict[str, Callable[[], nn.Module]] = {
    "GELU": nn.GELU,
    "SiLU": nn.SiLU,
    "ReLU": nn.ReLU,
    "Sigmoid": nn.Sigmoid,
    "Dropout": lambda: nn.Dropout(0.5),
    "a norm without parameters": lambda: nn.LayerNorm(8, elementwise_affine=False),
    "an activation of one's own": modules.OwnSwish,
}


class Net(nn.Module):
    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.first, self.act, self.second = nn.Linear(8, 8), act, nn.Linear(8, 8)
        self.again = act

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.again(self.second(self.act(self.first(x))))
        return output


class Observer:
    """Another user of a module: whether it is what it was."""

    def __init__(self, module: nn.Module) -> None:
        self.model = Net(module)
        self.state = state(self.model)
        self.x = torch.randn(4, 8, requires_grad=True)
        self.expected = self.step()

    def step(self) -> list[Tensor]:
        torch.manual_seed(0)
        tensors = (self.x, *self.model.parameters())
        return one_step(lambda: self.model(self.x), *tensors)

    def check(self) -> None:
        assert state(self.model) == self.state
        assert memopt_ops(lambda: self.model(self.x)) == []
        for now, before in zip(self.step(), self.expected, strict=True):
            assert torch.equal(now, before)


@pytest.mark.parametrize("make", STATELESS.values(), ids=STATELESS)
def test_another_model_that_shares_it_sees_nothing(make: Callable[[], nn.Module]) -> None:
    shared = make()
    model, other, observer = Net(shared), Net(shared), Observer(shared)
    before = state(model)
    cls, attributes = type(shared), dict(shared.__dict__)
    report = memopt.convert(model)
    assert [entry.path for entry in report.swapped] == ["act"]
    assert model.act is model.again
    assert memopt_ops(lambda: model(torch.randn(4, 8))) or isinstance(shared, (nn.ReLU, nn.Sigmoid))
    observer.check()
    memopt.convert(other)
    observer.check()
    memopt.revert(model)
    assert state(model) == before
    assert model.act is shared
    assert other.act is not shared
    observer.check()
    memopt.revert(other)
    assert other.act is shared
    assert (type(shared), shared.__dict__) == (cls, attributes)
    observer.check()


def test_both_are_set_at_once() -> None:
    """A schedule of dropout keeps the modules that it found before convert."""
    drop = nn.Dropout(0.5)
    model = nn.Sequential(drop)
    memopt.convert(model)
    assert model[0] is not drop
    x = torch.ones(64, 64)
    drop.p = 0.0
    assert torch.equal(model(x), x)
    drop.p = 0.9
    assert (model(x) == 0).float().mean() > 0.8
    model.eval()
    assert not drop.training
    calls: list[object] = []
    drop.register_forward_hook(lambda module, *_: calls.append(module))
    model(x)
    assert calls == [model[0]]


def test_a_module_with_hooks_stays_the_object() -> None:
    act = nn.GELU()
    calls: list[nn.Module] = []
    act.register_forward_hook(lambda module, *_: calls.append(module))
    model = nn.Sequential(act)
    memopt.convert(model)
    model(torch.randn(2, 8))
    assert calls == [act]


def test_a_module_converted_alone_stays_the_object() -> None:
    act = nn.GELU()
    memopt.convert(act)
    assert isinstance(act, memopt.nn.GELU)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_have_doubles_of_their_own(copied: Callable[[Any], Any]) -> None:
    act = nn.Dropout(0.5)
    model = Net(act)
    memopt.convert(model)
    twin = copied(model)
    twin.act.p = 0.25
    assert act.p == 0.5
    assert twin.act is twin.again
    memopt.revert(twin)
    assert type(twin.act) is nn.Dropout
    assert model.act is not act
    memopt.revert(model)
    assert model.act is act


def test_a_region_around_a_double_stays() -> None:
    act = nn.GELU()
    model = Net(act)
    memopt.convert(model)
    memopt.checkpoint_wrapper(model.act)
    assert type(act) is nn.GELU
    memopt.revert(model)
    memopt.unwrap(model)
    assert type(model.act) is nn.GELU
    memopt.revert(model)
    assert model.act is act


def test_an_error_puts_the_originals_back() -> None:
    act = nn.GELU()
    model = Net(act)
    before = state(model)
    with pytest.raises(ValueError, match="check_fn"):
        memopt.convert(model, checkpoint=True)
    assert state(model) == before
    assert model.act is act


def test_transformers_activations_are_left_to_others() -> None:
    activations = pytest.importorskip("transformers.activations")
    shared = activations.ACT2FN["gelu_new"]
    observer = Observer(shared)
    model = Net(shared)
    memopt.convert(model)
    observer.check()
    memopt.revert(model)
    assert model.act is shared
    observer.check()


def test_a_norm_with_parameters_is_swapped_for_both() -> None:
    """Whoever holds it goes on holding it."""
    norm = nn.LayerNorm(8)
    observer = Observer(norm)
    model = Net(norm)
    memopt.convert(model)
    assert model.act is norm
    for now, before in zip(observer.step(), observer.expected, strict=True):
        torch.testing.assert_close(now, before, rtol=1e-5, atol=1e-5)
    memopt.revert(model)
    observer.check()
