"""Rules of your own, which `convert` asks before memopt's."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn
from torch.utils.hooks import RemovableHandle

from memopt._class_patch import original_class
from memopt._convert.match import Answer, Context, Rule

RuleT = TypeVar("RuleT", bound=Rule)

_registered: OrderedDict[int, Rule] = OrderedDict()


def register_rule(rule: Rule, *classes: type[nn.Module]) -> RemovableHandle:
    """Have `convert` ask `rule` about modules before it asks memopt's own rules.

    A rule is a function of a module and a `Context`. It returns a `Swap` (see `ForwardSwap`), a
    `Reason` to leave the module as it is, or None if it has nothing to say. It changes nothing.

    Of several registered rules the newest is asked first; the first that does not return None
    decides. Rules are asked about every module of a model, those of torch.nn too, but not about
    modules that are swapped already. They stay registered for all later calls of `convert`, in all
    threads, until they are removed; models that were converted stay so.

    Args:
        rule: called with each module and the context. Warnings are off and no mode of PyTorch is on
            while it runs.
        classes: only ask about modules of these classes, and of subclasses that keep their forward.
            All modules without.

    Returns:
        A handle: `handle.remove()` removes the rule, and so does the end of `with handle:`.

    Raises:
        TypeError: `rule` is not callable, or a class is no subclass of nn.Module.
    """
    if not callable(rule) or isinstance(rule, type):
        raise TypeError(
            f"register_rule: rule must be a function of a module and a context, got {rule!r}"
        )
    _check_classes("register_rule", classes)
    handle = RemovableHandle(_registered)
    _registered[handle.id] = _only_for(classes, rule) if classes else rule
    return handle


def rule(*classes: type[nn.Module]) -> Callable[[RuleT], RuleT]:
    """Decorator: `register_rule` for modules of these classes, for good.

    A norm of your own that memopt does not recognise, since it stores the logarithm of its weight:

    >>> import torch, memopt
    >>> from torch import nn
    >>> from torch.nn import functional as F
    >>> class LogNorm(nn.Module):
    ...     def __init__(self, size):
    ...         super().__init__()
    ...         self.log_weight = nn.Parameter(torch.zeros(size))
    ...     def forward(self, x):
    ...         return F.rms_norm(x, x.shape[-1:], self.log_weight.exp(), 1e-6)
    >>> def log_norm(module, x):
    ...     return memopt.functional.rms_norm(x, x.shape[-1:], module.log_weight.exp(), 1e-6)
    >>> @memopt.convert.rule(LogNorm)
    ... def swap_log_norm(module, context):
    ...     return memopt.convert.ForwardSwap(log_norm, to="memopt.functional.rms_norm")
    >>> model = nn.Sequential(LogNorm(8), nn.Linear(8, 8))
    >>> print(memopt.convert(model))
    convert(Sequential): 1 swapped, 0 left
    1 x  LogNorm  memopt.functional.rms_norm  0
    recipes are on in the calls of the model and of its modules; under torch.compile they step \
aside, and modules compute by PyTorch's own ops, from which Inductor generates code: \
memopt.compile(model) has it keep for backward what recipes keep

    Args:
        classes: at least one.

    Raises:
        TypeError: there is no class, or one is no subclass of nn.Module.
    """
    if not classes:
        raise TypeError("rule: takes the classes that the rule is for, got none")
    _check_classes("rule", classes)

    def register(function: RuleT) -> RuleT:
        register_rule(function, *classes)
        return function

    return register


def registered_rules() -> tuple[Rule, ...]:
    """The newest first."""
    return tuple(reversed(_registered.values()))


def _only_for(classes: tuple[type[nn.Module], ...], rule: Rule) -> Rule:
    @functools.wraps(rule)
    def for_classes(module: Any, context: Context) -> Answer | None:
        cls = original_class(type(module))
        if any(issubclass(cls, c) and cls.forward is c.forward for c in classes):
            return rule(module, context)
        return None

    return for_classes


def _check_classes(who: str, classes: tuple[object, ...]) -> None:
    for cls in classes:
        if not isinstance(cls, type) or not issubclass(cls, nn.Module):
            raise TypeError(f"{who}: classes must be subclasses of nn.Module, got {cls!r}")
