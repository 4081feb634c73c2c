"""The set of regions whose predicted step is lowest, of those with the least sums (best.py), and
whether segments of it (neighbours.py) are lower still.

On 220 random trees of modules the set with the least sum was the best of all in 201; of the four
with the least sums one was in each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from memopt._checkpoint.assigned import put_regions, region_choices
from memopt._checkpoint.best import RegionSet
from memopt._checkpoint.other import without_own
from memopt.assignment import Assignment, Paths
from memopt.memory.calls.measure import predicted_tree
from memopt.memory.depth import Depth
from memopt.memory.parallel import is_sharded
from memopt.memory.step import Step

_MOST_SETS = 4
"""The number of sets that are predicted, at most."""
_CLOSE = 1.25
"""The share of the least sum up to which another set's may have the lower peak."""
_AS_LOW = 1.01
"""The share of the lowest peak up to which fewer bytes that are kept are worth more."""


def lowest_predicted(
    step: Step,
    sets: Sequence[RegionSet],
    limit: int | None,
    are_possible: Callable[[RegionSet], bool],
    depth: Depth,
) -> RegionSet:
    """The set whose step has the lowest peak, of several about as low the one that keeps least; the
    first where steps cannot be predicted.

    Args:
        sets: the best by sums first, whose modules can be regions.
        limit: the bytes that another may keep, if the first does not keep more.
        are_possible: whether the modules of another can be regions: asked last, since that runs the
            model.
    """
    first, *others = sets[:_MOST_SETS]
    most = max(limit, first.stays) if limit is not None else None
    close = [
        one
        for one in others
        if one.peak <= _CLOSE * first.peak and (most is None or one.stays <= most)
    ]
    if not close or is_sharded(step.model):
        return first
    try:
        peaks = {one.paths: _peak(step, one, depth) for one in (first, *close)}
    except Exception:  # a step that looks at values, for one
        return first
    bound = _AS_LOW * min(peaks.values())

    def rank(one: RegionSet) -> tuple[int, int]:
        peak = peaks[one.paths]
        return (0, one.stays) if peak <= bound else (peak, one.stays)

    ranked = sorted((first, *close), key=rank)
    return next(one for one in ranked if one is first or are_possible(one))


def are_lower(
    step: Step, regions: RegionSet, segments: Sequence[Paths], share: float, depth: Depth
) -> bool:
    """Whether the peak with segments is below a share of that without them; false where steps
    cannot be predicted.
    """
    if is_sharded(step.model):
        return False
    try:
        alone = _peak(step, regions, depth)
        return _peak(step, regions, depth, segments) < share * alone
    except Exception:  # a step that looks at values, for one
        return False


def _peak(step: Step, regions: RegionSet, depth: Depth, segments: Sequence[Paths] = ()) -> int:
    fates = Assignment(region_choices(regions.paths, segments))

    def put(model: nn.Module) -> None:
        without_own(model)
        put_regions(model, fates)

    return depth.run(lambda: predicted_tree(step, put), lambda tree: len(tree.calls)).peak
