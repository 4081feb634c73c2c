"""Proves: of a converted model's modules, only the outermost one that is called runs memopt's
hooks; a call inside another is one without hooks, whatever its dictionaries hold. Other people's
hooks run as before, and the dictionaries stay the objects that they were.
"""

from __future__ import annotations

import copy
import pickle
import threading
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt._convert import recipes as recipes_of_convert
from memopt._extension import _C
from tests.convert.test_entry_points import WIDTH, mlp


def nested() -> nn.Sequential:
    return nn.Sequential(nn.Sequential(mlp(), nn.GELU()), mlp())


def input() -> Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(0), requires_grad=True)


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The modules whose hook memopt's function was called for."""
    modules: list[nn.Module] = []
    enter = recipes_of_convert._enter_with_functions

    def counted(module: nn.Module, args: tuple[Any, ...]) -> None:
        modules.append(module)
        enter(module, args)

    monkeypatch.setattr(recipes_of_convert, "_enter_with_functions", counted)
    return modules


def test_a_call_inside_another_runs_no_hook(entered: list[nn.Module]) -> None:
    model = nested()
    memopt.convert(model)
    model(input())
    assert entered == [model]
    entered.clear()
    model[0](input())
    assert entered == [model[0]]


def test_each_thread_has_an_outermost_module(entered: list[nn.Module]) -> None:
    model = nested()
    memopt.convert(model)
    inner = model[0]

    class Calling(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            thread = threading.Thread(target=inner, args=(x,))
            thread.start()
            thread.join()
            return x

    model.append(Calling())
    model(input())
    assert entered == [model, inner]


def test_a_call_inside_a_region_runs_them(entered: list[nn.Module]) -> None:
    """PyTorch's checkpoint has hooks of its own inside; without memopt's there would be no scope
    in it.
    """
    model = nested()
    memopt.convert(model)
    inner, x = model[0], input()

    class Checkpointing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=False)
            return y

    model.append(Checkpointing())
    model(x).sum().backward()
    assert entered == [model, inner, inner]


def test_the_dictionaries_stay_the_objects_that_they_are() -> None:
    model = nested()
    ran: list[str] = []
    handle = model[0].register_forward_hook(lambda *_: ran.append("before"))
    before = [(m._forward_pre_hooks, m._forward_hooks) for m in model.modules()]
    memopt.convert(model)
    later = model[0].register_forward_pre_hook(lambda *_: ran.append("later"))
    model(input())
    assert ran == ["later", "before"]
    handle.remove()
    later.remove()
    model(input())
    assert len(ran) == 2
    held = [m for m in model.modules() if type(m._forward_pre_hooks) is _C.CallHooks]
    assert model in held
    memopt.revert(model)
    for (pre, post), module in zip(before, model.modules(), strict=True):
        assert module._forward_pre_hooks is pre
        assert module._forward_hooks is post
        assert type(pre) is type(post) is OrderedDict
        assert len(pre) == len(post) == 0


@pytest.mark.parametrize("kind", ["forward", "pre", "backward"])
def test_hooks_of_others_on_a_module_inside_run_as_before(kind: str) -> None:
    model = nested()
    memopt.convert(model)
    ran: list[bool] = []

    def hook(*_: Any) -> None:
        ran.append(_C.recipes_are_on())

    register = {
        "forward": model[0].register_forward_hook,
        "pre": model[0].register_forward_pre_hook,
        "backward": model[0].register_full_backward_hook,
    }[kind]
    handle = register(hook)
    model(input()).sum().backward()
    assert ran == [kind != "backward"]
    assert not _C.recipes_are_on()
    handle.remove()
    model(input())
    assert len(ran) == 1


def test_they_are_copied_and_pickled() -> None:
    model = nested()
    memopt.convert(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other._forward_pre_hooks) is _C.CallHooks
        assert other._forward_pre_hooks == model._forward_pre_hooks
        assert bool(other._forward_pre_hooks)
        assert torch.equal(other(input()), model(input()))
        memopt.revert(other)
        assert type(other._forward_pre_hooks) is OrderedDict


def test_what_is_true_of_them() -> None:
    hooks = _C.CallHooks()
    assert not hooks
    hooks[_C.RECIPES_KEY] = print
    assert hooks
    with memopt.recipes():
        assert hooks  # PyTorch's functions are not memopt's here
    hooks[0] = print
    model = nested()
    memopt.convert(model)

    class Asking(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert hooks
            del hooks[0]
            assert not hooks
            return x

    model.append(Asking())
    model(input())
    assert hooks
    assert len(hooks) == 1


def test_other_dictionaries_are_left() -> None:
    for other in ({}, _C.CallHooks(), [], None):
        kind = type(other)
        _C.become_call_hooks(other, isinstance(other, OrderedDict))  # type: ignore[arg-type]
        assert type(other) is kind
