"""Another class for a module that memopt.convert computes, which stays the object that it is. Only
modules that are themselves replaced get one: scopes around calls are hooks (_call_hooks.py), and
what runs around a forward is in the module's attributes (_forwards.py).

The class becomes a subclass that is made here and has its own `forward`. Unlike a forward function
that is put on the instance and refers back to it, a method finds its module through `self`: a
deepcopy, an unpickled module or a DataParallel replica runs on its own parameters, and no reference
cycle keeps the module alive. The subclass bears the original's name, adds no state that state_dict
or named_parameters would see, and leaves `__call__` alone, so that hooks on the module run once,
outside.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, Protocol, cast

import torch
from torch import nn

Forward = Callable[..., Any]


class Patch(Protocol):
    """The reason for a subclass, and what it depends on. One for all modules that are alike."""

    def __hash__(self) -> int: ...

    def bases(self, original: type[nn.Module]) -> tuple[type, ...]:
        """The bases of the subclass that is made of `original`."""

    def make_forward(self, generated: type, plain: Forward) -> Forward:
        """The forward of the subclass `generated`, in place of `plain`."""


class SwappedModule:
    """Mixin of the classes that patched modules get, ahead of the original class."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # Stops here: an original class that registers its subclasses is not told of this one.
        pass

    def __setattr__(self, name: str, value: Any) -> None:
        """Code that wraps the forward for a time, as accelerate's hooks do, puts the one back that
        it found. If that is a class's own, it is meant as it is now.
        """
        if name == "forward" and _is_forward_of_class(self, value):
            self.__dict__.pop("forward", None)
        else:
            super().__setattr__(name, value)

    def __prepare_scriptable__(self) -> NoReturn:
        """torch.jit.script calls this first; it would compile the original forward, if anything."""
        raise TypeError(
            "convert: a converted module must not be scripted (TorchScript runs without Python), "
            f"got {type(self).__name__} in torch.jit.script; revert the model before"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Reduce as the original class does, since the subclass cannot be imported by name."""
        generated = type(self)
        patch, original = patch_of(generated), original_class(generated)
        reduced = super().__reduce_ex__(protocol)
        if isinstance(reduced, str) or patch is None:
            return reduced
        make, arguments, *state = reduced
        make, *arguments = (original if part is generated else part for part in (make, *arguments))
        return (_rebuild, (patch, make, *arguments), *state)


def patch_of(cls: type) -> Patch | None:
    """The patch that made `cls`; None if it was not made here, as a class that something else
    derived from a patched one (FSDP2).
    """
    patch: Patch | None = cls.__dict__.get("_memopt_patch")
    return patch


def original_class(cls: type) -> type[nn.Module]:
    """The class that was patched; `cls` itself if it was not made here."""
    original: type[nn.Module] = cls.__dict__.get("_memopt_original", cls)
    return original


def class_with(original: type[nn.Module], patch: Patch | None) -> type[nn.Module]:
    """The class that a module of class `original` has with this patch.

    Raises:
        TypeError: the class allows no subclass.
    """
    return original if patch is None else _generated_class(original, patch)


def set_patch(module: nn.Module, patch: Patch | None) -> None:
    """Give `module` the class with this patch, or its original one.

    Raises:
        TypeError: the class allows no subclass.
    """
    cls = class_with(original_class(type(module)), patch)
    # object's: a module may forward the setting of attributes to another (OptimizedModule).
    object.__setattr__(module, "__class__", cls)


@contextmanager
def restored_on_error(model: nn.Module) -> Iterator[None]:
    """Restores every module of `model` if the scope raises: its class, attributes, submodules and
    hooks.
    """
    before = [
        (m, type(m), dict(m.__dict__), _dicts_of(m))
        for m in model.modules()
        if not isinstance(m, torch.jit.ScriptModule)  # nothing changes these
    ]
    try:
        yield
    except BaseException:
        for module, cls, attributes, dictionaries in before:
            object.__setattr__(module, "__class__", cls)
            for now, then in (*dictionaries, (module.__dict__, attributes)):
                now.clear()
                now.update(then)
        raise


def check_can_patch(who: str, argument: str, module: object) -> None:
    """Raises TypeError, in the name of the function `who`, unless `module` is a Python module."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"{who}: {argument} must be an nn.Module, got {type(module).__name__}")
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(
            f"{who}: {argument} must not be a ScriptModule (TorchScript runs without "
            f"Python), got {type(module).__name__}"
        )


def _rebuild(patch: Patch, make: Callable[..., nn.Module], *arguments: Any) -> Any:
    """Make the object that a patched module was reduced to. Pickles contain this name."""
    module = make(*arguments)
    if not isinstance(module, SwappedModule):
        set_patch(module, patch)
    return module


def _dicts_of(module: nn.Module) -> list[tuple[dict[Any, Any], dict[Any, Any]]]:
    """The dictionaries of a module, of submodules and hooks and others, with what is in each. Most
    are empty, and to copy an OrderedDict takes long.
    """
    return [
        (value, dict(value) if value else {})
        for value in module.__dict__.values()
        if type(value) is dict or isinstance(value, OrderedDict)
    ]


def _is_forward_of_class(module: object, value: object) -> bool:
    """Whether `value` is the forward of one of the module's classes."""
    return (
        isinstance(value, types.MethodType)
        and value.__self__ is module
        and any(value.__func__ is cls.__dict__.get("forward") for cls in type(module).__mro__)
    )


def _of_graph_modules() -> dict[str, Any]:
    """Methods of patched torch.fx.GraphModules. Each of these has a class of its own, into which
    `recompile` writes a forward, and which copies are derived from: that is the original class.
    """

    def as_original(self: Any, method: str, *args: Any) -> Any:
        patched = type(self)
        object.__setattr__(self, "__class__", original_class(patched))
        try:
            return getattr(self, method)(*args)
        finally:
            object.__setattr__(self, "__class__", patched)

    def copied(self: Any, method: str, *args: Any) -> Any:
        copy = as_original(self, method, *args)
        set_patch(copy, patch_of(type(self)))
        return copy

    return {
        "recompile": lambda self: as_original(self, "recompile"),
        "__copy__": lambda self: copied(self, "__copy__"),
        "__deepcopy__": lambda self, memo: copied(self, "__deepcopy__", memo),
    }


# One subclass per class and patch, kept for as long as a module has it.
_generated_classes: weakref.WeakKeyDictionary[
    type[nn.Module], dict[Patch, weakref.ref[type[nn.Module]]]
] = weakref.WeakKeyDictionary()


def _generated_class(original: type[nn.Module], patch: Patch) -> type[nn.Module]:
    of_original = _generated_classes.setdefault(original, {})
    ref = of_original.get(patch)
    if ref is not None and (known := ref()) is not None:
        return known
    namespace: dict[str, Any] = {
        **(_of_graph_modules() if issubclass(original, torch.fx.GraphModule) else {}),
        "__doc__": original.__doc__,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "_memopt_patch": patch,
        "_memopt_original": original,
    }
    try:
        generated = cast(
            "type[nn.Module]",
            types.new_class(
                original.__name__,
                (SwappedModule, *patch.bases(original)),
                exec_body=lambda ns: ns.update(namespace),
            ),
        )
    except TypeError as error:
        raise TypeError(
            f"convert: module must have a class that can be subclassed, got {original.__name__}"
        ) from error
    forward = patch.make_forward(generated, original.forward)
    type.__setattr__(generated, "forward", functools.wraps(original.forward)(forward))
    of_original[patch] = weakref.ref(generated)
    return generated
