"""Puts an assignment on a model, and takes it off again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from memopt._call_hooks import put_around_calls, remove_from_calls
from memopt._checkpoint.assigned import PutRegion, PutSegments, below, put_regions, put_segments
from memopt._class_patch import restored_on_error
from memopt._convert import convert, revert
from memopt._convert.functions import functions_paused
from memopt._convert.head import make_lazy
from memopt._convert.recipes import is_converted
from memopt._extension import _C
from memopt._offload.api import MIN_BYTES, offload
from memopt._offload.stats import offload_stats
from memopt.assignment import Assignment, Choice, Paths
from memopt.place import Place
from memopt.recipes import recipes

# Names of hooks.
_OFFLOAD = "memopt.assignment: offload"
_FUNCTIONS = "memopt.assignment: functions"


@dataclass
class Applied:
    """Everything that an assignment has put on a model: this and nothing else is taken off."""

    model: nn.Module
    converted: list[nn.Module] = field(default_factory=list)
    regions: list[PutRegion | PutSegments] = field(default_factory=list)
    scopes: list[tuple[nn.Module, str]] = field(default_factory=list)
    handles: list[RemovableHandle] = field(default_factory=list)

    def undo(self) -> None:
        """Give the model back as it was. Regions that were made since, or got other settings, stay.

        Raises:
            ValueError: more of the model was converted since, which cannot be told from what the
                assignment converted. The model is as before then.
        """
        mine = set(self.converted)
        more = [m for m in self.model.modules() if is_converted(m) and m not in mine]
        if mine and more:
            raise ValueError(
                "undo: model must not be converted while a plan that converts is on it, got "
                f"{type(more[0]).__name__}, converted since; memopt.revert(model) and "
                "memopt.unwrap(model) take everything off, this plan too"
            )
        for handle in self.handles:
            handle.remove()
        for region in self.regions:
            region.take_off()
        for module, key in self.scopes:
            remove_from_calls(module, key)
        if any(is_converted(module) for module in mine.intersection(self.model.modules())):
            revert(self.model)


def assign(model: nn.Module, assignment: Assignment) -> Applied:
    """Put an assignment on a model, in place; `Applied.undo` takes it off. After an error the model
    is as before.

    Raises:
        ValueError: the model has no module at one of the paths.
        TypeError, ValueError, RuntimeError, OSError: as `convert`, `checkpoint_wrapper` and
            `offload`; or modules that share a region are no neighbours in an nn.Sequential.
    """
    _check_paths(model, assignment)
    put = Applied(model)
    with restored_on_error(model):
        own: Paths = ()
        if assignment.recipes:
            own = assignment.where(lambda choice: not choice.recipes and not choice.head)
            convert(model, skip=list(own) or None, head=False)
        heads = {model.get_submodule(path): path for path in assignment.heads}
        make_lazy(model, heads)
        put.converted = [m for m in model.modules() if is_converted(m)]
        for path in own:
            module = model.get_submodule(path)
            _put_scope(put, module, _FUNCTIONS, _enter_own_functions, _leave_functions)
        modules = dict(model.named_modules(remove_duplicate=False))
        put.regions += put_regions(model, assignment, or_whole=True)
        put.regions += put_segments(model, assignment)
        for at, choice in assignment.choices.items():
            if choice.offload and not choice.checkpoint and assignment.place is not None:
                enter = _EnterOffloading(assignment.place, choice)
                for path in at:
                    _put_scope(put, modules[path], _OFFLOAD, enter, _leave_offloading)
        if assignment.in_step:
            for path in assignment.where(lambda choice: bool(choice.offload)):
                put.handles.append(modules[path].register_forward_hook(_wait_for_copies))
    return put


def _check_paths(model: nn.Module, assignment: Assignment) -> None:
    there = {path for path, _ in model.named_modules(remove_duplicate=False)}
    named = (
        path
        for at, choice in assignment.choices.items()
        for path in below(at, ("", *choice.parts, *choice.in_chunks))
    )
    missing = [path for path in named if path not in there]
    if missing:
        raise ValueError(
            f"assign: paths must be those of the model's modules, got {missing[0]!r} for "
            f"{type(model).__name__}"
        )


@contextmanager
def assigned(model: nn.Module, assignment: Assignment) -> Iterator[None]:
    """While it is entered, a model has an assignment."""
    put = assign(model, assignment)
    try:
        yield
    finally:
        put.undo()


def _put_scope(put: Applied, module: nn.Module, key: str, enter: Any, leave: Any) -> None:
    put_around_calls(module, key, enter, leave)
    put.scopes.append((module, key))


def _wait_for_copies(module: nn.Module, args: Any, output: Any) -> None:
    """When a call ends, what it offloaded has left the device: nothing of it is still on its way
    while others run, nor while backward does.
    """
    offload_stats(wait=True)


def _enter_own_functions(module: nn.Module, args: tuple[Any, ...]) -> None:
    """Give a module without recipes, in a model that has them, PyTorch's own functions."""
    if not torch.compiler.is_compiling():
        _C.enter_context(module, _FUNCTIONS, functions_paused())


def _leave_functions(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    if not torch.compiler.is_compiling():
        _C.leave_call(module, _FUNCTIONS)


@dataclass(frozen=True)
class _EnterOffloading:
    """Begins a call of a module of whose activations a share waits elsewhere."""

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
        stack.enter_context(
            offload(place, fraction=choice.offload, min_bytes=MIN_BYTES, keep_last=0)
        )
        if choice.recipes:
            stack.enter_context(recipes())  # inside: recipes take theirs first
        yield
