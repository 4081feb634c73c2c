"""Swaps: what a module becomes.

A swap is a small frozen dataclass, the same for modules that are alike. A ClassSwap gives the
module a subclass that depends on the swap alone: nothing is stored on the module, so copies and
pickles are converted as it is, and removing the subclass undoes the swap. An AttributeSwap puts
another function in an attribute.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar, cast

from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from memopt._call_hooks import others_hooks
from memopt._class_patch import Forward, patch_of, set_patch
from memopt._convert.supported import lowered, supports
from memopt._extension import _C
from memopt._forwards import keep_around
from memopt.recipes import is_kept_anyway, recipes_are_on

Plain = Callable[[nn.Module, Tensor], Tensor]
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

# On a function that AttributeSwap puts in an attribute: the one that was there.
REPLACES = "_memopt_replaces"


class Swap:
    """A rule's answer for a module that memopt can compute."""

    def becomes(self) -> str:
        """The module of memopt.nn or the function of memopt.functional, for the report."""
        raise NotImplementedError

    def origin(self, path: str, module: nn.Module) -> tuple[str, str]:
        """Path and name of what is swapped, for the report."""
        return path, type(module).__qualname__

    def needs_recipes(self) -> bool:
        """Whether it is a gain only with recipes."""
        return False

    def apply(self, module: nn.Module) -> None:
        """Swap `module`, in place."""
        raise NotImplementedError


class ClassSwap(Swap):
    """A swap that replaces the module's forward, which takes one tensor, by `run`."""

    is_one_op: ClassVar[bool] = False
    """The module's output has a recipe, and its input is what is saved."""

    def needs_kept_input(self) -> bool:
        """Whether it saves its input where the original saves its output, so that it is a gain only
        where the input is kept anyway. Other calls run the original.
        """
        return self.needs_recipes()

    def run(self, module: Any, input: Tensor, plain: Plain) -> Tensor:
        """The forward; `plain` is the original one, for calls that memopt's ops do not support."""
        raise NotImplementedError

    def bases(self, original: type[nn.Module]) -> tuple[type, ...]:
        """The bases of the module's new class; `original` is the class that it had."""
        return (original,)

    def make_forward(self, generated: type, plain: Forward) -> Forward:
        """The forward of the class `generated`, in place of `plain`."""
        run = self._run_if_kept_anyway if self.needs_kept_input() else self.run
        by_function = self.by_function(plain)

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(self, generated):  # reverted; code that kept the method calls it
                return type(self).forward(self, *args, **kwargs)
            if len(args) != 1 or kwargs:
                args = inspect.signature(plain).bind(self, *args, **kwargs).args[1:]
            if by_function is not None and not is_dynamo_compiling() and _C.functions_take(args[0]):
                return by_function(self, args[0])
            return run(self, args[0], plain)

        return forward

    def by_function(self, plain: Plain) -> Plain | None:
        """The forward where PyTorch's functions are memopt's anyway, inside the calls of a
        converted model (csrc/intercept/functions.h): fewer calls of Python than `run`. None: there
        is no function of PyTorch's for it.

        Args:
            plain: the original forward.
        """
        return None

    def _run_if_kept_anyway(self, module: Any, input: Tensor, plain: Plain) -> Tensor:
        return self.run(module, input, plain) if is_kept_anyway(input) else plain(module, input)

    def apply(self, module: nn.Module) -> None:
        """The new forward runs inside of what is around the module's forward already."""
        set_patch(module, self)
        keep_around(module)


@dataclass(frozen=True)
class TorchSwap(ClassSwap):
    """A module of torch.nn, or of a subclass that keeps its forward, becomes memopt.nn's."""

    is_one_op = True
    base: type[nn.Module]
    parameters: tuple[str, ...] = ()
    """Names of those that the op takes beside its input."""

    saves_input_for_output: bool = False
    """PyTorch's saves its output, which the next layer saves as well."""

    lowers: bool = False
    """Under autocast it computes in the autocast dtype."""

    in_place: bool = False
    """It writes over its input, as the original does (memopt.functional.activation_)."""

    def becomes(self) -> str:
        return f"memopt.nn.{self.base.__name__}" + ("(inplace=True)" if self.in_place else "")

    def needs_recipes(self) -> bool:
        return self.saves_input_for_output or self.in_place

    def needs_kept_input(self) -> bool:
        return self.saves_input_for_output and not self.in_place

    def by_function(self, plain: Plain) -> Plain | None:
        return None if self.lowers else plain  # which does no more than call it

    def run(self, module: Any, input: Tensor, plain: Plain) -> Tensor:
        found = module._parameters  # quicker than attributes, but a parametrization's are not there
        parameters = [
            found[name] if name in found else getattr(module, name) for name in self.parameters
        ]
        # A compiler has ways of its own with writes in place.
        if not supports(input, *parameters) or (self.in_place and is_dynamo_compiling()):
            return plain(module, input)
        if self.lowers:
            input = lowered(input)
        output: Tensor = self.base.forward(module, input)
        return output

    def bases(self, original: type[nn.Module]) -> tuple[type, ...]:
        if issubclass(self.base, original):  # torch.nn's own class
            return (self.base,)
        return (original, self.base)  # a subclass of torch.nn's


@dataclass(frozen=True)
class ForwardSwap(ClassSwap):
    """A swap for rules of your own: `forward(module, *args, **kwargs)` computes the module.

    A call runs the module's own forward instead where memopt's ops do not support the first tensor
    among its arguments together with the module's own parameters: see `memopt.convert`.
    """

    forward: Callable[..., Any]
    """Defined at the top level of a file, if converted modules are to be pickled."""

    to: str
    """The text for what the module becomes, in the report."""

    with_recipes_only: bool = False
    """Leave the module where recipes are off: with `convert(model, recipes=False)`, and in calls
    from outside the model."""

    def __post_init__(self) -> None:
        if not callable(self.forward):
            raise TypeError(f"ForwardSwap: forward must be callable, got {self.forward!r}")
        if not isinstance(self.to, str):
            raise TypeError(f"ForwardSwap: to must be a string, got {self.to!r}")

    def becomes(self) -> str:
        return self.to

    def needs_recipes(self) -> bool:
        return self.with_recipes_only

    def make_forward(self, generated: type, plain: Forward) -> Forward:
        swapped, with_recipes_only = self.forward, self.with_recipes_only

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(self, generated):
                return type(self).forward(self, *args, **kwargs)
            input = _first_tensor(*args, *kwargs.values())
            if not supports(input, *self._parameters.values()) or (
                with_recipes_only and not recipes_are_on()
            ):
                return plain(self, *args, **kwargs)
            return swapped(self, *args, **kwargs)

        return forward


def _first_tensor(*values: object) -> Tensor | None:
    for value in values:
        if isinstance(value, Tensor):
            return value
    return None


@dataclass(frozen=True)
class AttributeSwap(Swap):
    """An attribute that holds a function of PyTorch's gets one of memopt's."""

    attribute: str
    function: Callable[..., Any]
    """Made by `replaces`."""

    saves_input_for_output: bool = False

    def becomes(self) -> str:
        return f"memopt.functional.{self.function.__name__}"

    def origin(self, path: str, module: nn.Module) -> tuple[str, str]:
        original = self.function.__dict__[REPLACES].__name__
        return f"{path}.{self.attribute}".removeprefix("."), f"torch.nn.functional.{original}"

    def needs_recipes(self) -> bool:
        return self.saves_input_for_output

    def apply(self, module: nn.Module) -> None:
        module.__dict__[self.attribute] = self.function


def replaces(original: Callable[..., Any]) -> Callable[[FunctionT], FunctionT]:
    """Marks a function of the top level that AttributeSwap puts in the place of `original`."""

    def mark(function: FunctionT) -> FunctionT:
        function.__dict__[REPLACES] = original
        return function

    return mark


def swap_of(module: nn.Module) -> ClassSwap | None:
    """The class swap of `module`; None if it has none."""
    return cast("ClassSwap | None", patch_of(type(module)))


def has_hooks(module: nn.Module) -> bool:
    """Whether something wants to see its calls."""
    return bool(
        others_hooks(module._forward_hooks)
        or others_hooks(module._forward_pre_hooks)
        or module._backward_hooks
        or module._backward_pre_hooks
    )
