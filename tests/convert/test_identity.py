"""Proves: code that asks for the classes, methods, attributes and globals of a converted model's
modules gets the answers that it got before, and what it does to the model by them has the same
effect. Of a replaced module isinstance, the class's names and the keys of its state hold.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn.utils import parametrizations, parametrize

import memopt
from memopt._checkpoint.wrapper import settings_of
from memopt._convert.recipes import has_recipes
from memopt._convert.swap import swap_of
from tests.support.looks import looks

WIDTH = 8


def tokens_of(x: Tensor, size: int) -> int:
    """A function that fx cannot trace through, as timm has them."""
    return len(range(int(x.shape[1]))) // size


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.act = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(self.act(self.up(self.norm(x)))) / tokens_of(x, 1)
        return y

    def twice(self, x: Tensor) -> Tensor:
        y: Tensor = self(self(x))
        return y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(x)
        return y


def model() -> Model:
    torch.manual_seed(0)
    return Model()


def input() -> Tensor:
    return torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("recipes", [True, False])
@pytest.mark.parametrize("checkpoint", [None, Block])
def test_what_is_not_replaced_is_what_it_was(recipes: bool, checkpoint: type | None) -> None:
    m = model()
    before = {path: (module, looks(module)) for path, module in m.named_modules()}
    memopt.convert(m, recipes=recipes, checkpoint=checkpoint)
    replaced = 0
    for path, module in m.named_modules():
        original, then = before[path]
        if swap_of(module) is None:
            assert module is original
            assert looks(module) == then, path
        else:
            replaced += 1
        assert (settings_of(module) is not None) is (checkpoint is type(module))
    assert replaced == 4
    memopt.revert(m)
    for path, module in m.named_modules():
        assert module is before[path][0]
        assert looks(module) == before[path][1], path


def test_what_is_replaced_has_the_names_and_keys_that_it_had() -> None:
    plain, m = model(), model()
    memopt.convert(m, checkpoint=Block)
    for module, original in zip(m.modules(), plain.modules(), strict=True):
        cls, was = type(module), type(original)
        assert isinstance(module, was)
        assert issubclass(cls, was)
        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            assert getattr(cls, name) == getattr(was, name)
        assert list(module.state_dict()) == list(original.state_dict())
        assert repr(module) == repr(original)
        assert [n for n, _ in module.named_parameters()] == [
            n for n, _ in original.named_parameters()
        ]


def test_a_table_of_classes() -> None:
    """User code that asks `type(m) is` and `m.__class__ in`; subclasses are listed as before."""
    m = model()
    known = {Model: "model", Block: "block", nn.ModuleList: "list", nn.Linear: "linear"}
    before = [known.get(type(module)) for module in m.modules()]
    subclasses = (Block.__subclasses__(), Model.__subclasses__())
    memopt.convert(m)
    leaves = [known.get(type(module)) for module in m.modules()]
    assert leaves == before
    assert m.__class__ in known.copy()
    assert (Block.__subclasses__(), Model.__subclasses__()) == subclasses


def test_classes_that_keep_a_list_of_their_subclasses_hear_of_none() -> None:
    heard: list[str] = []

    class Listed(nn.Module):
        def __init_subclass__(cls, **kwargs: Any) -> None:
            super().__init_subclass__(**kwargs)
            heard.append(cls.__name__)

    class Norm(Listed, nn.LayerNorm):
        pass

    class Whole(Listed):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = Norm(WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.linear(self.norm(x))
            return y

    m = nn.Sequential(Whole())
    heard.clear()
    assert memopt.convert(m, checkpoint=Whole).swapped
    m(input())
    assert heard == []


def test_fx_wraps_the_functions_that_the_forward_names() -> None:
    """Tracer patches the globals of `type(root).forward`, which a wrapper made elsewhere hides."""

    class Tracer(fx.Tracer):
        def is_leaf_module(self, m: nn.Module, path: str) -> bool:
            return not isinstance(m, (Model, Block, nn.ModuleList))

    def traced(m: nn.Module) -> fx.GraphModule:
        return fx.GraphModule(m, Tracer(autowrap_functions=(tokens_of,)).trace(m))

    m = model()
    expected = traced(m)
    memopt.convert(m)
    graph = traced(m)
    assert graph.code == expected.code
    assert "tokens_of" in graph.code
    assert torch.equal(graph(input()), m(input()))


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


@pytest.mark.parametrize("on", ["root", "block", "linear"])
def test_what_was_parametrized_before_may_be_unparametrized(on: str) -> None:
    def parametrized() -> tuple[Model, nn.Module, str]:
        m = model()
        owner: nn.Module = {"root": m, "block": m.blocks[0], "linear": m.head}[on]
        name = "weight" if on == "linear" else "scale"
        if name == "scale":
            owner.register_parameter(name, nn.Parameter(torch.ones(WIDTH)))
        parametrize.register_parametrization(owner, name, Twice())
        return m, owner, name

    plain, theirs, name = parametrized()
    m, owner, _ = parametrized()
    cls = type(owner)
    memopt.convert(m)
    assert type(owner) is cls
    torch.testing.assert_close(m(input()), plain(input()))
    for module in (theirs, owner):
        parametrize.remove_parametrizations(module, name)
    assert type(owner) is type(theirs)
    torch.testing.assert_close(m(input()), plain(input()))
    assert list(m.state_dict()) == list(plain.state_dict())


def test_a_norm_that_was_parametrized_before() -> None:
    """It stays as it is, and a second convert replaces it when it is a norm again."""
    m = model()
    norm = m.blocks[0].norm
    parametrize.register_parametrization(norm, "weight", Twice())
    memopt.convert(m)
    assert m.blocks[0].norm is norm
    parametrize.remove_parametrizations(norm, "weight")
    assert type(norm) is nn.LayerNorm
    assert [s.path for s in memopt.convert(m).swapped] == ["blocks.0.norm"]


@pytest.mark.parametrize("on", ["root", "norm", "region", "linear"])
def test_parametrized_after_convert(on: str) -> None:
    plain, m = model(), model()
    memopt.convert(m, checkpoint=Block if on == "region" else None)
    for each in (plain, m):
        block: Any = each.blocks[0]
        owner = {"root": each, "norm": block.norm, "region": block, "linear": each.head}[on]
        if on in ("root", "region"):
            owner.register_parameter("weight", nn.Parameter(torch.ones(WIDTH)))
        cls = type(owner)
        parametrize.register_parametrization(owner, "weight", Twice())
        each(input())
    torch.testing.assert_close(m(input()), plain(input()))
    parametrize.remove_parametrizations(owner, "weight")
    assert type(owner) is cls
    memopt.revert(m)
    assert type(m.blocks[0].norm) is nn.LayerNorm


def test_weight_norm_of_a_converted_model() -> None:
    plain, m = model(), model()
    memopt.convert(m)
    for each in (plain, m):
        parametrizations.weight_norm(each.head)
    torch.testing.assert_close(m(input()), plain(input()))


def tripled(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x: 3 * forward(x)


@pytest.mark.parametrize("on", ["root", "block", "norm", "region"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_forward_of_the_instance_outlives_a_wrapper_that_comes_and_goes(
    on: str, when: str
) -> None:
    """As accelerate, timers and profilers wrap `m.forward` and put back what they found."""
    m, plain = model(), model()

    def owner(of: Model) -> Any:
        block: Any = of.blocks[0]
        return {"root": of, "block": block, "region": block, "norm": block.norm}[on]

    def set_own(of: Model) -> Callable[..., Tensor]:
        owner(of).forward = own = tripled(owner(of).forward)
        return own

    own = None
    set_own(plain)
    if when == "before":
        own = set_own(m)
    memopt.convert(m, checkpoint=Block if on == "region" else None)
    if when == "after":
        own = set_own(m)
    expected = m(input())
    torch.testing.assert_close(expected, plain(input()))
    for _ in range(2):
        found = owner(m).forward
        owner(m).forward = lambda x, found=found: found(x) + 1
        assert not torch.equal(m(input()), expected)
        owner(m).forward = found
        assert torch.equal(m(input()), expected)
    if on != "region" or when == "after":
        assert owner(m).forward is own
    memopt.revert(m)
    torch.testing.assert_close(m(input()), plain(input()))


@pytest.mark.parametrize(
    "make_copy", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))]
)
def test_copies_have_the_hooks_and_classes(make_copy: Callable[[Any], Any]) -> None:
    m = model()
    memopt.convert(m, checkpoint=Block)
    twin = make_copy(m)
    assert [type(each) for each in twin.modules()] == [type(each) for each in m.modules()]
    assert [has_recipes(each) for each in twin.modules()] == [has_recipes(e) for e in m.modules()]
    assert torch.equal(twin(input()), m(input()))
    assert memopt.saved_bytes(twin, input()) == memopt.saved_bytes(m, input())
    if make_copy is not copy.copy:  # which shares the dictionaries
        memopt.revert(twin)
        assert all(map(has_recipes, (m, *m.blocks)))
        assert not any(map(has_recipes, twin.modules()))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_scripting_says_what_to_do_where_nothing_was_swapped() -> None:
    """It compiles hooks, and fails at the first of them."""
    m = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    memopt.convert(m)
    with pytest.raises(Exception, match=r"memopt.revert\(model\) before scripting"):
        torch.jit.script(m)
    torch.jit.script(memopt.revert(m))


@pytest.mark.parametrize("on", ["root", "block", "linear"])
def test_a_class_that_others_derive_after_convert(on: str) -> None:
    """As FSDP2 does; and they may put the class back that they found."""
    m = model()
    memopt.convert(m)
    owner: nn.Module = {"root": m, "block": m.blocks[0], "linear": m.head}[on]
    cls = type(owner)
    expected = m(input())
    owner.__class__ = type(f"FSDP{cls.__name__}", (cls,), {})
    assert torch.equal(m(input()), expected)
    memopt.revert(m)
    assert type(owner).__bases__ == (cls,)
    owner.__class__ = cls
    assert [type(each) for each in m.modules()] == [type(each) for each in model().modules()]
