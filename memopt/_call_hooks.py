"""Scopes around the calls of a module, by hooks: the module keeps its class, its forward and its
attributes, and so do copies, pickles and DataParallel's replicas of it.

A forward pre-hook opens the scope and a forward hook ends it, also where the forward raises. In the
module's dictionaries of hooks they have a name for a key, where PyTorch's have numbers: a pickle of
the module that is loaded elsewhere meets no hook with the same number.

Pre-hooks that are there already run outside of the scope, those of later inside; with forward hooks
it is the other way around.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

BeforeCall = Callable[[nn.Module, tuple[Any, ...]], None]
AfterCall = Callable[[nn.Module, tuple[Any, ...], Any], None]


def put_around_calls(module: nn.Module, key: str, before: BeforeCall, after: AfterCall) -> None:
    """Call `before` at the beginning of each call of `module`, and `after` at its end.

    Args:
        key: their name. A pair that has it already is replaced.
        before, after: functions of a module's top level, if `module` is to be pickled.
    """
    remove_from_calls(module, key)
    _before(module)[key] = before
    # First among forward hooks, so that several scopes end in the order opposite to their opening.
    others = dict(_after(module))
    _after(module).clear()
    _after(module)[key] = after
    _after(module).update(others)
    _always(module)[key] = True


def remove_from_calls(module: nn.Module, key: str) -> None:
    """Undo `put_around_calls`; nothing if it was not called."""
    for hooks in (_before(module), _after(module), _always(module)):
        hooks.pop(key, None)


def around_calls(module: nn.Module, key: str) -> BeforeCall | None:
    """The function `before` of the pair with this name; None if there is none."""
    return _before(module).get(key)


def others_hooks(hooks: dict[Any, Any]) -> bool:
    """Whether one of a module's dictionaries of hooks has some that are not memopt's."""
    return any(not isinstance(key, str) or not key.startswith("memopt") for key in hooks)


def _before(module: nn.Module) -> dict[Any, Any]:
    hooks: dict[Any, Any] = module._forward_pre_hooks
    return hooks


def _after(module: nn.Module) -> dict[Any, Any]:
    hooks: dict[Any, Any] = module._forward_hooks
    return hooks


def _always(module: nn.Module) -> dict[Any, Any]:
    hooks: dict[Any, Any] = module._forward_hooks_always_called
    return hooks
