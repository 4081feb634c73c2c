"""What may become of one block's activations, and how the choices are put on a model."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from memopt._call_hooks import put_around_calls, remove_from_calls
from memopt._checkpoint.wrapper import (
    Settings,
    checkpoint_wrapper,
    settings_of,
    unwrap_itself,
)
from memopt._class_patch import restored_on_error
from memopt._convert import convert, revert
from memopt._convert.functions import functions_paused
from memopt._convert.recipes import has_recipes
from memopt._convert.regions import forget_settings
from memopt._convert.swap import SwappedModule
from memopt._extension import _C
from memopt._offload.api import offload
from memopt._offload.stats import offload_stats
from memopt.place import Place
from memopt.recipes import recipes

# Names of hooks on planned blocks.
_OFFLOAD = "memopt.plan: offload"
_FUNCTIONS = "memopt.plan: functions"

# Storages of less stay on the device, as with memopt.offload.
MIN_BYTES = 64 * 1024


@dataclass(frozen=True)
class Choice:
    """What becomes of one block's activations."""

    recipes: bool = False
    """Norms, activations and dropouts are made again (memopt.convert)."""
    checkpoint: bool = False
    """The block is a region: its inputs are kept, and it runs again in backward."""
    offload: float = 0.0
    """The share of what is kept that waits elsewhere, from 0 to 1; of a region all of it."""

    def __str__(self) -> str:
        words = ["recipes"] * self.recipes + ["checkpoint"] * self.checkpoint
        share = "" if self.offload == 1 else f" {self.offload:.0%}"
        words += [f"offload{share}"] if self.offload else []
        return " + ".join(words) or "keep"


KEEP = Choice()
CHOICES = tuple(
    Choice(recipes, checkpoint) for checkpoint in (False, True) for recipes in (False, True)
)
"""Those without offloading: keep, recipes, checkpoint, recipes inside a checkpoint."""
_SHARES = (0.25, 0.5, 0.75, 1.0)


def choices_with(offload: bool) -> tuple[Choice, ...]:
    """All that a plan may choose from."""
    if not offload:
        return CHOICES
    away = [
        Choice(choice.recipes, choice.checkpoint, share)
        for choice in CHOICES
        for share in ((1.0,) if choice.checkpoint else _SHARES)
    ]
    return (*CHOICES, *away)


class Assignment:
    """A choice for each block of a model, by the blocks' paths.

    Blocks that are not named keep what autograd saves. Where a block has recipes, so has what is
    outside of all blocks.

    Args:
        place: where what is offloaded waits.
        in_step: whether each block waits in the end until what it gave away has left.
    """

    def __init__(
        self,
        choices: Mapping[str, Choice],
        place: Place | None = None,
        in_step: bool = False,
    ) -> None:
        self.choices = dict(choices)
        self.place = place
        self.in_step = in_step

    @property
    def recipes(self) -> bool:
        return any(choice.recipes for choice in self.choices.values())

    @property
    def offloads(self) -> bool:
        return any(choice.offload for choice in self.choices.values())

    def staying(self) -> Assignment:
        """The same, but nothing is offloaded."""
        stay = {path: replace(choice, offload=0.0) for path, choice in self.choices.items()}
        return Assignment(stay)

    def without_regions(self, paths: Container[str]) -> Assignment:
        """The same, but these blocks, which cannot be regions, are none."""
        choices = {
            path: replace(choice, checkpoint=False) if path in paths else choice
            for path, choice in self.choices.items()
        }
        return Assignment(choices, self.place, self.in_step)

    def apply(self, model: nn.Module) -> Applied:
        """Change a model in place. After an error it is as before."""
        put = Applied(model)
        with restored_on_error(model):
            if self.recipes:
                convert(model, skip=[p for p, c in self.choices.items() if not c.recipes] or None)
                put.converted = [m for m in model.modules() if _is_converted(m)]
            modules = dict(model.named_modules())
            for path, choice in self.choices.items():
                self._apply_to(modules[path], choice, put)
        if self.offloads and self.in_step:
            for path, choice in self.choices.items():
                if choice.offload:
                    put.handles.append(modules[path].register_forward_hook(_wait_for_copies))
        return put

    def _apply_to(self, block: nn.Module, choice: Choice, put: Applied) -> None:
        if self.recipes and not choice.recipes:
            put_around_calls(block, _FUNCTIONS, _enter_own_functions, _leave_own_functions)
            put.scopes.append((block, _FUNCTIONS))
        if choice.checkpoint:
            checkpoint_wrapper(block, offload=self.place if choice.offload else None)
            put.regions.append((block, settings_of(block)))
        elif choice.offload and self.place is not None:
            enter = _EnterOffloading(self.place, choice)
            put_around_calls(block, _OFFLOAD, enter, _leave_offloading)
            put.scopes.append((block, _OFFLOAD))


@dataclass
class Applied:
    """What an assignment has put on a model, so that this and nothing else is taken off."""

    model: nn.Module
    converted: list[nn.Module] = field(default_factory=list)
    regions: list[tuple[nn.Module, Settings | None]] = field(default_factory=list)
    scopes: list[tuple[nn.Module, str]] = field(default_factory=list)
    handles: list[RemovableHandle] = field(default_factory=list)

    def undo(self) -> None:
        """Give the model back as it was. Regions that were made since, or got other settings, stay.

        Raises:
            ValueError: more of the model was converted since, which cannot be told from the plan's.
                The model is as before then.
        """
        mine = set(self.converted)
        more = [m for m in self.model.modules() if _is_converted(m) and m not in mine]
        if mine and more:
            raise ValueError(
                "Plan.undo: model must not be converted while a plan with recipes is on it, got "
                f"{type(more[0]).__name__}, converted since; memopt.revert(model) and "
                "memopt.unwrap(model) take everything off, this plan too"
            )
        regions = [module for module, settings in self.regions if settings_of(module) is settings]
        for handle in self.handles:
            handle.remove()
        for module, settings in self.regions:
            forget_settings(module, settings)
        for module in regions:
            unwrap_itself(module)
        for module, key in self.scopes:
            remove_from_calls(module, key)
        if mine and has_recipes(self.model):
            revert(self.model)


def _is_converted(module: nn.Module) -> bool:
    return isinstance(module, SwappedModule) or has_recipes(module)


def _wait_for_copies(module: nn.Module, args: Any, output: Any) -> None:
    """When a block ends, what it gave away has left the device: nothing of it is still on its way
    while others run, nor while backward does.
    """
    offload_stats(wait=True)


def _enter_own_functions(module: nn.Module, args: tuple[Any, ...]) -> None:
    """Of a block without recipes in a model that has them: PyTorch's functions are its own."""
    if not torch.compiler.is_compiling():
        _C.enter_context(module, _FUNCTIONS, functions_paused())


def _leave_own_functions(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    if not torch.compiler.is_compiling():
        _C.leave_call(module, _FUNCTIONS)


@dataclass(frozen=True)
class _EnterOffloading:
    """Of a block of whose activations a share waits elsewhere."""

    place: Place
    choice: Choice

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            _C.enter_context(module, _OFFLOAD, _offloading(self.place, self.choice))


def _leave_offloading(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    if not torch.compiler.is_compiling():
        _C.leave_call(module, _OFFLOAD)


@contextmanager
def _offloading(place: Place, choice: Choice) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(_offload_to(place, choice.offload))
        if choice.recipes:
            stack.enter_context(recipes())  # inside: recipes take theirs first
        yield


def _offload_to(place: Place, share: float) -> Any:
    if place in ("cpu", "disk"):
        return offload(place, fraction=share, min_bytes=MIN_BYTES, keep_last=0)
    return offload("disk", directory=place, fraction=share, min_bytes=MIN_BYTES, keep_last=0)
