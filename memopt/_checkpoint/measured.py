"""The regions of a model, by what a forward and backward with a batch keeps."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import nn

from memopt._checkpoint.best import RegionSet, best_cut, best_cuts
from memopt._checkpoint.naming import joined
from memopt._checkpoint.neighbours import WORTH_JOINING, best_segments
from memopt._checkpoint.other import (
    checkpoints_itself,
    has_own,
    layers_that_checkpoint,
    with_own,
    without_own,
)
from memopt._checkpoint.predicted_best import are_lower, lowest_predicted
from memopt._checkpoint.probe import IN_OTHER_CHECKPOINTING, cannot_run_again
from memopt._checkpoint.wrapper import has_forward
from memopt.assignment import Paths
from memopt.memory.asked import has_values
from memopt.memory.calls.measure import call_tree, predicted_tree
from memopt.memory.calls.tree import CallTree
from memopt.memory.depth import Depth
from memopt.memory.messages import noted_errors
from memopt.memory.parallel import is_sharded
from memopt.memory.paths import outermost_paths, overlap, paths_around
from memopt.memory.predicted.predict import Changes, check_shapes
from memopt.memory.step import Step

_MUCH = 0.8
"""The share of the bytes kept without regions above which a note says what stays."""
_WORTH_A_FORWARD = 0.02
"""The share of what a step takes, beyond the gradients of parameters, that regions have to drop."""
_MOST_ROUNDS = 24
"""The number of times that modules are chosen again, when some chosen ones cannot be regions."""


@dataclass(frozen=True)
class MeasuredRegions:
    """The modules that are to be regions, and why others are none."""

    cut: RegionSet
    tree: CallTree
    reasons: dict[str, str]
    """The paths of modules that would be among them, and why they cannot."""
    notes: tuple[str, ...]
    """Notes on the outermost modules that keep nothing."""
    deciding: frozenset[str]
    """Paths of regions that choose by values, and have to keep what they chose."""
    segments: tuple[Paths, ...] = ()
    """Paths that are called one after another and share a region."""

    @property
    def paths(self) -> tuple[str, ...]:
        return self.cut.paths

    def drop_little(self, model: nn.Module) -> str:
        """A note where the regions would drop next to nothing of what a step takes, as where what
        it takes is in the backward of functions that recompute by themselves. Else empty.
        """
        gradients = sum(p.nbytes for p in model.parameters() if p.requires_grad)
        taken, dropped = self.tree.peak - gradients, self.tree.kept_bytes - self.cut.stays
        if not self.paths or dropped >= _WORTH_A_FORWARD * taken:
            return ""
        return (
            f"no regions: around {joined(self.paths)} they would drop {dropped:,} of {taken:,} "
            "bytes that a step takes beyond the gradients of parameters, for a second forward"
        )


def measured_regions(step: Step, by_processor: bool = False) -> MeasuredRegions:
    """The modules whose regions give a step's forward and backward the least peak, none inside
    another.

    A step is predicted, or runs where it cannot be; then the model runs forward to see which of the
    modules can be recomputed. Where the model has gradient checkpointing of its own, modules are
    chosen that keep no more than that, if there are such.

    Args:
        by_processor: count scratch whose size is the processor's choice, for a budget that has to
            hold. Else each machine has the same regions, and no bound that is above all else
            makes sets alike that are not.

    Raises:
        Whatever the model raises with the batch: its own error, with a note.
    """
    model, depth = step.model, Depth()
    tree = call_tree(step, without_own, depth, by_processor)
    limit = kept_by_its_own(step, depth)
    modules = dict(model.named_modules())
    layers = layers_that_checkpoint(model)
    inside = {m for layer in layers for m in layer.modules() if m is not layer}
    banned = {path for path, module in modules.items() if module in inside}
    # Around a layer that goes on to checkpoint itself, backward would run it again twice.
    checkpointing = [path for path, module in modules.items() if module in layers]
    banned.update(*map(paths_around, checkpointing))
    reasons: dict[str, str] = {}
    deciding: set[str] = set()
    known: set[str] = set()

    def look(changes: Changes) -> CallTree:
        return depth.run(
            lambda: predicted_tree(step, changes, by_processor), lambda found: len(found.calls)
        )

    def bad(cut: RegionSet) -> dict[str, str]:
        new = {path: why for path in cut.paths if (why := _why_not(tree, path))}
        fresh = [path for path in cut.paths if path not in known and path not in new]
        known.update(fresh)
        return new | _probed(step, {path: modules[path] for path in fresh}, deciding)

    for _ in range(_MOST_ROUNDS):
        cuts = best_cuts(tree, banned, limit)
        cut = cuts[0]
        new = bad(cut)
        if not new:
            cut = lowest_predicted(step, cuts, limit, lambda other: not bad(other), look)
            break
        reasons |= new
        banned |= new.keys()
    else:
        possible = tuple(path for path in cut.paths if path not in reasons)
        cut = RegionSet(possible, cut.stays, cut.working)
    segments, with_segments = best_segments(tree, cut, deciding)
    if segments and not layers and are_lower(step, cut, segments, WORTH_JOINING, look):
        cut = with_segments
    else:
        segments = ()
    own = [path for path in outermost_paths(tree.again) if paths_around(path).isdisjoint(cut.paths)]
    reasons |= dict.fromkeys(own, IN_OTHER_CHECKPOINTING)
    told = (
        ("no regions, since they run without gradients", without_gradients(tree)),
        ("no regions, since the batch never calls them", _never_called(tree, modules)),
    )
    notes = tuple(f"{what}: {joined(paths)}" for what, paths in told if paths)
    told_of = (*notes, *_why_so_much(tree, cut))
    return MeasuredRegions(cut, tree, reasons, told_of, frozenset(deciding), segments)


def likely_regions(tree: CallTree) -> tuple[str, ...]:
    """The modules whose regions give the least peak by the tree alone: nothing runs to see which
    can be recomputed. None of those that the model's own checkpointing recomputes, or is around.
    """
    called = {call.path for call in tree.calls}
    banned = {path for path in called if any(overlap(path, other) for other in tree.again)}
    for _ in range(_MOST_ROUNDS):
        cut = best_cut(tree, banned)
        new = {path for path in cut.paths if _why_not(tree, path)}
        if not new:
            return cut.paths
        banned |= new
    return tuple(path for path in cut.paths if path not in new)


def _why_so_much(tree: CallTree, cut: RegionSet) -> tuple[str, ...]:
    """A note on the tensors that stay, where regions drop little."""
    if cut.stays <= _MUCH * tree.kept_bytes:
        return ()
    inside: Counter[str] = Counter()
    for storage in tree.storages:
        path = tree.calls[storage.home].path
        if storage.savers and paths_around(path).union((path,)).isdisjoint(cut.paths):
            inside[path] += storage.nbytes
    path, nbytes = inside.most_common(1)[0]
    where = f"in {path!r}" if path else "in the model itself"
    return (
        f"regions drop little: of {tree.kept_bytes:,} bytes kept, {nbytes:,} are made {where} or "
        "passed on between modules that it calls one by one, and a region around all of it would "
        "raise the peak",
    )


def checked_regions(
    step: Step, modules: Mapping[str, nn.Module]
) -> tuple[dict[str, str], tuple[str, ...], frozenset[str]]:
    """Checks the modules that a user chose, by path: those that cannot be regions, and why; notes
    on the others; and those that choose by values.

    Raises:
        Whatever the model raises with the batch: its own error, with a note.
    """
    idle = idle_modules(step, modules)
    deciding: set[str] = set()
    reasons = _probed(step, modules, deciding)
    left = [path for path in modules if path not in reasons]
    told: defaultdict[str, list[str]] = defaultdict(list)
    for path in left:
        if path in idle:
            told[f"regions that change nothing, around modules that the batch {idle[path]}"].append(
                path
            )
        if not paths_around(path).isdisjoint(left):
            told["regions inside others, which backward runs again twice"].append(path)
    notes = tuple(f"{what}: {joined(paths)}" for what, paths in told.items())
    return reasons, notes, frozenset(deciding)


def idle_modules(step: Step, paths: Iterable[str]) -> dict[str, str]:
    """Modules, by path, that a step never calls with gradients, and what its batch does."""
    tree = call_tree(step, without_own)
    called = {call.path for call in tree.calls}
    with_gradients = tree.with_gradients
    return {
        path: "calls without gradients alone" if path in called else "never calls"
        for path in paths
        if path not in with_gradients
    }


def _probed(step: Step, modules: Mapping[str, nn.Module], deciding: set[str]) -> dict[str, str]:
    """The modules that cannot be recomputed as they ran. Without values nothing is known.

    Args:
        deciding: gets the paths of those that choose by values.
    """
    model = step.model
    if not modules or not has_values(model, step.batch) or is_sharded(model):
        return {}
    check_shapes(step)
    with noted_errors(step.who, model):
        return cannot_run_again(step, modules, deciding)


def without_gradients(tree: CallTree) -> list[str]:
    """The outermost modules whose calls all run without gradients, and that call others."""
    with_gradients = tree.with_gradients
    around = {tree.calls[call.parent].path for call in tree.calls if call.parent >= 0}
    return list(
        dict.fromkeys(
            call.path
            for call in tree.calls
            if call.path not in with_gradients
            and call.path in around
            and tree.calls[call.parent].path in with_gradients
        )
    )


def _never_called(tree: CallTree, modules: Mapping[str, nn.Module]) -> list[str]:
    """The outermost modules that have parameters and a forward, and are not called, nor is anything
    in them.
    """
    called = {call.path for call in tree.calls}
    called = called.union(*map(paths_around, called))
    found: list[str] = []
    for path, module in modules.items():
        has_parameters = next(module.parameters(), None) is not None
        if path not in called and has_parameters and has_forward(module):
            found.append(path)
    return outermost_paths(found)


def _why_not(tree: CallTree, path: str) -> str:
    calls = [tree.calls[number] for number in tree.calls_of(path)]
    if any(call.writes_inputs for call in calls):
        return "it writes to its arguments in place"
    if any(call.inputs_written for call in calls):
        return "an argument is written in place after it"
    if any(call.returns_view for call in calls):
        return "it returns a view of an argument"
    return ""


def kept_by_its_own(step: Step, depth: Depth) -> int | None:
    """Bytes that the model keeps with gradient checkpointing of its own, with the arguments that
    are held for the recompute; None where it has none.
    """
    if not has_own(step.model):
        return None
    try:
        tree = call_tree(step, with_own, depth)
    except Exception:  # it cannot be turned on here, and so is no alternative
        return None
    return tree.kept_bytes + _held_for_recompute(step.model, tree)


def _held_for_recompute(model: nn.Module, tree: CallTree) -> int:
    """Bytes of arguments that checkpoints of others hold and that no operator keeps: tables of
    rotary embeddings, for one.
    """
    modules = dict(model.named_modules())
    held: set[int] = set()
    for path in outermost_paths(tree.again):
        around = sorted(paths_around(path), key=len, reverse=True)
        region = next((layer for layer in around if checkpoints_itself(modules[layer])), path)
        for number in tree.calls_of(region):
            held.update(tree.calls[number].inputs)
    return sum(tree.storages[n].nbytes for n in held if not tree.storages[n].savers)
