"""The blocks of a model where the caller names none: by its structure, and by what a step holds.

Structure shows units that people know, many of them alike: few predicted steps say what all cost.
The tree of calls shows what is outside of these (stems, embeddings, heads), and where one region
around several of them takes less than each alone (the branches of an Inception block). Modules
inside of blocks are no blocks: a plan finds parts by itself. Where the sums of best.py say that the
tree's would have a lower peak, both are predicted with everything recomputed, and the lower one is
taken: two steps for each of at most three ways.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from torch import nn

from memopt._checkpoint.best import cut_of
from memopt._checkpoint.blocks import find_blocks
from memopt._checkpoint.measured import likely_regions, measured_regions
from memopt._checkpoint.probe import cannot_run_again
from memopt._plan import ranks
from memopt._plan.choices import LEAST
from memopt._plan.observe import predicted
from memopt._plan.parts import NO_PARTS, block_parts
from memopt.assignment import Assignment
from memopt.memory.calls.measure import call_tree, without_optimizer
from memopt.memory.calls.tree import CallTree
from memopt.memory.parallel import is_sharded
from memopt.memory.paths import is_inside, outermost_paths, overlap
from memopt.memory.predicted.outcome import DependsOnValues
from memopt.memory.predicted.predict import Looks, check_shapes
from memopt.memory.speed import speed_of
from memopt.memory.step import Step

_WORTH_MORE_KINDS = 0.03
"""The share of the floor that other blocks than structure's have to give: each kind of them wants
predicted steps, and timed ones, of its own.
"""


def found_blocks(step: Step, target: str, runs: bool) -> tuple[str, ...]:
    """The paths of the blocks, none inside another. Empty where the model calls no module.

    Args:
        target: the device that is predicted for.
        runs: whether the model and the batch have values.

    Raises:
        Whatever the model raises with the batch: its own error, with a note.
    """
    model = step.model
    modules = find_blocks(model)
    shown = [path for path, module in model.named_modules() if module in modules]
    if is_sharded(model) and shown:
        return tuple(shown)
    one = replace(step, batch=step.batches()[0], micro_batches=1)
    tree = call_tree(one, None)
    called = tree.with_gradients
    running = [path for path in shown if path in called]
    if not running:  # or without gradients: in checkpointing of the model's own, which plans refuse
        found = measured_regions(without_optimizer(step), by_processor=True).paths
        return found or tuple(shown) or _outermost(model, called)
    regions = likely_regions(tree)
    ways = [running, _beside(running, regions), _around(running, regions)]
    chosen = _least(one, tree, ways, target, runs)
    idle = [path for path in shown if not any(overlap(path, other) for other in chosen)]
    return tuple(path for path, _ in model.named_modules() if path in chosen or path in idle)


def _outermost(model: nn.Module, called: Collection[str]) -> tuple[str, ...]:
    """The modules that the model itself calls, where no region of any would lower the peak: recipes
    may.
    """
    inside = [path for path, _ in model.named_modules() if path and path in called]
    return tuple(outermost_paths(inside))


def _beside(shown: Sequence[str], regions: Sequence[str]) -> list[str]:
    """Structure's blocks, and the regions outside of them."""
    return [*shown, *(p for p in regions if not any(overlap(p, block) for block in shown))]


def _around(shown: Sequence[str], regions: Sequence[str]) -> list[str]:
    """The regions, but structure's blocks where these are around them or no region is near."""
    wide = [path for path in regions if not any(is_inside(path, block) for block in shown)]
    return [*wide, *(p for p in shown if not any(overlap(p, other) for other in wide))]


def cannot_be_regions(step: Step, paths: Iterable[str]) -> dict[str, str]:
    """Finds those of the modules, by path, that cannot be recomputed as they ran, and why, on any
    rank. None where parameters are gathered for each call.
    """
    modules = dict(step.model.named_modules())
    wanted = {path: modules[path] for path in paths}
    if not wanted or is_sharded(step.model):
        return {}
    check_shapes(step)
    return ranks.joined_ranks(cannot_run_again(step, wanted))


def _least(
    step: Step, tree: CallTree, ways: Sequence[Sequence[str]], target: str, runs: bool
) -> Sequence[str]:
    """The first of the ways whose peak no later one lowers by much."""
    best, *others = ways
    enough = (1 - _WORTH_MORE_KINDS) * cut_of(tree, best).peak
    others = [way for way in others if cut_of(tree, way).peak < enough]
    if not others:
        return best
    blocks = list(dict.fromkeys(path for way in (best, *others) for path in way))
    inside = _inside(step, tree, blocks, target, ())
    wanted = [*blocks, *(f"{path}.{part}" for path, those in inside.items() for part in those)]
    bad = cannot_be_regions(step, wanted) if runs else {}
    looks = Looks()
    least = _peak(step, tree, best, target, bad, looks)
    for way in others:
        peak = _peak(step, tree, way, target, bad, looks)
        if peak < (1 - _WORTH_MORE_KINDS) * least:
            best, least = way, peak
    return best


def _inside(
    step: Step, tree: CallTree, blocks: Sequence[str], target: str, bad: Collection[str]
) -> dict[str, tuple[str, ...]]:
    """The parts of blocks that would be regions inside of theirs."""
    parts = block_parts(tree, speed_of(step, target), blocks, set(tree.again).union(bad))
    return {path: parts.get(path, NO_PARTS).inside for path in blocks}


def _peak(
    step: Step,
    tree: CallTree,
    blocks: Sequence[str],
    target: str,
    bad: Collection[str],
    looks: Looks,
) -> int:
    """The least peak with all blocks as regions, with parts of them inside or without.

    Args:
        bad: paths of modules that cannot be regions; `looks`: the others at this step.
    """
    inside = _inside(step, tree, blocks, target, bad).items()
    ways = [
        Assignment(choices).without_regions(bad)
        for choices in (
            dict.fromkeys(blocks, LEAST),
            {path: replace(LEAST, parts=parts) for path, parts in inside},
        )
    ]
    try:
        return min(predicted(step, way, blocks, target, looks).nbytes.above for way in ways)
    except DependsOnValues:
        return cut_of(tree, blocks).peak
