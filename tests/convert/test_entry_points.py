"""Proves: recipes are on in whatever calls a converted model or one of its modules, whichever
method does; a call inside opens nothing more; and classes, methods and attributes are what they
were. Where no recipes are on no swap saves more than PyTorch.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memopt
from memopt._extension import _C
from memopt.memory.saved import SavedTensors
from tests.convert.support import one_step, state

WIDTH = 64


def mlp() -> nn.Sequential:
    """Recipes spare the outputs of norm and activation; ReLU's input takes its output's place."""
    return nn.Sequential(
        nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)
    )


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.bound = self.inherited

    def inherited(self, x: Tensor) -> Tensor:
        output: Tensor = self.net(x)
        return output


class Model(Base):
    scale = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return self.inherited(x) * self.scale

    def loss(self, x: Tensor, *, weight: float = 1.0) -> Tensor:
        """Of x."""
        return self(x).square().sum() * weight

    def calls_super(self, x: Tensor) -> Tensor:
        return super().inherited(x)

    def closure(self, x: Tensor) -> Callable[[], Tensor]:
        return lambda: self.net(x)

    @torch.no_grad()
    def without_gradients(self, x: Tensor) -> Tensor:
        return self.inherited(x)

    @property
    def described(self) -> str:
        return f"{self.scale} times"

    @staticmethod
    def static(x: Tensor) -> Tensor:
        return x

    @classmethod
    def made(cls) -> Model:
        return cls()

    def generator(self, x: Tensor) -> Iterator[Tensor]:
        for module in self.net:
            x = module(x)
            yield x

    async def coroutine(self, x: Tensor) -> Tensor:
        return self.inherited(x)

    def extra_repr(self) -> str:
        return "a model"


def saved(call: Callable[[], Any]) -> int:
    with SavedTensors() as tensors:
        tensors.output = call()  # type: ignore[attr-defined]
    return int(tensors.bytes)


ENTRIES: dict[str, Callable[[Any, Tensor], Any]] = {
    "forward": lambda m, x: m(x),
    "forward itself": lambda m, x: m.forward(x),
    "a method": lambda m, x: m.loss(x, weight=3.0),
    "an inherited method": lambda m, x: m.inherited(x),
    "super's": lambda m, x: m.calls_super(x),
    "a method by its class": lambda m, x: type(m).inherited(m, x),
    "a submodule": lambda m, x: m.net(x),
    "a method bound before": lambda m, x: m.bound(x),
    "a closure that a method returned": lambda m, x: m.closure(x)(),
    "functools.partial": lambda m, x: functools.partial(m.loss, weight=0.5)(x),
    "a coroutine": lambda m, x: asyncio.run(m.coroutine(x)),
    "a partial of a submodule": lambda m, x: functools.partial(m.net)(x),
}


@pytest.mark.parametrize("functional", [False, True])
@pytest.mark.parametrize("enter", ENTRIES.values(), ids=ENTRIES)
def test_every_entry_has_recipes(enter: Callable[[Any, Tensor], Any], functional: bool) -> None:
    torch.manual_seed(0)
    plain = Model()
    model = copy.deepcopy(plain)
    memopt.convert(model, functional=functional)
    x = torch.randn(8, WIDTH, requires_grad=True)
    expected, ours = saved(lambda: enter(plain, x)), saved(lambda: enter(model, x))
    # The outputs of norm and activation.
    assert expected - ours >= 2 * x.numel() * 4 - 64
    for mine, theirs in zip(
        one_step(lambda: enter(model, x), x, *model.parameters()),
        one_step(lambda: enter(plain, x), x, *plain.parameters()),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    assert not _C.recipes_are_on()


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def training_step(self, x: Tensor) -> Tensor:
        return self.net(x).square().sum()


def test_a_trainer_s_module_without_a_forward() -> None:
    plain = Outer()
    model = copy.deepcopy(plain)
    memopt.convert(model)
    x = torch.randn(8, WIDTH, requires_grad=True)
    assert saved(lambda: model.training_step(x)) < saved(lambda: plain.training_step(x))
    assert saved(lambda: model.net(x)) < saved(lambda: plain.net(x))
    with pytest.raises(NotImplementedError):
        model(x)


def test_a_leaf_called_alone_saves_no_more_than_pytorch_s() -> None:
    """As `m.loss(x)` of a ReLU net did, twice as much."""
    for make in (nn.ReLU, nn.Sigmoid):
        plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), make(), nn.Linear(WIDTH, WIDTH))
        model = copy.deepcopy(plain)
        assert memopt.convert(model).swapped
        x = torch.randn(8, WIDTH, requires_grad=True)

        def leaves(net: nn.Sequential, x: Tensor = x) -> Tensor:
            output: Tensor = net[2](net[1](net[0](x)))
            return output

        assert saved(lambda: leaves(model)) == saved(lambda: leaves(plain))  # noqa: B023
        assert saved(lambda: model(x)) <= saved(lambda: plain(x))  # noqa: B023
        ours, theirs = (one_step(lambda: leaves(m), x) for m in (model, plain))  # noqa: B023
        for mine, other in zip(ours, theirs, strict=True):
            assert torch.equal(mine, other)  # PyTorch's own


def test_with_recipes_of_the_user_s() -> None:
    """A scope around a converted module's leaves has recipes for them."""
    model = nn.Sequential(nn.LayerNorm(WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    plain = copy.deepcopy(model)
    memopt.convert(model)
    x = torch.randn(8, WIDTH, requires_grad=True)

    def leaves() -> Tensor:
        with memopt.recipes():
            output: Tensor = model[2](model[1](model[0](x)))
            return output

    ours = saved(leaves)
    assert ours == saved(lambda: model(x))
    assert ours < saved(lambda: plain(x))


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(mlp(), mlp())
        self.scopes: list[object] = []

    def forward(self, x: Tensor) -> Tensor:
        top = torch._C._autograd._top_saved_tensors_default_hooks
        self.scopes.append(top(False)[0])
        y: Tensor = self.helper(x)
        return y

    def helper(self, x: Tensor) -> Tensor:
        self.scopes.append(torch._C._autograd._top_saved_tensors_default_hooks(False)[0])
        self.inner[1].register_forward_pre_hook(
            lambda *_: self.scopes.append(
                torch._C._autograd._top_saved_tensors_default_hooks(False)[0]
            )
        )
        y: Tensor = self.inner(x)
        return y


@pytest.mark.parametrize("functional", [False, True])
def test_a_call_inside_opens_nothing(functional: bool) -> None:
    model = Counting()
    memopt.convert(model, functional=functional)
    model(torch.randn(8, WIDTH))
    assert len(model.scopes) == 3
    assert model.scopes[0] is model.scopes[1] is model.scopes[2]


def test_leaves_called_one_by_one_have_recipes_where_the_user_says_so() -> None:
    """No call of a module is around them."""
    plain = Model()
    model = copy.deepcopy(plain)
    memopt.convert(model)
    x = torch.randn(8, WIDTH, requires_grad=True)

    def leaves(m: Model, x: Tensor = x) -> Tensor:
        y: Tensor = m.net[3](m.net[2](m.net[1](m.net[0](x))))
        return y

    def in_recipes() -> Tensor:
        with memopt.recipes():
            return leaves(model)

    assert saved(lambda: leaves(model)) == saved(lambda: leaves(plain))
    assert saved(in_recipes) == saved(lambda: model.net(x))


def test_classes_methods_and_attributes_stay_what_they_were() -> None:
    model, plain = Model(), Model()
    before = state(model)
    looks = {name: (m, type(m), set(vars(m))) for name, m in model.named_modules()}
    memopt.convert(model)
    for name, module in model.named_modules():
        same, cls, attributes = looks[name]
        if module._modules:  # the leaves are replaced
            assert module is same
            assert type(module) is cls
        assert isinstance(module, cls)
        assert set(vars(module)) == attributes
    for name in dir(Model):
        assert inspect.getattr_static(model, name) is inspect.getattr_static(plain, name), name
    for name in ("forward", "loss", "inherited"):
        method = getattr(model, name)
        assert method.__func__ is getattr(Model, name)
        assert method.__self__ is model
        assert method.__globals__ is globals()
    memopt.revert(model)
    assert state(model) == before


def test_one_class_for_modules_of_one_class() -> None:
    model = nn.ModuleList(Model() for _ in range(3))
    memopt.convert(model)
    assert len({type(m) for m in model}) == 1
    assert len({type(m.net) for m in model}) == 1


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_are_entered_as_well(copied: Callable[[Any], Any]) -> None:
    model, plain = Model(), Model()
    memopt.convert(model)
    twin = copied(model)
    x = torch.randn(8, WIDTH, requires_grad=True)
    assert saved(lambda: twin.loss(x)) == saved(lambda: model.loss(x))
    assert saved(lambda: twin.net(x)) == saved(lambda: model.net(x))
    memopt.revert(twin)
    assert saved(lambda: twin.loss(x)) == saved(lambda: plain.loss(x))
    assert all("memopt" not in str(type(m).__mro__) for m in twin.modules())


class Methods(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.twice(self.net(x))

    def twice(self, x: Tensor) -> Tensor:
        return x * 2


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_without_graph_breaks(backend: str) -> None:
    plain = nn.Sequential(Methods(), nn.Sequential(mlp(), nn.ReLU()))
    model = copy.deepcopy(plain)
    memopt.convert(model)
    x = torch.randn(4, WIDTH, requires_grad=True)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for ours, theirs in zip(
        one_step(lambda: compiled(x), x), one_step(lambda: plain(x), x), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


class Compiles(nn.Module):
    """A compiled function inside, as transformers' flex attention is."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return compiled_function(self.net(x))


@torch.compile(backend="aot_eager", fullgraph=True)
def compiled_function(x: Tensor) -> Tensor:
    def double(x: Tensor) -> Tensor:
        return F.gelu(x) * 2

    y: Tensor = torch.cond(torch.tensor(True), double, double, (x,))
    return F.relu(y)


def test_compiled_functions_inside() -> None:
    plain = Compiles()
    model = copy.deepcopy(plain)
    memopt.convert(model)
    x = torch.randn(4, WIDTH, requires_grad=True)
    torch._dynamo.reset()
    ours, theirs = (one_step(lambda: m(x), x) for m in (model, plain))  # noqa: B023
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other)


def test_an_exception_ends_the_scope() -> None:
    class Raises(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def run(self, x: Tensor) -> Tensor:
            self.net(x)
            raise KeyError("mine")

    model = Raises()
    memopt.convert(model)
    with pytest.raises(KeyError, match="mine"):
        model.run(torch.randn(2, WIDTH))
    assert not _C.recipes_are_on()
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def test_hooks_of_pytorch_s_do_not_collide_in_another_process() -> None:
    """They are numbered, from 0 in each process."""
    model = Model()
    memopt.convert(model)
    keys = [key for m in model.modules() for key in (*m._forward_pre_hooks, *m._forward_hooks)]
    assert keys
    assert all(isinstance(key, str) for key in keys)


def test_a_transform_in_forward_names_the_way_out() -> None:
    class Scored(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: Tensor) -> Tensor:
            return torch.func.grad(lambda x: self.net(x).sum())(x)  # type: ignore[no-any-return]

        def score(self, x: Tensor) -> Tensor:
            return self.forward(x)

    model = Scored()
    x = torch.randn(2, WIDTH)
    expected = model(x)
    memopt.convert(model)
    torch.testing.assert_close(model.score(x), expected)  # no call of a module is around it
    with pytest.raises(
        RuntimeError, match=r"^convert: .*recipes=False.*saved tensor hooks"
    ) as raised:
        model(x)
    assert "recipes=False" in raised.value.__notes__[0]
    memopt.revert(model)
    memopt.convert(model, recipes=False)
    torch.testing.assert_close(model(x), expected)
