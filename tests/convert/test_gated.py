"""Proves: gated units are known by what they compute, call the submodules that they called, in that
order, and make way where something wants to see what is not computed any more.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt._convert.swap import swap_of
from tests.convert import modules
from tests.convert.support import converted_inside, memopt_ops, one_step

UNITS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "three linears": (modules.FeedForward, "memopt.functional.gated('silu')"),
    "with dropouts and a norm": (modules.Decorated, "memopt.functional.gated('gelu')"),
    "gate first": (
        lambda: modules.Packed("first"),
        "memopt.functional.gated_packed('silu')",
    ),
    "gate last": (lambda: modules.Packed("second"), "memopt.functional.gated('silu')"),
    "interleaved": (modules.Interleaved, "memopt.functional.gated_packed('silu')"),
    "one linear in front": (modules.GEGLU, "memopt.functional.gated('gelu')"),
    "with a module": (modules.GLU, "memopt.functional.gated('silu')"),
    "two linears in front": (modules.TwoLinears, "memopt.functional.gated('relu')"),
    "no linear": (modules.Halves, "memopt.functional.gated('gelu')"),
}

UNGATED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "own formula": (modules.OwnFormula, "memopt.functional.activation('gelu_tanh')"),
    "squared": (modules.Squared, "memopt.functional.activation('relu_squared')"),
    "projection": (modules.Projection, "memopt.functional.activation('quick_gelu')"),
}


def converted(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """A module, and a copy that was converted."""
    torch.manual_seed(2)
    plain = make()
    return plain, converted_inside(copy.deepcopy(plain))


def assert_equal_steps(ours: nn.Module, theirs: nn.Module) -> None:
    x = torch.randn(3, 5, 8, requires_grad=True)
    for mine, expected in zip(
        one_step(lambda: ours(x), x, *(p for p in ours.parameters() if p.requires_grad)),
        one_step(lambda: theirs(x), x, *(p for p in theirs.parameters() if p.requires_grad)),
        strict=True,
    ):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)


def uses_gated(module: nn.Module) -> bool:
    x = torch.randn(3, 5, 8, requires_grad=True)
    return any("gated" in op or "glu" in op for op in memopt_ops(lambda: module(x)))


@pytest.mark.parametrize(("make", "to"), UNITS.values(), ids=UNITS)
def test_gated_units_are_recognised(make, to: str) -> None:
    model = nn.Sequential(make())
    report = memopt.convert(model)
    assert [e.to for e in report.swapped if e.path == "0"] == [to]
    assert uses_gated(model)
    assert_equal_steps(*converted(make)[::-1])


@pytest.mark.parametrize(("make", "to"), UNGATED.values(), ids=UNGATED)
def test_formulas_between_linears_are_recognised(make, to: str) -> None:
    model = nn.Sequential(make())
    report = memopt.convert(model)
    assert [(e.path, e.to) for e in report.swapped] == [("0", to)]
    x = torch.randn(3, 5, 8, requires_grad=True)
    assert any("activation" in op for op in memopt_ops(lambda: model(x)))
    assert_equal_steps(*converted(make)[::-1])


ALL = {**UNITS, **UNGATED}


@pytest.mark.parametrize(("make", "to"), ALL.values(), ids=ALL)
def test_units_save_less(make, to: str) -> None:
    """With a linear behind, which would store its input."""
    outputs = make()(torch.randn(3, 8)).shape[-1]
    model = nn.Sequential(nn.Linear(8, 8), make(), nn.Linear(outputs, 8))
    report = memopt.convert(model, torch.randn(3, 5, 8))
    assert report.bytes_after < report.bytes_before


def test_further_arguments_go_to_the_unit_s_own_forward() -> None:
    plain, twin = converted(modules.GEGLU)
    x = torch.randn(3, 8)
    torch.testing.assert_close(twin(hidden=x), plain(x))
    for unit in (plain, twin):
        with pytest.raises(RuntimeError, match="deprecated"):
            unit(x, 1.0)
        with pytest.raises(RuntimeError, match="deprecated"):
            unit(x, scale=1.0)


@pytest.mark.parametrize(
    "make", [modules.Residual, modules.Attention, lambda: modules.Packed("interleaved")]
)
def test_what_is_more_or_less_than_a_gated_unit_is_left(make) -> None:
    """The last one calls its linear twice."""
    plain, twin = converted(make)
    assert swap_of(twin) is None
    x = torch.randn(3, 8)
    torch.testing.assert_close(twin(x), plain(x))


def test_submodules_are_called_in_their_order_with_their_hooks() -> None:
    plain, twin = converted(lambda: modules.Decorated(dropout=0.5))
    orders: list[list[str]] = []
    for unit in (plain, twin):
        order: list[str] = []
        orders.append(order)
        for name, child in unit.named_children():
            if name != "act":
                child.register_forward_hook(lambda *_, name=name, order=order: order.append(name))
        unit(torch.randn(3, 8))
    assert orders[0] == ["up", "gate", "drop1", "norm", "out", "drop2"]
    assert orders[1] == orders[0]


HOOKS = {
    "forward": lambda module, hook: module.register_forward_hook(hook),
    "forward pre": lambda module, hook: module.register_forward_pre_hook(hook),
    "backward": lambda module, hook: module.register_full_backward_hook(hook),
    "backward pre": lambda module, hook: module.register_full_backward_pre_hook(hook),
}


@pytest.mark.parametrize("register", HOOKS.values(), ids=HOOKS)
def test_an_activation_with_a_hook_is_called(register) -> None:
    plain, twin = converted(modules.Decorated)
    calls: list[nn.Module] = []
    handle = register(twin.act, lambda module, *_: calls.append(module))
    assert not uses_gated(twin)
    assert_equal_steps(twin, plain)
    assert twin.act in calls
    handle.remove()
    assert uses_gated(twin)


def test_an_activation_put_in_later_is_used() -> None:
    plain, twin = converted(modules.Decorated)
    for unit in (plain, twin):
        unit.act = nn.Tanh()
    assert_equal_steps(twin, plain)
    twin.act = nn.GELU()
    assert uses_gated(twin)


def test_an_activation_with_a_forward_of_its_own_is_called() -> None:
    """Put on the instance, before convert or after it."""
    for before in (True, False):
        unit = modules.Decorated()
        twin = copy.deepcopy(unit)
        for each in (unit, twin):
            if before:
                each.act.forward = torch.tanh
        memopt.convert(nn.Sequential(twin))
        for each in (unit, twin):
            each.act.forward = torch.tanh
        assert not uses_gated(twin)
        assert_equal_steps(twin, unit)


class Adapter(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.extra = nn.Linear(base.in_features, base.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.extra(x)


class Int8Linear(nn.Module):
    """Weights in 8 bits, computed in the dtype of the input."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = base.in_features, base.out_features
        scale = base.weight.detach().abs().max() / 127
        self.register_buffer("weight", (base.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale)


@pytest.mark.parametrize("put", [Adapter, Int8Linear])
@pytest.mark.parametrize("names", [("w1",), ("w2",), ("w1", "w2", "w3")])
@pytest.mark.parametrize("before", [False, True])
def test_linears_may_be_replaced_by_others(put, names: tuple[str, ...], before: bool) -> None:
    def replaced() -> nn.Module:
        torch.manual_seed(4)
        unit = modules.FeedForward()
        if before:
            replace(unit)
        return unit

    def replace(unit: nn.Module) -> None:
        torch.manual_seed(6)
        for name in names:
            setattr(unit, name, put(getattr(unit, name)))

    plain, twin = converted(replaced)
    if not before:
        replace(plain)
        replace(twin)
    assert uses_gated(twin)
    assert_equal_steps(twin, plain)


def test_a_cast_in_front_of_the_last_linear_is_kept() -> None:
    plain, twin = converted(modules.Decorated)
    for unit in (plain, twin):
        unit.out.double()
    assert_equal_steps(twin, plain)


def test_outputs_that_the_op_does_not_take_are_multiplied_by_pytorch() -> None:
    """As where one of two linears was left in float32."""
    plain, twin = converted(modules.FeedForward)
    for unit in (plain, twin):
        unit.w3.register_forward_pre_hook(lambda module, args: (args[0].double(),))
        unit.w3.double()
        unit.w2.double()
    assert not uses_gated(twin)
    assert_equal_steps(twin, plain)


def test_random_numbers_are_drawn_in_the_same_order() -> None:
    """Dropout's masks differ from PyTorch's, but not from those of memopt's own modules."""
    plain, twin = converted(lambda: modules.Decorated(dropout=0.5))
    plain.drop1, plain.drop2 = memopt.nn.Dropout(0.5), memopt.nn.Dropout(0.5)
    x = torch.randn(3, 8)
    torch.manual_seed(7)
    expected = plain(x)
    torch.manual_seed(7)
    torch.testing.assert_close(twin(x), expected)
