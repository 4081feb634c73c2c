"""Turns recipes (memopt.recipes) on in the calls of a converted model's modules.

A model is not entered by its forward alone: a trainer calls `training_step`, which calls the model
inside, a loss calls `model.encoder(x)`. So each module that has submodules gets a pair of hooks
(memopt/_call_hooks.py) around its calls. A call inside another runs neither, since they would open
nothing more: C++ tells PyTorch that there are none (csrc/python/call_scopes.h). No class and no
forward changes: libraries ask for them (transformers' gradient checkpointing whether
`type(self).forward` is its own).
"""

from __future__ import annotations

import sys
from collections.abc import Container
from typing import Any

import torch
from torch import nn

from memopt._call_hooks import around_calls, put_around_calls, remove_from_calls
from memopt._class_patch import SwappedModule, original_class, patch_of
from memopt._compat import (
    add_note,
    is_parametrized,
    let_higher_order_ops_pass,
)
from memopt._extension import _C

let_higher_order_ops_pass(_C.INTERCEPT_KEY)  # csrc/intercept/key.h

_KEY = _C.RECIPES_KEY

TRANSFORM_INSIDE = (
    "convert: a model whose code calls torch.func.grad, vjp, jacrev or hessian must have "
    "memopt.convert(model, recipes=False), since PyTorch allows no saved tensor hooks around them"
)

# Their fast path in evaluation asks whether any module inside has hooks.
_NO_HOOKS = (nn.TransformerEncoderLayer, nn.MultiheadAttention)


def _enter(module: nn.Module, args: tuple[Any, ...]) -> None:
    # Under torch.compile the compiler decides what is kept.
    if not torch.compiler.is_compiling():
        _C.enter_recipes(module, _KEY, False)


def _enter_with_functions(module: nn.Module, args: tuple[Any, ...]) -> None:
    if not torch.compiler.is_compiling():
        _C.enter_recipes(module, _KEY, True)


def _leave(
    module: nn.Module,
    # torch.jit.script, which compiles hooks first and shows these lines where it fails, cannot have
    # a converted model: memopt.revert(model) before scripting it.
    args: tuple[Any, ...],
    output: Any,
) -> None:
    if torch.compiler.is_compiling():
        return
    _C.leave_call(module, _KEY)
    error = sys.exc_info()[1]
    if error is not None and _C.refuses_hooks(error):
        # Another error cannot be raised here: PyTorch drops what such a hook raises.
        error.args = (TRANSFORM_INSIDE,)
        add_note(error, "convert(model, recipes=False) puts no hooks around the model's calls")


def turn_recipes_on(
    model: nn.Module, functions: bool = False, left_alone: Container[nn.Module] = ()
) -> None:
    """Run calls of `model`, and of its submodules that call others, inside memopt.recipes().

    Args:
        functions: with PyTorch's functions replaced by memopt's there.
        left_alone: submodules that get no hooks. They have recipes where they are called from
            around.
    """
    enter = _enter_with_functions if functions else _enter
    put_around_calls(model, _KEY, enter, _leave)
    for module in _modules_to_enter(model):
        if module not in left_alone:
            put_around_calls(module, _KEY, enter, _leave)


def turn_recipes_off(module: nn.Module) -> None:
    """Undo `turn_recipes_on` on this module alone. Scopes end that an interrupt left open."""
    remove_from_calls(module, _KEY)
    _C.end_interrupted_calls()


def _modules_to_enter(model: nn.Module) -> list[nn.Module]:
    """The submodules that may be called alone and that call others: all that have submodules, but
    those of PyTorch only if one of ours, or one of the user's, is among these.
    """
    chosen: dict[nn.Module, bool] = {}

    def visit(module: nn.Module) -> bool:
        """Whether a module around it is worth entering for it."""
        if module not in chosen:
            chosen[module] = False  # should it contain itself
            children = () if is_parametrized(module) else module._modules.values()
            below = [visit(child) for child in children if child is not None]
            foreign = original_class(type(module)).__module__.split(".")[0] != "torch"
            chosen[module] = any(below) or foreign or patch_of(type(module)) is not None
        return chosen[module]

    visit(model)
    return [
        module
        for module, worth in chosen.items()
        if worth and module is not model and module._modules and _may_be_entered(module)
    ]


def _may_be_entered(module: nn.Module) -> bool:
    if isinstance(module, (torch.jit.ScriptModule, *_NO_HOOKS)):
        return False
    return type(module).forward is not nn.Module.forward or "forward" in module.__dict__


def has_recipes(module: nn.Module) -> bool:
    """Whether `turn_recipes_on` has put hooks around its calls."""
    return around_calls(module, _KEY) is not None


def is_converted(module: nn.Module) -> bool:
    """Whether a module is swapped, or has recipes around its calls."""
    return isinstance(module, SwappedModule) or has_recipes(module)


def has_functions(module: nn.Module) -> bool:
    """Whether PyTorch's functions are memopt's in its calls."""
    return around_calls(module, _KEY) is _enter_with_functions
