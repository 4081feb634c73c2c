"""A module whose forward is computed by an op of memopt: the change, and what describes it.

The subclass that the module gets depends on a description alone, which is a small frozen dataclass:
nothing is stored on the module, so copies and pickles are converted as it is, and taking the class
away undoes it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Protocol, cast

from torch import Tensor, nn

from memopt._subclass import Change, Changed, Forward, changes, set_changes
from memopt.convert.eligible import takes

Plain = Callable[[nn.Module, Tensor], Tensor]


class Swap(Protocol):
    """What computes a module's forward in place of its own. Hashable and picklable."""

    @property
    def to(self) -> str:
        """What the report says it became."""

    @property
    def base(self) -> type[nn.Module] | None:
        """The module of memopt.nn that a module of torch.nn becomes an instance of, or None."""

    def run(self, module: Any, input: Tensor, plain: Plain) -> Tensor:
        """The forward; `plain` is the original one, for calls that memopt's ops do not take."""


@dataclass(frozen=True)
class Module:
    """A module of torch.nn, or of a subclass without a forward of its own, by memopt.nn's."""

    base: type[nn.Module]
    parameters: tuple[str, ...] = ()
    """Names of those that the op takes beside its input."""

    @property
    def to(self) -> str:
        return f"memopt.nn.{self.base.__name__}"

    def run(self, module: Any, input: Tensor, plain: Plain) -> Tensor:
        found = module._parameters  # quicker than attributes, but a parametrization's are not there
        parameters = [
            found[name] if name in found else getattr(module, name) for name in self.parameters
        ]
        if not takes(input, *parameters):
            return plain(module, input)
        output: Tensor = self.base.forward(module, input)
        return output


class Swapped(Changed):
    """Mixin of the classes of modules that were swapped."""

    _memopt_who = "convert: a converted"
    _memopt_undo = "revert"

    @classmethod
    def _memopt_bases(cls, original: type[nn.Module], key: Swap) -> tuple[type, ...]:
        if key.base is None:
            return (cls, original)
        if issubclass(key.base, original):  # torch.nn's own class
            return (cls, key.base)
        return (cls, original, key.base)  # a subclass of torch.nn's

    @classmethod
    def _memopt_forward(cls, generated: type, original: type[nn.Module], key: Swap) -> Forward:
        run, plain = key.run, original.forward

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(self, generated):  # reverted; code that kept the method calls it
                return type(self).forward(self, *args, **kwargs)
            if len(args) != 1 or kwargs:
                args = inspect.signature(plain).bind(self, *args, **kwargs).args[1:]
            return run(self, args[0], plain)

        return forward


def swap_of(module: nn.Module) -> Swap | None:
    """What `module` was swapped for; None if it was not."""
    for change in changes(type(module)):
        if change.mixin is Swapped:
            return cast("Swap", change.key)
    return None


def swap(module: nn.Module, to: Swap) -> None:
    """Give `module` the forward of `to`, inside whatever is around its forward already."""
    set_changes(module, [Change(Swapped, cast("Hashable", to)), *changes(type(module))])
