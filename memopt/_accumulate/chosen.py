"""Micro-batches that "auto" chose, and what each was chosen for."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from memopt._accumulate.run import Accumulated
from memopt.memory.containers import content_of
from memopt.memory.leaves import leaves_of
from memopt.memory.parallel import is_sharded
from memopt.memory.step import Step

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


class Choices:
    """Choices for one model. A choice holds for steps of its kind: the batch's shapes, the budget,
    the loss, the optimizer, and the model as it is: its modules, their parameters (frozen or not),
    settings and hooks.
    """

    def __init__(self) -> None:
        self._rows: dict[Hashable, int] = {}
        self._most: dict[Hashable, int] = {}
        """Rows that were left where memory ran out, with gradients there or without."""
        self._moving: set[tuple[str, str]] = set()
        """Settings that a step itself changes, such as counters. They make no other kind."""

    def rows(self, kind: Kind) -> int | None:
        return self._rows.get((kind.key(self._moving), kind.with_gradients))

    def most(self, kind: Kind, rows: int) -> int:
        """Return so many rows, or fewer where memory ran out with them."""
        return min(rows, self._most.get(kind.key(self._moving), rows))

    def remember(self, kind: Kind, done: Accumulated) -> None:
        """After a step of this kind, which began with it."""
        before, after = kind.settings, dict(_settings(kind.step.model))
        self._moving.update(
            name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
        )
        key = kind.key(self._moving)
        self._rows[key, kind.with_gradients] = done.micro_batch
        if done.out_of_memory:
            self._most[key] = done.micro_batch


class Kind:
    """Everything that a choice depends on, as it is now."""

    def __init__(self, step: Step, *others: Hashable) -> None:
        self.step = step
        self.settings = dict(_settings(step.model))
        # Of a sharded model steps are watched, which begin without gradients in any case.
        self.with_gradients = not is_sharded(step.model) and any(
            p.grad is not None for _, p in step.trained
        )
        self._others = (
            *others,
            step.autocast,
            _as_key(step.loss),
            _as_key(step.function),
            tuple(_of_optimizer(step.optimizer)),
            tuple(map(_described, leaves_of(step.batch))),
            tuple(map(_described, (*step.model.parameters(), *step.model.buffers()))),
        )

    def key(self, moving: set[tuple[str, str]]) -> Hashable:
        settled = ((name, value) for name, value in self.settings.items() if name not in moving)
        return (*self._others, frozenset(settled))


def choices_of(model: nn.Module) -> Choices:
    """Kept as long as the model lives."""
    return _choices.setdefault(model, Choices())


_choices: WeakKeyDictionary[nn.Module, Choices] = WeakKeyDictionary()


def _settings(model: nn.Module) -> Iterator[tuple[tuple[str, str], Hashable]]:
    """The modules' classes and settings, by path and name."""
    for path, module in model.named_modules():
        kind: Any = type(module)
        yield (path, ""), kind
        for name, value in vars(module).items():
            if isinstance(value, _PLAIN):
                yield (path, name), (type(value), value)
            elif isinstance(value, (list, tuple, dict)) and name.endswith("_hooks"):
                yield (path, name), len(value)
            elif callable(value) and not isinstance(value, (nn.Module, Tensor)):
                yield (path, name), _as_key(value)


def _described(leaf: object) -> Hashable:
    if isinstance(leaf, (tuple, list)):  # a PackedSequence, which is no leaf of pytree's
        return tuple(map(_described, leaf))
    if not isinstance(leaf, Tensor):
        plain: Any = leaf if isinstance(leaf, _PLAIN) else type(leaf)
        return (plain,)
    if leaf.is_nested:
        return (leaf.layout, leaf.dtype, *(tuple(row.shape) for row in leaf.unbind()))
    return (tuple(leaf.shape), leaf.dtype, leaf.device, leaf.requires_grad)


def _of_optimizer(optimizer: torch.optim.Optimizer | None) -> Iterator[Hashable]:
    if optimizer is None:
        return
    kind: Any = type(optimizer)
    yield kind
    yield len(optimizer.state)
    for group in optimizer.param_groups:
        options = {k: v for k, v in group.items() if isinstance(v, (bool, type(None)))}
        # Whether there is momentum makes a state; how much, or the rate of learning, does not.
        numbers = {k: v != 0 for k, v in group.items() if type(v) in (int, float)}
        yield (len(group["params"]), *sorted(options.items()), *sorted(numbers.items()))


def _as_key(function: Callable[..., Any] | None) -> Hashable:
    """A key that is equal for functions that do the same: a lambda in a loop is another object each
    time. Values that it closes over count by value, or as the very object.
    """
    if isinstance(function, partial):
        parts = (*function.args, *function.keywords.items())
        return (_as_key(function.func), *map(_closed_over, parts))
    if isinstance(function, types.MethodType):
        return (function.__func__, _identity(function.__self__))
    if not isinstance(function, types.FunctionType):
        return _identity(function)
    cells = [content_of(cell) for cell in function.__closure__ or ()]
    return (function.__code__, *map(_closed_over, (*cells, *(function.__defaults__ or ()))))


def _closed_over(value: object) -> Hashable:
    if isinstance(value, Tensor):
        return _described(value)
    if isinstance(value, tuple):
        return tuple(map(_closed_over, value))
    if isinstance(value, _PLAIN):
        return (type(value), value)
    return _identity(value)


class _Same:
    """A key that is equal for the very same object, and for no later one."""

    def __init__(self, value: object) -> None:
        self._reference = weakref.ref(value)
        self._id = id(value)

    def __hash__(self) -> int:
        return self._id

    def __eq__(self, other: object) -> bool:
        mine = self._reference()
        return isinstance(other, _Same) and mine is not None and mine is other._reference()


def _identity(value: object) -> Hashable:
    try:
        return _Same(value)
    except TypeError:  # it takes no weak references
        return id(value)
