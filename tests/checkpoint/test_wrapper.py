"""Proves: a wrapped module is in every other respect the module it was: same object, same keys,
names, repr, signature and hooks; wrapping twice is wrapping once with the newest
settings; unwrap gives the unwrapped module back.
"""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memopt._checkpoint import checkpoint_wrapper, is_checkpointing, is_recomputing, unwrap
from tests.checkpoint.support import (
    CountCalls,
    Net,
    mlp,
    runs_twice,
)


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
    assert type(module) is nn.Sequential


class Alone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = CountCalls()

    def forward(self, x: Any, /, scale: float = 2.0, *rest: int, shift: Any, **named: Any) -> Any:
        __class__  # noqa: B018  closes over a cell
        frame: Any = sys._getframe()
        while frame is not None:  # a debugger reads them all
            assert frame.f_locals is not None
            frame = frame.f_back
        return (self.count(x) * scale + shift).tanh(), rest, named


def test_class_method_and_attributes_are_the_very_ones() -> None:
    """Libraries compare them: `type(module) is`, `module.forward.__func__ is`."""
    module = Alone()
    before = vars(Alone).copy()
    forward, names = Alone.forward, set(vars(module))
    seen = [forward.__globals__, forward.__closure__, forward.__defaults__, forward.__kwdefaults__]
    source, parameters = inspect.getsource(forward), forward.__code__.co_varnames[:6]
    checkpoint_wrapper(module)
    assert type(module) is Alone
    assert vars(Alone) == before
    assert module.forward.__func__ is forward is type(module).forward
    now = [forward.__globals__, forward.__closure__, forward.__defaults__, forward.__kwdefaults__]
    assert all(a is b for a, b in zip(seen, now, strict=True))
    assert inspect.getsource(forward) == source
    assert forward.__code__.co_varnames[:6] == parameters
    assert "forward" not in vars(module)
    x = torch.randn(3, requires_grad=True)
    for call in (module, module.forward):
        y, rest, named = call(x, 3.0, 4, 5, shift=1.0, other=6)
        assert torch.equal(y, (x * 3 + 1).tanh())
        assert (rest, named) == ((4, 5), {"other": 6})
        calls = module.count.calls
        call(x, shift=0)[0].sum().backward()
        assert module.count.calls == calls + 2
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'shift'"):
        module(x)
    unwrap(module)
    assert set(vars(module)) == names


def test_other_modules_of_the_class_run_plainly_and_the_function_gets_its_code_back() -> None:
    code = Net.forward.__code__
    wrapped, plain = checkpoint_wrapper(Net()), Net()
    assert Net.forward.__code__ is not code
    assert runs_twice(wrapped, wrapped.count)
    assert not runs_twice(plain, plain.count)
    twin = copy.copy(wrapped)
    unwrap(wrapped)
    assert not runs_twice(wrapped, wrapped.count)
    assert runs_twice(twin, twin.count)
    del twin
    assert Net.forward.__code__ is code
    assert not vars(Net.forward)


def test_a_method_that_calls_the_class_above_is_one_region() -> None:
    class Above(Net):
        def forward(self, x: Tensor, *, shift: float = 0.0) -> Tensor:
            assert (is_checkpointing() or is_recomputing()) is wrapped
            return super().forward(x, shift=shift)

    wrapped = True
    both = [checkpoint_wrapper(Net()), checkpoint_wrapper(Above())]
    for module in both:
        assert runs_twice(module, module.count)
    unwrap(both[1])
    wrapped = False
    assert not runs_twice(both[1], both[1].count)
    assert runs_twice(both[0], both[0].count)


def test_a_function_put_around_the_class_s_forward_later() -> None:
    """As libraries patch models; it calls the function that it found, which is still a region."""

    class Patched(Net):
        def forward(self, x: Tensor, *, shift: float = 0.0) -> Tensor:
            return super().forward(x, shift=shift)

    found = Patched.forward
    module = checkpoint_wrapper(Patched())
    Patched.forward = lambda self, *args, **kwargs: found(self, *args, **kwargs)
    assert runs_twice(module, module.count)
    assert not runs_twice(unwrap(module), module.count)


def test_a_forward_that_is_no_python_function() -> None:
    class Exp(nn.Module):
        forward = functools.partialmethod(lambda self, x, by: (self.count(x) * by).exp(), by=2)

        def __init__(self) -> None:
            super().__init__()
            self.count = CountCalls()

    module = checkpoint_wrapper(Exp())
    x = torch.randn(3)
    assert torch.equal(module(x), (x * 2).exp())
    assert runs_twice(nn.Sequential(nn.Linear(4, 4), module), module.count)
    twin = copy.deepcopy(module)
    assert runs_twice(nn.Sequential(nn.Linear(4, 4), twin), twin.count)
    assert "forward" not in vars(unwrap(module))


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
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
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
    checkpoint_wrapper(module)
    assert runs_twice(module, module.count)
    assert not any(hasattr(m, "_checkpoint_fwd_counter") for m in module.modules())
    unwrap(module)
    assert not runs_twice(module, module.count)


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


def test_unwrap_undoes_the_module_and_all_submodules() -> None:
    model = nn.Sequential(
        checkpoint_wrapper(Net()), Net(), nn.Sequential(checkpoint_wrapper(nn.Tanh()))
    )
    checkpoint_wrapper(model[2])
    checkpoint_wrapper(model)
    assert unwrap(model) is model
    assert [type(m) for m in (model, *model)] == [nn.Sequential, Net, Net, nn.Sequential]
    assert type(model[2][0]) is nn.Tanh
    assert not runs_twice(model, model[0].count)


def test_unwrap_leaves_modules_outside_alone() -> None:
    model = nn.Sequential(checkpoint_wrapper(Net()), checkpoint_wrapper(Net()))
    unwrap(model[0])
    assert not runs_twice(model[0], model[0].count)
    assert runs_twice(model[1], model[1].count)


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

    class Module(Net, metaclass=Final):
        pass

    module = checkpoint_wrapper(Module())
    assert runs_twice(module, module.count)


def test_parameters_moved_and_cast_after_wrapping(device: torch.device) -> None:
    module = checkpoint_wrapper(Net()).to(device).double()
    x = torch.randn(2, 4, device=device, dtype=torch.float64)
    module(x).sum().backward()
    assert module.linear.weight.grad.dtype == torch.float64
