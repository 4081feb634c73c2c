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
from memopt.memory.calls.tree import CallTree
from memopt.memory.parallel import is_sharded
from memopt.memory.predicted.predict import Changes
from memopt.memory.step import Step

TreeAfter = Callable[[Changes], CallTree]
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
    look: TreeAfter,
) -> RegionSet:
    """The set whose step has the lowest peak, of several about as low the one that keeps least; the
    first where steps cannot be predicted.

    Args:
        sets: the best by sums first, whose modules can be regions.
        limit: the bytes that another may keep, if the first does not keep more.
        are_possible: whether the modules of another can be regions: asked last, since that runs the
            model.
        look: the calls of a predicted step after changes to the model.
    """
    first, *others = sets[:_MOST_SETS]
    most = max(limit, first.stays) if limit is not None else None
    close = [
        one
        for one in others
        if one.peak <= _CLOSE * first.peak and (most is None or one.stays <= most)
    ]
    tried = (first, *close)
    peaks = _peaks(step, [(one, ()) for one in tried], look) if close else None
    if peaks is None:
        return first
    bound = _AS_LOW * min(peaks)
    rank = {
        one.paths: (0 if peak <= bound else peak, one.stays)
        for one, peak in zip(tried, peaks, strict=True)
    }
    ranked = sorted(tried, key=lambda one: rank[one.paths])
    return next(one for one in ranked if one is first or are_possible(one))


def are_lower(
    step: Step, regions: RegionSet, segments: Sequence[Paths], share: float, look: TreeAfter
) -> bool:
    """Whether the peak with segments is below a share of that without them; false where steps
    cannot be predicted.
    """
    peaks = _peaks(step, [(regions, ()), (regions, segments)], look)
    return peaks is not None and peaks[1] < share * peaks[0]


def _peaks(
    step: Step, ways: Sequence[tuple[RegionSet, Sequence[Paths]]], look: TreeAfter
) -> list[int] | None:
    """The peak with each set of regions and its segments; None where steps cannot be predicted."""

    def peak_of(regions: RegionSet, segments: Sequence[Paths]) -> int:
        fates = Assignment(region_choices(regions.paths, segments))

        def put(model: nn.Module) -> None:
            without_own(model)
            put_regions(model, fates)

        return look(put).peak

    if is_sharded(step.model):
        return None
    try:
        return [peak_of(*way) for way in ways]
    except Exception:  # a step that looks at values, for one
        return None
