"""Proves: copies and pickles of a wrapped module are wrapped, work and share nothing with it; so do
those of classes that are made, copied or pickled in ways of their own.
"""

from __future__ import annotations

import abc
import copy
import gc
import io
import pickle
from typing import Any, Generic, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from memopt._checkpoint import checkpoint_wrapper, unwrap
from tests.checkpoint.support import CountCalls, Net, runs_twice, step_results
from tests.support.bits import assert_same_bits


def by_pickle(module: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(module))


def by_old_pickle(module: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(module, protocol=0))


def by_torch_save(module: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES = [copy.deepcopy, by_pickle, by_old_pickle, by_torch_save]


@pytest.mark.parametrize("make_copy", COPIES)
@pytest.mark.parametrize("inside", [False, True])
def test_copies_are_wrapped_and_independent(make_copy, inside: bool) -> None:
    module = checkpoint_wrapper(Net(), offload_to_cpu=True, maintain_forward_counter=True)
    twin = make_copy(nn.Sequential(module))[0] if inside else make_copy(module)
    assert type(twin) is type(module)
    assert isinstance(twin, Net)
    x = torch.randn(2, 4)
    assert torch.equal(twin(x), module(x))
    assert runs_twice(twin, twin.count)
    assert module.linear.weight.grad is None
    with torch.no_grad():
        module.linear.weight.zero_()
    assert twin.linear.weight.abs().sum() > 0
    expected = twin(x)
    del module
    assert torch.equal(twin(x), expected)
    assert type(unwrap(twin)) is Net


def test_shallow_copy_runs_on_its_own_attributes() -> None:
    module = checkpoint_wrapper(Net())
    twin = copy.copy(module)
    twin._modules = {**module._modules, "linear": nn.Linear(4, 4)}
    x = torch.randn(2, 4)
    assert torch.equal(twin(x), (twin.linear(x) * twin.scale).tanh())
    assert not torch.equal(twin(x), module(x))
    assert runs_twice(twin, twin.count)


class OwnState(Net):
    """Decides itself what is pickled."""

    def __getstate__(self) -> dict[str, Any]:
        return {"weights": super().state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()
        self.load_state_dict(state["weights"])


class OwnReduce(Net):
    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.linear.in_features,)


class OwnDeepcopy(Net):
    def __deepcopy__(self, memo: dict[int, Any]) -> OwnDeepcopy:
        twin = type(self)()
        twin.load_state_dict(self.state_dict())
        return twin


@pytest.mark.parametrize("cls", [OwnState, OwnReduce])
@pytest.mark.parametrize("make_copy", COPIES)
def test_classes_with_their_own_pickling(cls: type[Net], make_copy) -> None:
    module = checkpoint_wrapper(cls())
    twin = make_copy(module)
    assert isinstance(twin, cls)
    assert runs_twice(twin, twin.count)
    assert type(make_copy(unwrap(module))) is cls


def test_class_with_its_own_deepcopy() -> None:
    """It makes a new module, which nobody has wrapped, by calling its class."""
    module = checkpoint_wrapper(OwnDeepcopy())
    twin = copy.deepcopy(module)
    x = torch.randn(2, 4)
    assert torch.equal(twin(x), module(x))
    assert not runs_twice(twin, twin.count)
    assert runs_twice(checkpoint_wrapper(twin), twin.count)
    assert type(by_pickle(unwrap(twin))) is OwnDeepcopy


def test_copy_of_an_instance_that_nobody_wrapped_pickles() -> None:
    twin = type(checkpoint_wrapper(Net()))()
    again = by_pickle(twin)
    assert type(again) is Net
    assert_same_bits(again.parameters(), twin.parameters())


T = TypeVar("T")
registered: list[type] = []


class Registering(nn.Module):
    def __init_subclass__(cls, *, name: str, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        registered.append(cls)


class Registered(Registering, name="registered"):
    def forward(self, x: Tensor) -> Tensor:
        return x.exp()


class Abstract(nn.Module, abc.ABC):
    @abc.abstractmethod
    def forward(self, x: Tensor) -> Tensor: ...


class Concrete(Abstract, Generic[T]):
    def forward(self, x: Tensor) -> Tensor:
        return x.exp()


class Slotted(nn.Module):
    __slots__ = ("extra",)

    def forward(self, x: Tensor) -> Tensor:
        return x.exp()


@pytest.mark.parametrize("cls", [Registered, Concrete, Slotted])
def test_classes_that_are_made_in_special_ways(cls: type[nn.Module]) -> None:
    module = nn.Sequential(CountCalls(), checkpoint_wrapper(cls()))
    x = torch.randn(3, requires_grad=True)
    module(x).sum().backward()
    assert torch.equal(x.grad, x.detach().exp())
    assert type(by_pickle(module)[1]).__name__ == cls.__name__
    assert registered == [Registered]


def test_parametrized_modules_before_and_after() -> None:
    x = torch.randn(3, 4)
    before = checkpoint_wrapper(parametrizations.weight_norm(nn.Linear(4, 4)))
    after = parametrizations.weight_norm(checkpoint_wrapper(nn.Linear(4, 4)))
    for module in (before, after):
        assert_same_bits(
            step_results(lambda m=module: m(x), module.parameters()),
            step_results(
                lambda m=module: nn.functional.linear(x, m.weight, m.bias), module.parameters()
            ),
        )
    for module in (before, after):
        parametrize.remove_parametrizations(unwrap(module), "weight")
        assert type(module) is nn.Linear


def test_class_put_on_top_later_stays() -> None:
    """As FSDP2's fully_shard does."""
    module = checkpoint_wrapper(Net())
    module.__class__ = type("Sharded", (type(module),), {"is_sharded": True})
    assert runs_twice(module, module.count)
    checkpoint_wrapper(module, offload_to_cpu=True)
    assert module.is_sharded
    assert runs_twice(module, module.count)
    assert not runs_twice(unwrap(module), module.count)


def test_a_copy_has_the_region_where_the_module_has_it() -> None:
    """Not where its class has got a forward meanwhile that does not call the one before: what is
    tried on a copy, as `memopt.check` does, is true of the module.
    """

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).tanh()

    def forwards(module: nn.Module) -> int:
        seen: list[int] = []
        hook = module.linear.register_forward_hook(lambda *_: seen.append(1))
        module(torch.ones(2, 4)).sum().backward()
        hook.remove()
        return len(seen)

    module = checkpoint_wrapper(Block())
    before = Block.forward
    for other, runs in (
        (lambda self, x: before(self, x), 2),
        (lambda self, x: self.linear(x).tanh(), 1),
    ):
        Block.forward = other
        assert [forwards(module), forwards(copy.deepcopy(module)), forwards(module)] == [runs] * 3
    Block.forward = before
    assert forwards(module) == 2


def test_code_that_is_put_into_a_function_meanwhile() -> None:
    """As IPython's autoreload does: a copy asks for its region by the new code, and the module with
    it, until both are gone.
    """

    class Block(nn.Module):
        runs = 0

        def forward(self, x: Tensor) -> Tensor:
            return x.exp()

    def edited(self: Any, x: Tensor) -> Tensor:
        type(self).runs += 1
        return x.sin().exp()

    def forwards(module: nn.Module) -> int:
        Block.runs = 0
        module(torch.ones(3, requires_grad=True)).sum().backward()
        return Block.runs

    module = checkpoint_wrapper(Block())
    Block.forward.__code__ = edited.__code__
    twin = copy.deepcopy(module)
    assert [forwards(twin), forwards(module)] == [2, 2]
    del twin
    assert forwards(module) == 2
    del module
    gc.collect()
    assert Block.forward.__code__ is edited.__code__


def test_a_pickle_whose_class_has_gone_says_which_one() -> None:
    """As a pickle of the plain module does."""
    messages = []
    for module in (Net(), checkpoint_wrapper(Net())):
        pickled = pickle.dumps(module).replace(b"Net", b"Gon")
        with pytest.raises(AttributeError, match="'Gon'") as error:
            pickle.loads(pickled)
        messages.append(str(error.value))
    assert messages[1] == messages[0]


def test_a_class_that_cannot_be_imported_is_refused_by_pickle_under_its_own_name() -> None:
    class Local(nn.Identity):
        pass

    for module in (Local(), checkpoint_wrapper(Local())):
        with pytest.raises((AttributeError, pickle.PicklingError), match=r"Local"):
            pickle.dumps(module)
