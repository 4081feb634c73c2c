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

SHARED: dict[str, Callable[[], nn.Module]] = {
    "GELU": nn.GELU,
    "SiLU": nn.SiLU,
    "ReLU": nn.ReLU,
    "Sigmoid": nn.Sigmoid,
    "Dropout": lambda: nn.Dropout(0.5),
    "a norm without parameters": lambda: nn.LayerNorm(8, elementwise_affine=False),
    "an activation of one's own": modules.OwnSwish,
    "LayerNorm": lambda: nn.LayerNorm(8),
    "RMSNorm": lambda: nn.RMSNorm(8),
    "a norm of one's own": lambda: modules.PlainRMSNorm(8),
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


@pytest.mark.parametrize("make", SHARED.values(), ids=SHARED)
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


class Tower(nn.Module):
    """One of the models that share a norm."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), norm

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.norm(self.linear(x))
        return output


def trained(a: nn.Module, b: nn.Module) -> list[Tensor]:
    """The parameters of both after two steps on both losses."""
    parameters = list(dict.fromkeys([*a.parameters(), *b.parameters()]))
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        optimizer.zero_grad()
        (a(x).sum() + b(x).square().sum()).backward()
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm, modules.PlainRMSNorm])
def test_a_norm_of_two_models_trains_as_one(norm: Callable[[int], nn.Module]) -> None:
    torch.manual_seed(0)
    shared = norm(8)
    a, b = Tower(shared), Tower(shared)
    twins = copy.deepcopy(nn.ModuleList([a, b]))
    names, before = list(a.state_dict()), list(a.parameters())
    memopt.convert(a)
    assert list(a.state_dict()) == names
    assert all(now is then for now, then in zip(a.parameters(), before, strict=True))
    assert b.norm is shared
    for ours, theirs in zip(trained(a, b), trained(*twins), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_parameters_that_are_exchanged_are_exchanged_in_both() -> None:
    """As load_state_dict(assign=True), to() and FSDP2 do."""
    norm = nn.LayerNorm(8)
    model = nn.Sequential(norm)
    memopt.convert(model)
    norm.weight = nn.Parameter(torch.full((8,), 2.0))
    assert model[0].weight is norm.weight
    model.double()
    assert norm.weight.dtype == torch.float64
    model.load_state_dict({"0.weight": torch.ones(8), "0.bias": torch.zeros(8)}, assign=True)
    assert norm.bias is model[0].bias
    assert not norm.bias.any()
    model.requires_grad_(False)
    assert not norm.weight.requires_grad
    assert norm.weight.dtype == torch.float32


def test_a_norm_that_the_model_keeps_in_an_attribute_as_well_stays_the_object() -> None:
    """Else the attribute would be called, and what is reported as swapped would not be."""

    class Aliased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = (nn.LayerNorm(8) for _ in range(3))
            self.in_order = [self.first, self.second]
            self.__dict__["alias"] = self.third

        def forward(self, x: Tensor) -> Tensor:
            for norm in self.in_order:
                x = norm(x)
            output: Tensor = self.alias(x)
            return output

    model = Aliased()
    memopt.convert(model)
    assert model.first is model.in_order[0]
    calls = memopt_ops(lambda: model(torch.randn(2, 8, requires_grad=True)))
    assert len([op for op in calls if "norm_forward" in op]) == 3


def test_a_norm_with_hooks_stays_the_object() -> None:
    norm = nn.LayerNorm(8)
    calls: list[nn.Module] = []
    norm.register_forward_pre_hook(lambda module, *_: calls.append(module))
    model = nn.Sequential(norm)
    memopt.convert(model)
    model(torch.randn(2, 8))
    assert calls == [norm]
    assert model[0] is norm


def test_what_is_in_slots_stays_where_it_is() -> None:
    class Slotted(nn.LayerNorm):
        __slots__ = ("kept",)

    norm = Slotted(8)
    object.__setattr__(norm, "kept", 3)
    model = nn.Sequential(norm)
    memopt.convert(model)
    assert isinstance(model[0], memopt.nn.LayerNorm)
    assert model[0].kept == 3


def test_a_region_that_was_around_a_norm_before_is_put_back_with_it() -> None:
    norm = nn.LayerNorm(8)
    model = nn.Sequential(norm)
    memopt.checkpoint_wrapper(model[0])
    memopt.convert(model)
    memopt.revert(model)
    assert model[0] is norm
    memopt.unwrap(model)
    assert type(norm) is nn.LayerNorm
