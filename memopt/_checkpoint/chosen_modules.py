"""The submodules that a caller means: by a function or a class, by what a batch keeps, or as the
structure of the model shows them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memopt._checkpoint.blocks import find_blocks
from memopt._checkpoint.measured import checked_regions, measured_regions
from memopt._checkpoint.naming import joined
from memopt._checkpoint.probe import left_out
from memopt._checkpoint.row_modules import checked_rows, not_in_chunks, row_modules
from memopt._checkpoint.wrapper import has_forward
from memopt.assignment import Paths
from memopt.memory.step import Step

NamedModules = list[tuple[str, nn.Module]]

Predicate = Callable[[nn.Module], bool]
Modules = Predicate | type[nn.Module] | Sequence[type[nn.Module]]
"""The ways in which a caller says which submodules are meant."""


def modules_in_chunks(
    step: Step, chunks: int, regions: Sequence[str], predicate: Predicate | None
) -> tuple[dict[str, int], list[str]]:
    """The modules that run in chunks of rows, by path, and notes for the user.

    Args:
        step: without a batch it shows at a module's first call whether it works on each row alone.
        regions: paths of the modules that were chosen.
        predicate: what chose them. Then they are meant themselves; else the modules of the model
            that work on each row alone are.
    """
    if predicate is None:
        found = row_modules(step, regions)
        return dict.fromkeys(found.paths, chunks), [found.note] if found.note else []
    reasons = {} if step.batch is None else checked_rows(step, regions)
    paths = [path for path in regions if path not in reasons]
    return dict.fromkeys(paths, chunks), [not_in_chunks(reasons)] if reasons else []


def as_predicate(argument: str, choice: Modules | None) -> Predicate | None:
    """`choice` as a function of a module; `argument` is what an error message calls it."""
    if choice is None:
        return None
    if isinstance(choice, type) or not callable(choice):
        classes: Any = tuple(choice) if isinstance(choice, (list, tuple, set)) else (choice,)
        if classes and all(isinstance(c, type) and issubclass(c, nn.Module) for c in classes):
            return lambda module: isinstance(module, classes)
        raise TypeError(
            f"{argument} must be a function of a module, a subclass of nn.Module, or a "
            f"sequence of such classes, got {choice!r}"
        )
    return choice


@dataclass(frozen=True)
class FoundModules:
    """Modules that are to be regions, and what a user should know about the choice."""

    modules: NamedModules
    warnings: tuple[str, ...] = ()
    """Notes on modules that are no regions though they were asked for, or would be chosen."""
    notes: tuple[str, ...] = ()
    deciding: frozenset[str] = frozenset()
    """Paths of those that choose by values, and keep what they chose."""
    segments: tuple[Paths, ...] = ()
    """Paths that are called one after another and share a region."""


def choose_modules(step: Step, predicate: Predicate | None) -> FoundModules:
    """The candidates, and what a user should know about the choice.

    Args:
        step: without a batch the model's structure alone is looked at.

    Raises:
        TypeError, ValueError: there are none.
        Whatever the model raises with the batch: its own error, with a note.
    """
    model = step.model
    if predicate is not None:
        modules = _chosen_by(predicate, model)
        if step.batch is None:
            return FoundModules(modules)
        reasons, notes, deciding = checked_regions(step, dict(modules))
        modules = [(path, module) for path, module in modules if path not in reasons]
        return FoundModules(modules, (*_left_out(reasons), *notes), deciding=deciding)
    if step.batch is not None:
        measured = measured_regions(step)
        left = _left_out(measured.reasons)
        if note := measured.drop_little(model):
            return FoundModules([], left, (*measured.notes, note))
        regions = {model.get_submodule(path) for path in measured.paths}
        modules = _submodules(model, regions.__contains__)
        notes = (*measured.notes, *map(_in_one, measured.segments))
        return FoundModules(modules, left, notes, measured.deciding, measured.segments)
    blocks = find_blocks(model)
    if not blocks:
        raise ValueError(
            f"{step.who}: without check_fn, model must have an nn.ModuleList, nn.Sequential or "
            "nn.ModuleDict whose elements are of the same class, or such children, and more than a "
            f"single layer, got {type(model).__name__} without; check_fn (in convert: checkpoint) "
            "chooses modules, and with a batch they are chosen by what a step keeps"
        )
    modules = _submodules(model, blocks.__contains__)
    return FoundModules(modules, notes=(BY_STRUCTURE,))


BY_STRUCTURE = (
    "the regions were chosen by how the model is written; a batch finds more, since with one they "
    "are chosen by what a step keeps"
)


def _in_one(segment: Paths) -> str:
    return f"one region of {len(segment)} modules, called in turn: {joined(segment)}"


def _left_out(reasons: dict[str, str]) -> tuple[str, ...]:
    return (left_out(reasons),) if reasons else ()


def _chosen_by(predicate: Predicate, model: nn.Module) -> NamedModules:
    chosen = _submodules(model, predicate)
    candidates = [  # TorchScript's that were asked for are refused where they are wrapped
        (name, module)
        for name, module in chosen
        if has_forward(module) or isinstance(module, torch.jit.ScriptModule)
    ]
    if chosen and not candidates:
        name, module = chosen[0]
        raise TypeError(
            "apply_activation_checkpointing: check_fn (in convert: checkpoint) must choose modules "
            f"that have a forward, got {type(module).__name__} at {name!r}, which is never called "
            "itself"
        )
    return candidates


def _submodules(model: nn.Module, predicate: Predicate) -> NamedModules:
    return [(name, m) for name, m in model.named_modules() if m is not model and predicate(m)]
