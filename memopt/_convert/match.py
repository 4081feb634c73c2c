"""Matching: a list of rules says, module by module, which swap each gets, or why it gets none."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from memopt._class_patch import SwappedModule, original_class
from memopt._compat import is_parametrized
from memopt._convert.probe import own_attributes, quiet
from memopt._convert.swap import ClassSwap, Swap
from memopt.memory.known import known_facts
from memopt.memory.modules import ByModule, paths_of
from memopt.memory.unchanged import Written, unchanged

ResultT = TypeVar("ResultT")

SAVES_ITS_OUTPUT = (
    "PyTorch's op saves its output, which the next layer saves as well; memopt's op would save its "
    "input in addition where there are no recipes"
)
WRITES_IN_PLACE = "without recipes memopt's op keeps no less than PyTorch's, which is in place"
READS_SWITCHES = (
    "its code reads True or False from globals or from its class: such a switch may be turned "
    "later, for which no call looks"
)
NOT_ALWAYS = (
    "it computes what memopt has an op for with some inputs, and with others something else or in "
    "another precision"
)
OWN_FORWARD = "its forward was replaced on the instance"
PARAMETRIZED = (
    "it is parametrized (torch.nn.utils.parametrize), which exchanges its class as convert does"
)


@dataclass(frozen=True)
class Reason:
    """A rule's answer for a module that is to stay as it is."""

    text: str
    """The text for the report; empty if the report should not mention the module."""

    declined: Swap | None = None
    """The swap that was not made, if the reason speaks against that."""

    function: str = ""
    """The function of memopt.functional that computes it all the same: PyTorch's, which the module
    calls, goes there inside the calls of the model."""

    def origin(self, path: str, module: nn.Module) -> tuple[str, str]:
        """Path and name of what is left, for the report."""
        if self.declined is not None:
            return self.declined.origin(path, module)
        return path, type(module).__qualname__


Answer = Swap | Reason


class Context:
    """Facts that rules may ask for in addition to their module. One for each call of `convert`."""

    recipes: bool
    """Whether recipes will be on around the model's forward (see `memopt.recipes`)."""

    functions: bool
    """Whether PyTorch's functions will be memopt's there as well."""

    skipped: Collection[nn.Module]
    """Modules that stay as they are because the caller of `convert` says so. Rules are not asked
    about them; a rule for a module around one must go on calling it."""

    def __init__(
        self,
        model: nn.Module,
        recipes: bool,
        skipped: Collection[nn.Module] = (),
        functions: bool = False,
    ) -> None:
        self.recipes = recipes
        self.functions = functions
        self.skipped = skipped
        self.paths = paths_of(model)
        self.answers: ByModule[Answer] = ByModule()
        self._remembered: dict[Hashable, Any] = {}
        self._probing = ExitStack()
        self._is_probing = False

    @contextmanager
    def matching(self) -> Iterator[None]:
        """A scope in which rules are asked; what their probes change is put back behind it."""
        with quiet(), self._probing:
            yield

    def begin_probing(self) -> None:
        """A stand-in has attributes of the module's own, and functions among them may reach
        anything. A walk over all of it, so not where nothing is probed.
        """
        if not self._is_probing:
            as_before = unchanged(*self.paths, gradients=True, written=Written(), waits=False)
            self._probing.enter_context(as_before)
            self._is_probing = True

    def path(self, module: nn.Module) -> str:
        """The module's path in the model, as `named_modules()` has it."""
        return self.paths[module]

    def answer(self, module: nn.Module) -> Answer | None:
        """The answer for a submodule. Submodules come before the modules that hold them."""
        return self.answers.get(module)

    def once(
        self, probe: Callable[[nn.Module], ResultT], module: nn.Module, *key: Hashable
    ) -> ResultT:
        """`probe(module)`, which is called once for modules that are equal: of one class, with
        equal attributes, parameters of equal shapes and dtypes, and submodules of the same classes;
        and once for all copies of a model that is predicted.

        Args:
            key: what else the result depends on.
        """
        attributes = own_attributes(module)
        alike = (
            getattr(probe, "__code__", probe),
            original_class(type(module)),
            tuple(sorted((k, _key(v)) for k, v in attributes.items())),
            tuple((k, p is not None and (p.shape, p.dtype)) for k, p in module._parameters.items()),
            tuple((k, type(m)) for k, m in module._modules.items()),
            key,
        )
        if alike not in self._remembered:
            known = known_facts()
            # Of another copy of the model objects are others: there its place says which it is.
            is_plain = all(isinstance(value, _PLAIN) for value in attributes.values())
            fact = alike if is_plain else (*alike[:2], self.path(module), key)
            if fact not in known:
                self.begin_probing()
                known[fact] = probe(module)
            self._remembered[alike] = known[fact]
        result: ResultT = self._remembered[alike]
        return result


Rule = Callable[[Any, Context], Answer | None]
"""A rule gets a module and the context. It answers with a swap; with a reason to leave the module
as it is; or with None if it has nothing to say, and the next rule is asked. It changes nothing."""


@dataclass(frozen=True)
class Match:
    """A module for which a rule had an answer."""

    path: str
    module: nn.Module
    answer: Answer

    def origin(self) -> tuple[str, str]:
        """Path and name of what is swapped or left, for the report."""
        return self.answer.origin(self.path, self.module)


def match(context: Context, rules: Sequence[Rule]) -> list[Match]:
    """The first answer of `rules` for each module of the model, in the order of `named_modules()`.

    Changes nothing. Not asked about: modules that are swapped already, those of `context.skipped`,
    and TorchScript's.
    """
    matches = []
    with context.matching():
        for module in reversed(list(context.paths)):
            if isinstance(module, (SwappedModule, torch.jit.ScriptModule)):
                continue
            if module in context.skipped:
                continue
            answer = _first_answer(rules, module, context)
            if isinstance(answer, Swap) and answer.needs_recipes() and not context.recipes:
                in_place = getattr(answer, "in_place", False)
                answer = Reason(WRITES_IN_PLACE if in_place else SAVES_ITS_OUTPUT, answer)
            elif isinstance(answer, ClassSwap) and _has_own_forward(module):
                answer = Reason(OWN_FORWARD, answer)
            elif isinstance(answer, ClassSwap) and is_parametrized(module):
                answer = Reason(PARAMETRIZED, answer)
            if answer is not None:
                context.answers[module] = answer
                matches.append(Match(context.path(module), module, answer))
    return matches[::-1]


def _first_answer(rules: Sequence[Rule], module: nn.Module, context: Context) -> Answer | None:
    for rule in rules:
        if not name_of(rule).startswith("memopt."):  # a user's may run what it likes
            context.begin_probing()
        try:
            answer = rule(module, context)
        except Exception as error:
            raise RuntimeError(
                f"convert: rule {name_of(rule)} must not raise, got {type(error).__name__}: "
                f"{error}, for {_describe(module, context)}"
            ) from error
        if isinstance(answer, (Swap, Reason)):
            return answer
        if answer is not None:
            raise TypeError(
                f"convert: rule {name_of(rule)} must return a Swap, a Reason or None, got "
                f"{answer!r} for {_describe(module, context)}"
            )
    return None


def name_of(rule: Rule) -> str:
    """The rule's name in messages: the module and the name of the function."""
    name = getattr(rule, "__qualname__", None)
    return repr(rule) if name is None else f"{rule.__module__}.{name}"


def _describe(module: nn.Module, context: Context) -> str:
    path = context.path(module)
    return f"{type(module).__name__} at {path!r}" if path else type(module).__name__


_PLAIN = (bool, int, float, str, type(None))


def _key(value: object) -> str:
    """A key, the same for attributes that are equal; they all live while modules are matched."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, tuple):
        return repr(tuple(map(_key, value)))
    return f"object {id(getattr(value, '__func__', value))}"


def _has_own_forward(module: nn.Module) -> bool:
    return "forward" in module.__dict__
