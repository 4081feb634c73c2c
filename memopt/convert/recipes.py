"""Turns recipes (memopt.recipes) on for whatever enters a converted model.

A model is not entered by its forward alone: a trainer calls `training_step`, a loss calls
`model.encoder(x)`, a user `clip.encode_text(x)`. So every module with submodules gets a subclass
(memopt/_class_patch.py) in which its forward, and the methods that its own classes define, run
inside memopt.recipes(). A call that is inside already costs a check in C++ (csrc/python/scope.h).
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Container, Iterator
from typing import Any

import torch
from torch import nn

from memopt._class_patch import (
    ClassPatch,
    Forward,
    ForwardWrapper,
    original_class,
    patches_of,
    set_patches,
    wrap_forward,
)
from memopt._compat import is_parametrized, let_higher_order_ops_pass
from memopt._extension import _C

let_higher_order_ops_pass(_C.INTERCEPT_KEY)  # csrc/python/functions.h

_INSTANCE_FORWARD = "_memopt_recipes_instance_forward"

_TRANSFORM_INSIDE = (
    "memopt: convert put saved-tensor hooks around this call of the model; for code that uses such "
    "transforms inside, convert(model, recipes=False) puts none"
)


class RecipesOn(ForwardWrapper):
    """Mixin of the classes of modules whose methods run inside memopt.recipes(). The patch's key
    says whether PyTorch's functions are memopt's there.
    """

    _memopt_who = "convert: a converted"
    _memopt_undo = "revert"
    _memopt_instance_forward = _INSTANCE_FORWARD

    @classmethod
    def _memopt_forward(cls, generated: type[Any], original: type[nn.Module], key: Any) -> Forward:
        functions = bool(key)
        in_recipes, is_compiling = _C.in_recipes, torch.compiler.is_compiling

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(self, generated):
                # The patch was removed, and code that kept the method still calls it.
                return type(self).forward(self, *args, **kwargs)
            plain: Any = self.__dict__.get(_INSTANCE_FORWARD)
            if plain is None:
                # super(): a class derived from this one later, as FSDP2 does, is left in place.
                inherited: Any = super(generated, self)
                plain = inherited.forward
            # Under torch.compile the compiler decides what is kept.
            if is_compiling() or in_recipes(functions):
                return plain(*args, **kwargs)
            return _enter(functions, plain, args, kwargs)

        return forward

    @classmethod
    def _memopt_methods(
        cls, generated: type[Any], original: type[nn.Module], key: Any
    ) -> dict[str, Callable[..., Any]]:
        return {
            name: _entry_point(name, generated, functions=bool(key))
            for name in _own_methods(original)
        }


def _enter(
    functions: bool, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    try:
        return _C.with_recipes(functions, plain, args, kwargs)
    except RuntimeError as error:
        # PyTorch's, which does not know whose hooks these are. (No notes before Python 3.11.)
        if "saved tensor hooks" in str(error) and hasattr(error, "add_note"):
            error.add_note(_TRANSFORM_INSIDE)
        raise


def _entry_point(name: str, generated: type[Any], functions: bool) -> Callable[..., Any]:
    in_recipes, is_compiling = _C.in_recipes, torch.compiler.is_compiling

    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, generated):
            return getattr(self, name)(*args, **kwargs)
        plain = getattr(super(generated, self), name)
        if is_compiling() or in_recipes(functions):
            return plain(*args, **kwargs)
        return _enter(functions, plain, args, kwargs)

    return method


@functools.cache
def _names_of_module() -> frozenset[str]:
    return frozenset(dir(nn.Module))


def _own_methods(cls: type[nn.Module]) -> Iterator[str]:
    """The plain methods that classes outside PyTorch define, and that nn.Module does not have.

    No generators and coroutines: their bodies run after the call.
    """
    seen = set(_names_of_module())
    for base in original_class(cls).__mro__:
        if base.__module__.split(".")[0] in ("torch", "memopt", "builtins"):
            continue
        for name, value in vars(base).items():
            if name in seen or (name.startswith("__") and name.endswith("__")):
                continue
            seen.add(name)
            if isinstance(value, types.FunctionType) and not _runs_later(value):
                yield name


def _runs_later(function: Callable[..., Any]) -> bool:
    function = inspect.unwrap(function)
    return (
        inspect.isgeneratorfunction(function)
        or inspect.iscoroutinefunction(function)
        or inspect.isasyncgenfunction(function)
    )


def turn_recipes_on(
    model: nn.Module, functions: bool = False, left_alone: Container[nn.Module] = ()
) -> None:
    """Run what enters `model`, or one of its submodules, inside memopt.recipes().

    Args:
        functions: with PyTorch's functions replaced by memopt's there.
        left_alone: submodules that keep their classes. They have recipes where they are called from
            around.
    """
    _patch(model, functions, at=None)
    for module in _modules_to_enter(model):
        if module in left_alone:
            continue
        # Inside a region: so its recompute makes recipes as its forward did.
        swaps = sum(not issubclass(p.mixin, ForwardWrapper) for p in patches_of(type(module)))
        try:
            _patch(module, functions, at=swaps)
        except TypeError:  # the class allows no subclass: those around it and inside remain
            continue


def _patch(module: nn.Module, functions: bool, at: int | None) -> None:
    patch = ClassPatch(RecipesOn, functions)
    patches = patches_of(type(module))
    for index, before in enumerate(patches):
        if before.mixin is RecipesOn:
            patches[index] = patch
            set_patches(module, patches)
            return
    if issubclass(type(module), RecipesOn):
        return  # something derived a class from the one that it got before
    if at is None:
        wrap_forward(module, patch)
    else:
        patches.insert(at, patch)
        set_patches(module, patches)


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
            chosen[module] = any(below) or foreign or bool(patches_of(type(module)))
        return chosen[module]

    visit(model)
    return [
        module
        for module, worth in chosen.items()
        if worth and module is not model and module._modules and _may_be_entered(module)
    ]


def _may_be_entered(module: nn.Module) -> bool:
    fx = sys.modules.get("torch.fx")
    if fx is not None and isinstance(module, fx.GraphModule):  # sets its class's forward itself
        return False
    if isinstance(module, torch.jit.ScriptModule) or is_parametrized(module):
        return False  # the latter's class is put back by torch.nn.utils.parametrize
    cls = type(module)
    has_forward = cls.forward is not nn.Module.forward
    return has_forward or next(_own_methods(cls), None) is not None


def has_recipes(model: nn.Module) -> bool:
    """Whether `turn_recipes_on` was called for it."""
    return any(patch.mixin is RecipesOn for patch in patches_of(type(model)))


def has_functions(model: nn.Module) -> bool:
    """Whether PyTorch's functions are memopt's in it."""
    return any(patch.mixin is RecipesOn and patch.key for patch in patches_of(type(model)))
