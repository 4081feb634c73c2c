"""The modules of a model that can run in chunks of rows: MLPs, norms with their MLPs, heads."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from memopt._checkpoint.blocks import is_layer
from memopt._checkpoint.chunks import CallRows
from memopt._checkpoint.naming import by_reason
from memopt._checkpoint.other import without_own
from memopt._checkpoint.probe import run_without_gradients
from memopt._checkpoint.row_stand_ins import (
    Given,
    are_predicted,
    given_to_calls,
    row_modules_among,
)
from memopt._checkpoint.rows import why_not_rows
from memopt.memory.asked import has_values, target_of
from memopt.memory.calls.measure import call_tree
from memopt.memory.calls.record import CallRecorder
from memopt.memory.calls.tree import CallTree
from memopt.memory.ledger import Ledger
from memopt.memory.messages import noted_errors
from memopt.memory.parallel import is_sharded
from memopt.memory.paths import is_inside, paths_around
from memopt.memory.predicted.predict import hollow_step
from memopt.memory.step import Step
from memopt.memory.unchanged import unchanged


@dataclass(frozen=True)
class RowModules:
    """Modules that work on each row alone, by path."""

    paths: tuple[str, ...]
    note: str = ""
    """The reason, where there are none."""


def row_modules(step: Step, regions: Collection[str] = ()) -> RowModules:
    """The outermost modules that work on each row alone and keep tensors of their own.

    The tree of calls of a step says what each call keeps; a forward with the batch shows each
    module's arguments to the probe (rows.py).

    Args:
        regions: paths of modules that are regions of their own. No module around one is taken.

    Raises:
        Whatever the model raises with the batch: its own error, with a note.
    """
    model = step.model
    if not has_values(model, step.batch) or is_sharded(model):
        return RowModules((), "nothing runs in chunks, since the model has no whole values")
    tree = call_tree(step, without_own)
    around = {outer for path in regions for outer in paths_around(path)}
    modules = dict(model.named_modules())
    candidates = [path for path in _candidates(tree, modules) if path not in around]
    reasons = _probed(step, candidates)
    paths = tuple(path for path in candidates if reasons.get(path) == "")
    note = "" if paths else "nothing runs in chunks, since no module works on each row alone"
    return RowModules(paths, note)


def predicted_row_modules(step: Step) -> tuple[str, ...]:
    """`row_modules` of a step that is predicted, whose model may be without values.

    Raises:
        Whatever keeps it from being predicted: DependsOnValues, or the step's own error.
    """
    if not are_predicted(step.batch):
        return ()
    given: list[dict[str, Given]] = []
    trees: list[CallRecorder] = []

    @contextmanager
    def watch(model: nn.Module, ledger: Ledger) -> Iterator[None]:
        trees.append(CallRecorder(model, ledger))
        with given_to_calls(model) as mine, trees[0]:
            given.append(mine)
            yield

    hollow_step(step.alone(), without_own, target_of(step.who, step.model, None), watch)
    modules = dict(step.model.named_modules())
    candidates = {path: modules[path] for path in _candidates(trees[0].tree(), modules)}
    return row_modules_among(step.who, candidates, given[0], step.autocast)


def _candidates(tree: CallTree, modules: Mapping[str, nn.Module]) -> dict[str, None]:
    """Paths of calls that keep more inside than a share of what they return."""
    return dict.fromkeys(
        each.path
        for each in tree.calls
        if each.path
        and each.path in modules
        and each.with_gradients
        and each.keeps_inside
        and not is_layer(modules[each.path])
    )


def checked_rows(step: Step, paths: Iterable[str]) -> dict[str, str]:
    """The reasons of a user's modules, by path, that do not work on each row alone."""
    if not has_values(step.model, step.batch) or is_sharded(step.model):
        return {}
    return {path: reason for path, reason in _probed(step, paths).items() if reason}


def not_in_chunks(reasons: dict[str, str]) -> str:
    """The message about modules that a user chose and that do not run in chunks."""
    return f"not in chunks, since these do not work on each row alone: {by_reason(reasons)}"


def _probed(step: Step, paths: Iterable[str]) -> dict[str, str]:
    """The reasons of all that are called and are inside none that works on rows; empty: it does."""
    reasons: dict[str, str] = {}
    probing: list[str] = []

    def probe(path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        taken = any(is_inside(path, other) for other, why in reasons.items() if not why)
        if taken or reasons.get(path) or probing:  # a probe around calls it with rows of its own
            return
        try:
            rows = CallRows(step.who, args, kwargs)
        except ValueError:
            rows = None
        if rows is None or not rows.first.is_floating_point():
            reasons[path] = "it gets no rows of numbers"
        else:
            probing.append(path)
            reasons[path] = why_not_rows(module.forward, rows, [module])
            probing.clear()

    modules = dict(step.model.named_modules())
    with ExitStack() as stack:
        stack.enter_context(noted_errors(step.who, step.model))
        stack.enter_context(unchanged(*step.roots))
        for path in paths:
            module = modules[path]
            hook = module.register_forward_pre_hook(partial(probe, path), with_kwargs=True)
            stack.callback(hook.remove)
        run_without_gradients(step)
    return reasons
