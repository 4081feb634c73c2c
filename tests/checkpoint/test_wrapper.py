"""Proves: a wrapped module is in every other respect the module it was: same object, same keys,
names, repr, signature and hooks; copies and pickles of it are wrapped, work and share nothing;
wrapping twice is wrapping once with the newest settings; unwrap gives the unwrapped module back.
"""

from __future__ import annotations

import abc
import copy
import functools
import inspect
import io
import pickle
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from memopt.checkpoint import checkpoint_wrapper, is_checkpointing, is_recomputing, unwrap
from tests.checkpoint.support import CountCalls, assert_same_bits, mlp, step_results


class Net(nn.Module):
    """Importable, so that it can be pickled."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.count = CountCalls()
        self.linear = nn.Linear(size, size)
        self.register_buffer("scale", torch.full((size,), 2.0))

    def forward(self, x: Tensor, *, shift: float = 0.0) -> Tensor:
        """Scale what linear gives."""
        return (self.linear(self.count(x)) * self.scale + shift).tanh()


def runs_twice(module: nn.Module, count: CountCalls) -> bool:
    """Whether one step calls `count` in forward and again in backward."""
    before = count.calls
    module(torch.randn(2, 4)).sum().backward()
    return count.calls == before + 2


def appearance(module: nn.Module) -> list[Any]:
    """What other code can see of a module that is not its behaviour."""
    return [
        list(module.state_dict()),
        [name for name, _ in module.named_parameters()],
        [name for name, _ in module.named_buffers()],
        [name for name, _ in module.named_modules()],
        repr(module),
        type(module).__name__,
        type(module).__qualname__,
        type(module).__module__,
        type(module).__doc__,
        inspect.signature(module.forward),
        module.forward.__doc__,
    ]


@pytest.mark.parametrize("make", [Net, mlp, lambda: nn.Linear(4, 4)])
def test_looks_as_before(make) -> None:
    module = make()
    before, state = appearance(module), list(module.state_dict().values())
    wrapped = checkpoint_wrapper(module)
    assert wrapped is module
    assert appearance(module) == before
    assert all(
        a is b or a.data_ptr() == b.data_ptr()
        for a, b in zip(module.state_dict().values(), state, strict=True)
    )
    assert appearance(nn.Sequential(module)) == appearance(nn.Sequential(make()))


def test_is_an_instance_of_its_class() -> None:
    module = checkpoint_wrapper(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    assert isinstance(module, nn.Sequential)
    assert isinstance(module[0], nn.Linear)
    assert len(module) == 2
    assert isinstance(module[:1], nn.Sequential)
    assert not isinstance(nn.Sequential(), type(module))


def test_modules_of_one_class_share_the_wrapped_class() -> None:
    a, b = checkpoint_wrapper(nn.Linear(2, 2)), checkpoint_wrapper(nn.Linear(3, 3))
    assert type(a) is type(b) is not nn.Linear
    assert type(nn.Linear(2, 2)) is nn.Linear


def test_keyword_arguments_and_attributes() -> None:
    module = checkpoint_wrapper(Net())
    x = torch.randn(2, 4)
    assert torch.equal(module(x, shift=1.0), (module.linear(x) * module.scale + 1.0).tanh())
    module.scale = torch.zeros(4)
    assert torch.equal(module(x), torch.zeros(2, 4))
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        module.absent  # noqa: B018


def test_state_dict_goes_between_wrapped_and_unwrapped() -> None:
    wrapped, plain = checkpoint_wrapper(Net()), Net()
    plain.load_state_dict(wrapped.state_dict())
    x = torch.randn(2, 4)
    assert torch.equal(plain(x), wrapped(x))
    wrapped.load_state_dict(Net().state_dict())


def test_hooks_run_once_and_outside_of_the_region() -> None:
    log: list[tuple[str, bool, bool]] = []

    def hook(name: str) -> Callable[..., None]:
        return lambda *_: log.append((name, is_checkpointing(), is_recomputing()))

    module = Net()
    module.register_forward_pre_hook(hook("pre"))
    checkpoint_wrapper(module)
    module.register_forward_hook(hook("post"))
    module.register_full_backward_pre_hook(hook("backward pre"))
    module.register_full_backward_hook(hook("backward"))
    x = torch.randn(2, 4, requires_grad=True)
    module(x).sum().backward()
    assert log == [(name, False, False) for name in ("pre", "post", "backward pre", "backward")]


def test_hooks_may_change_input_and_output() -> None:
    module = checkpoint_wrapper(nn.Tanh())
    module.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    module.register_forward_hook(lambda module, args, output: output * 3)
    x = torch.randn(4, requires_grad=True)
    module(x).sum().backward()
    (expected,) = torch.autograd.grad(((x * 2).tanh() * 3).sum(), x)
    assert torch.equal(x.grad, expected)


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
    unwrap(before)
    with pytest.raises(RuntimeError, match=r"^unwrap: module must have the class that"):
        unwrap(after)


def test_class_put_on_top_later_stays() -> None:
    """As FSDP2's fully_shard does."""
    module = checkpoint_wrapper(Net())
    module.__class__ = type("Sharded", (type(module),), {"is_sharded": True})
    assert runs_twice(module, module.count)
    checkpoint_wrapper(module, offload_to_cpu=True)
    assert module.is_sharded
    assert runs_twice(module, module.count)


def replaced_forward(self: Net, x: Tensor) -> Tensor:
    return self.count(x).exp() * self.scale


class Prepared(Net):
    """Had its forward replaced on the instance, in a way that pickles."""

    def replace_forward(self) -> Prepared:
        self.forward = functools.partial(replaced_forward, self)
        return self


def test_instance_level_forward_is_kept() -> None:
    module = Prepared().replace_forward()
    forward = module.forward
    checkpoint_wrapper(module)
    x = torch.randn(2, 4)
    assert torch.equal(module(x), x.exp() * 2)
    assert runs_twice(nn.Sequential(nn.Linear(4, 4), module), module.count)
    checkpoint_wrapper(module)
    assert torch.equal(module(x), x.exp() * 2)
    unwrap(module)
    assert module.forward is forward
    assert not runs_twice(nn.Sequential(nn.Linear(4, 4), module), module.count)


def test_instance_level_forward_of_a_copy_is_the_copy_s() -> None:
    module = checkpoint_wrapper(Prepared().replace_forward())
    for twin in (copy.deepcopy(module), by_pickle(module)):
        twin.scale.fill_(5)
        x = torch.randn(2, 4)
        assert torch.equal(twin(x), x.exp() * 5)
        assert torch.equal(module(x), x.exp() * 2)


@pytest.mark.parametrize("wrap_again", [False, True])
def test_forward_set_on_the_wrapped_instance(wrap_again: bool) -> None:
    """As accelerate does: the new forward calls the one it found, which is the region."""
    module = checkpoint_wrapper(Net())
    found = module.forward
    around = []

    @functools.wraps(found)
    def forward(*args: Any, **kwargs: Any) -> Any:
        around.append(is_checkpointing())
        return found(*args, **kwargs)

    module.forward = forward
    if wrap_again:
        checkpoint_wrapper(module)
    assert runs_twice(module, module.count)
    assert around == [False]
    unwrap(module)
    assert module.forward is forward


def test_unwrap_keeps_a_forward_that_was_set_since() -> None:
    module = checkpoint_wrapper(Prepared().replace_forward())
    newest = functools.partial(replaced_forward, module)
    module.forward = newest
    assert unwrap(module).forward is newest


def test_wrapping_twice_is_wrapping_once_with_the_newest_settings() -> None:
    module = Net()
    checkpoint_wrapper(module, maintain_forward_counter=True)
    cls = type(module)
    checkpoint_wrapper(module)
    assert type(module) is cls
    assert runs_twice(module, module.count)
    assert not any(hasattr(m, "_checkpoint_fwd_counter") for m in module.modules())
    unwrap(module)
    assert type(module) is Net


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("counter", [False, True])
@pytest.mark.parametrize("make", [Net, lambda: Prepared().replace_forward()])
def test_unwrap_restores_exactly(make, offload: bool, counter: bool) -> None:
    module = make()
    before = [(type(m), dict(m.__dict__)) for m in module.modules()]
    checkpoint_wrapper(module, offload, counter)
    module(torch.randn(2, 4, requires_grad=True)).sum().backward()
    module.zero_grad()
    module.count.calls = 0
    assert unwrap(module) is module
    assert [(type(m), m.__dict__) for m in module.modules()] == before


def test_unwrap_leaves_other_modules_alone_and_applies_to_trees() -> None:
    model = nn.Sequential(checkpoint_wrapper(Net()), Net(), checkpoint_wrapper(nn.Tanh()))
    assert unwrap(model) is model
    assert type(model[0]) is not Net
    model.apply(unwrap)
    assert [type(m) for m in model] == [Net, Net, nn.Tanh]


def counters(module: nn.Module) -> set[int]:
    return {m._checkpoint_fwd_counter for m in module.modules()}


def test_forward_counter() -> None:
    module = checkpoint_wrapper(Net(), False, True)
    assert counters(module) == {0}
    outputs = [module(torch.randn(2, 4)) for _ in range(3)]
    assert counters(module) == {3}
    for left, output in zip((2, 1, 0), outputs, strict=True):
        output.sum().backward()
        assert counters(module) == {left}


def test_forward_counter_is_seen_by_submodules() -> None:
    """FSDP used it to tell the last forward of a module: 1 in forward, 0 in the recompute."""
    seen = []

    class Reads(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(self._checkpoint_fwd_counter)
            return x

    module = checkpoint_wrapper(nn.Sequential(Reads(), nn.Linear(4, 4), nn.Tanh()), False, True)
    module(torch.randn(2, 4)).sum().backward()
    assert seen == [1, 0]


def test_forward_counter_of_nested_wrappers() -> None:
    inner = checkpoint_wrapper(Net(), False, True)
    outer = checkpoint_wrapper(nn.Sequential(inner, nn.Tanh()), False, True)
    y = outer(torch.randn(2, 4))
    assert outer._checkpoint_fwd_counter == 1
    assert counters(inner) == {2}
    y.sum().backward()
    assert counters(outer) == {0}


def test_forward_counter_when_forward_raises() -> None:
    module = checkpoint_wrapper(Net(), False, True)
    with pytest.raises(RuntimeError):
        module(torch.randn(2, 5))
    assert counters(module) == {0}


def test_forward_counter_without_gradients() -> None:
    module = checkpoint_wrapper(Net(), False, True)
    with torch.no_grad():
        module(torch.randn(2, 4))
    assert counters(module) == {0}


def test_class_that_allows_no_subclass() -> None:
    class Final(type):
        def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any]):
            if any(isinstance(base, Final) for base in bases):
                raise TypeError(f"{name} is final")
            return super().__new__(mcs, name, bases, namespace)

    class Module(nn.Module, metaclass=Final):
        pass

    with pytest.raises(TypeError, match=r"must have a class that can be subclassed, got Module$"):
        checkpoint_wrapper(Module())


def test_parameters_moved_and_cast_after_wrapping(device: torch.device) -> None:
    module = checkpoint_wrapper(Net()).to(device).double()
    x = torch.randn(2, 4, device=device, dtype=torch.float64)
    module(x).sum().backward()
    assert module.linear.weight.grad.dtype == torch.float64
