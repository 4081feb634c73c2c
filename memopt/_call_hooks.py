"""Scopes around the calls of a module, by hooks: the module keeps its class, its forward and its
attributes, and so do copies, pickles and DataParallel's replicas of it.

A forward pre-hook opens the scope and a forward hook ends it, also where the forward raises. In the
module's dictionaries of hooks they have a name for a key, where PyTorch's have numbers: a pickle of
the module that is loaded elsewhere meets no hook with the same number.

While they have hooks of memopt's, the dictionaries are `_C.CallHooks` (csrc/python/call_scopes.h),
of which PyTorch asks whether they are empty before it takes its slow path through a call. They stay
the objects that they are, since the handles of other hooks know them.

Pre-hooks that are there already run outside of the scope, those of later inside; with forward hooks
it is the other way around.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from memopt._extension import _C

BeforeCall = Callable[[nn.Module, tuple[Any, ...]], None]
AfterCall = Callable[[nn.Module, tuple[Any, ...], Any], None]


def put_around_calls(module: nn.Module, key: str, before: BeforeCall, after: AfterCall) -> None:
    """Call `before` at the beginning of each call of `module`, and `after` at its end.

    Args:
        key: their name. A pair that has it already is replaced.
        before, after: functions of a module's top level, if `module` is to be pickled.
    """
    remove_from_calls(module, key)
    for hooks in (_before(module), _after(module)):
        _C.become_call_hooks(hooks, True)
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
    for hooks in (_before(module), _after(module)):
        if not any(_is_ours(other) for other in hooks):
            _C.become_call_hooks(hooks, False)


def around_calls(module: nn.Module, key: str) -> BeforeCall | None:
    """The function `before` of the pair with this name; None if there is none."""
    return _before(module).get(key)


def has_around_calls(module: nn.Module) -> bool:
    """Whether anything of memopt's is around the calls of `module`."""
    return any(map(_is_ours, _before(module)))


def others_hooks(hooks: dict[Any, Any]) -> bool:
    """Whether one of a module's dictionaries of hooks has some that are not memopt's."""
    return not all(map(_is_ours, hooks))


def _is_ours(key: object) -> bool:
    return isinstance(key, str) and key.startswith("memopt")


def _before(module: nn.Module) -> dict[Any, Any]:
    hooks: dict[Any, Any] = module._forward_pre_hooks
    return hooks


def _after(module: nn.Module) -> dict[Any, Any]:
    hooks: dict[Any, Any] = module._forward_hooks
    return hooks


def _always(module: nn.Module) -> dict[Any, Any]:
    hooks: dict[Any, Any] = module._forward_hooks_always_called
    return hooks
