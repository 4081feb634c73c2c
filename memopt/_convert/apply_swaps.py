"""Puts swaps into a model, and takes them out again (`swap` says what they are)."""

from __future__ import annotations

import types
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from memopt._class_patch import set_patch
from memopt._convert.swap import REPLACES, ClassSwap, Swap, swap_of
from memopt._forwards import keep_around

# By the id of what stands in a model for a module that others may hold, that module.
_originals: dict[int, nn.Module] = {}


def apply_swaps(model: nn.Module, swaps: Sequence[tuple[nn.Module, Swap]]) -> None:
    """Swap submodules of `model`, or `model` itself.

    A module without submodules may be one object for many models: the default argument of a
    function, an entry of a table of activations, a norm that two towers are tied by. Nothing that
    can be asked of it says so. So it is left as it is, and a double takes its place in the model's
    modules: another object with the same `__dict__`, and so with the same parameters, buffers and
    dicts of hooks, whichever of the two they are set on.

    Swapped in place are those that must stay the objects they are: modules with hooks, which get
    the module and often look it up; modules that one of the model's also keeps in a plain
    attribute, which would go on being called; and modules with submodules.
    """
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    in_attributes: set[nn.Module] = set()
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is not None:
                places.setdefault(child, []).append((parent, name))
        in_attributes.update(_modules_among(parent.__dict__))
    for module, swap in swaps:
        target = module
        movable = module in places and module is not model and module not in in_attributes
        if isinstance(swap, ClassSwap) and movable and _can_have_double(module):
            target = _double(module)
            for parent, name in places[module]:
                parent._modules[name] = target
        swap.apply(target)


def _modules_among(attributes: dict[str, Any]) -> Iterator[nn.Module]:
    """Modules that are attributes, or elements of lists, tuples, sets and dicts that are."""
    for name, value in attributes.items():
        if isinstance(value, nn.Module):
            yield value
        elif isinstance(value, (list, tuple, set, frozenset, dict)) and name != "_modules":
            elements = value.values() if isinstance(value, dict) else value
            yield from (element for element in elements if isinstance(element, nn.Module))


def _can_have_double(module: nn.Module) -> bool:
    hooks = (value for name, value in module.__dict__.items() if name.endswith("_hooks"))
    # What is in slots would be missing in the double.
    slots = any(cls.__dict__.get("__slots__") for cls in type(module).__mro__)
    return not slots and not any(hooks) and next(module.children(), None) is None


def _double(module: nn.Module) -> nn.Module:
    double = object.__new__(type(module))
    object.__setattr__(double, "__dict__", module.__dict__)
    _originals[id(double)] = module
    weakref.finalize(double, _originals.pop, id(double), None).atexit = False
    return double


def put_originals_back(model: nn.Module) -> None:
    """Put the modules back for which `apply_swaps` put doubles, where the swap is undone."""
    for parent in model.modules():
        for name, child in parent._modules.items():
            original = None if child is None else _originals.get(id(child))
            # Something else may be around the double: a checkpointed region.
            if original is not None and type(child) is type(original):
                parent._modules[name] = original


def undo_swap(module: nn.Module) -> None:
    """Undo what `apply` of a swap did to `module`, if anything."""
    if swap_of(module) is not None:
        set_patch(module, None)
        keep_around(module)
    for name, value in module.__dict__.items():
        if isinstance(value, types.FunctionType) and REPLACES in value.__dict__:
            module.__dict__[name] = value.__dict__[REPLACES]
