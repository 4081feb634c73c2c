"""Consecutive calls of blocks that share one region, as stages of their own.

A group holds its first call's arguments, which count where they were made. In backward all its
calls run again, each with what it does inside (choices.py): it keeps all that autograd saves, or is
a region that runs a third time. So with L calls in groups of g, each a region inside, about
L / g + g inputs are held at once, in place of L.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from memopt._plan.bytes import StageBytes
from memopt._plan.choices import inside
from memopt._plan.parts import NO_PARTS
from memopt._plan.profile import Profile
from memopt._plan.solver import Option
from memopt.assignment import Choice


def lengths_of(profile: Profile) -> list[int]:
    """The lengths that are tried: two, and about the root of the longest run of calls that can
    share a region, which is where the fewest inputs are held.
    """
    longest = max((len(run) for run in runs_of(profile)), default=0)
    root = math.isqrt(longest)
    return [length for length in sorted({2, root, 2 * root}) if 2 <= length <= longest]


def runs_of(profile: Profile) -> Iterator[list[int]]:
    """Runs of calls each of which gets what the one before returned, without anything between."""
    run: list[int] = []
    often = Counter(profile.paths)
    follows = profile.follows or (False,) * len(profile.paths)
    for number, path in enumerate(profile.paths):
        may_share = path not in profile.no_regions and often[path] == 1
        if run and not (may_share and follows[number]):
            yield run
            run = []
        if may_share:
            run.append(number)
    if run:
        yield run


def groups_of(profile: Profile, length: int) -> tuple[int, ...]:
    """The calls in groups of this length where calls can share a region, else alone."""
    together = dict.fromkeys(range(len(profile.paths)), 1)
    for run in runs_of(profile):
        for first in range(0, len(run), length):
            mine = run[first : first + length]
            together[mine[0]] = len(mine)
            for other in mine[1:]:
                del together[other]
    return tuple(together[first] for first in sorted(together))


def may_share(profile: Profile, first: int, length: int, choice: Choice) -> bool:
    """Whether calls can have one choice: parts that it makes regions must be parts of all."""
    paths = profile.paths[first : first + length]
    return len({profile.parts.get(path, NO_PARTS).of(choice) for path in paths}) == 1


def group_option(
    profile: Profile, first: int, length: int, choice: Choice, *, with_recipes: bool
) -> Option:
    """The cost of calls that share a region."""
    calls = range(first, first + length)
    plain, regions, own = (
        [profile.option(number, one, with_recipes=with_recipes) for number in calls]
        for one in (
            Choice(choice.recipes),
            choice.without_parts(),
            inside(choice),
        )
    )
    again = [r.backward_seconds - p.backward_seconds for r, p in zip(regions, plain, strict=True)]
    begin = regions[0]
    stays = replace(profile.allowed(profile.paths[first], choice), offload=0.0)
    exact = profile.exact_groups.get((first, length, stays))
    if exact is None:
        # What a region holds behind itself is what it returned; the next call's goes then.
        returned = [0, *(one.resident + one.offloaded for one in regions)]
        exact = StageBytes(
            resident=returned[-1],
            forward=max(b + one.forward for b, one in zip(returned, regions, strict=False)),
            backward=_one_after_another(profile, first, own, [one.backward for one in own]),
            gradients=0,
        )
    # Less than nothing where the calls end more than they keep: a cache that was there before.
    resident = max(0, exact.resident)
    away = min(begin.offloaded, resident)
    return Option(
        resident - away,
        exact.forward,
        exact.backward,
        sum(one.forward_seconds for one in plain),
        sum(max(0.0, a) + one.backward_seconds for a, one in zip(again, own, strict=True)),
        away,
    )


def apart_option(
    profile: Profile, first: int, length: int, choice: Choice, *, with_recipes: bool
) -> Option:
    """The cost of calls with one choice, each for itself, as one stage."""
    mine = [
        profile.option(number, choice, with_recipes=with_recipes)
        for number in range(first, first + length)
    ]
    if length == 1:
        return mine[0]
    return Option(
        sum(one.resident for one in mine),
        max(_held_before(mine, place) + one.forward for place, one in enumerate(mine)),
        _one_after_another(profile, first, mine, [one.backward for one in mine]),
        sum(one.forward_seconds for one in mine),
        sum(one.backward_seconds for one in mine),
        sum(one.offloaded for one in mine),
    )


def _held_before(options: Sequence[Option], place: int) -> int:
    return sum(one.resident for one in options[:place])


def _one_after_another(
    profile: Profile, first: int, options: Sequence[Option], backward: Sequence[int]
) -> int:
    """The most in the backward of calls, above what is there before the last one's gradients."""
    there = profile.gradients[first + 1 : first + len(options) + 1]
    return max(
        0,
        *(
            _held_before(options, place) + most + there[place] - there[-1]
            for place, most in enumerate(backward)
        ),
    )
