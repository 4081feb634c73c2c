"""Looks at steps with choices mixed among alike blocks, until what each choice costs is known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from functools import partial

from memopt._plan.bytes import StageBytes, most_bytes
from memopt._plan.choices import CHOICES, IN_CHUNKS, WITH_PARTS
from memopt._plan.observe import Observed
from memopt._plan.parts import NO_PARTS, BlockParts
from memopt._plan.profile import (
    AFTER,
    BEFORE,
    WITH_HEAD,
    Profile,
    StepSeconds,
    check_same_calls,
)
from memopt.assignment import Assignment, Choice, Paths

Look = Callable[[Assignment], Observed]
"""A step with an assignment, predicted or watched."""


def profile_of(
    blocks: Sequence[str],
    look: Look,
    parts: Mapping[str, BlockParts] | None = None,
    heads: Sequence[str] = (),
    plain: Observed | None = None,
) -> tuple[Profile, list[tuple[Assignment, Observed]]]:
    """Return what blocks cost, with seconds that are estimates; and what was looked at, without the
    steps that have parts as regions.

    Calls of one site share the choices among them, so that one look may be enough for the choices
    of whole blocks, and one for those of parts. There are never more looks than choices, and one
    more that shows the head whole, where it runs in chunks in the others.

    Args:
        heads: linears that may run in chunks with their loss.
        plain: the step without a plan, where it is known.
    """
    in_chunks: dict[Paths, Choice] = {(path,): Choice(head=True) for path in heads}
    assignment = Assignment({path: CHOICES[n % len(CHOICES)] for n, path in enumerate(blocks)})
    samples, looks = [], []
    nbytes: dict[tuple[int, Choice], list[StageBytes]] = {}
    timed = 0
    while assignment.choices:
        assignment = Assignment({**assignment.choices, **in_chunks})
        looks.append(look(assignment))
        first = looks[0]
        assignment = assignment.without_regions(first.no_regions)
        samples.append(assignment)
        check_same_calls(first.paths, looks[-1].paths)
        for number, (path, site) in enumerate(zip(first.paths, first.sites, strict=True)):
            key = site, assignment.of(path)
            nbytes.setdefault(key, []).append(looks[-1].nbytes.stages[number + 1])
        assignment = Assignment({})
        if not timed:
            assignment = _next_sample(first, nbytes, lambda path: CHOICES)
            timed = 0 if assignment.choices else len(samples)
        if timed and parts:
            assignment = _next_sample(first, nbytes, partial(_with_parts, parts))
    ends = {
        name: (first.nbytes.stages[place], first.seconds[place])
        for name, place in ((BEFORE, 0), (AFTER, -1))
    }
    if heads:
        without = look(_without_heads(samples[0])) if plain is None else plain
        behind = without.nbytes.stages[-1]
        chunked = first.nbytes.stages[-1]
        if max(chunked.forward, chunked.backward) < max(behind.forward, behind.backward):
            ends[WITH_HEAD] = ends[AFTER]
        else:
            heads = ()
            samples = [_without_heads(sample) for sample in samples]
        ends[AFTER] = behind, without.seconds[-1]
    profile = Profile(
        paths=first.paths,
        kinds=first.kinds,
        sites=first.sites,
        base=first.nbytes.base,
        optimizer=max(one.nbytes.optimizer for one in looks),
        gradients=tuple(stage.gradients for stage in first.nbytes.stages),
        ends=ends,
        # Calls of one site differ a little by what shares memory with them.
        nbytes={key: replace(most_bytes(s), gradients=0) for key, s in nbytes.items()},
        seconds={},
        no_regions=first.no_regions,
        follows=first.follows,
        parts=dict(parts or {}),
        heads=tuple(heads),
        in_order=all(one.nbytes.in_order for one in looks),
    )
    profile.first = profile.base, {name: nbytes for name, (nbytes, _) in profile.ends.items()}
    estimates = [StepSeconds(s, one.seconds) for s, one in zip(samples, looks, strict=True)]
    profile.set_seconds(estimates, is_timed=False)
    return profile, list(zip(samples, looks, strict=True))[:timed]


def _without_heads(assignment: Assignment) -> Assignment:
    return Assignment({at: choice for at, choice in assignment.choices.items() if not choice.head})


def _with_parts(parts: Mapping[str, BlockParts], path: str) -> list[Choice]:
    """A block's choices with parts, each once."""
    mine = parts.get(path, NO_PARTS)
    named = [mine.of(choice) for choice in (*WITH_PARTS, *IN_CHUNKS)]
    return list(dict.fromkeys(choice for choice in named if choice.parts or choice.chunks))


def _next_sample(
    first: Observed,
    known: Container[tuple[int, Choice]],
    choices_of: Callable[[str], Sequence[Choice]],
) -> Assignment:
    """A choice for each block that some site of its calls has not had yet; empty if none is left.

    A block gets the choice, among those left to it, that the fewest blocks of its kind got, so that
    one step shows as many as possible. Every block gets one that is left to it, for all of its
    sites. So there are no more steps than choices.
    """
    sites: dict[str, set[int]] = {}
    for path, site in zip(first.paths, first.sites, strict=True):
        sites.setdefault(path, set()).add(site)
    left = {
        path: [
            choice
            for choice in choices_of(path)
            if not ((choice.checkpoint or choice.parts) and path in first.no_regions)
            and any((site, choice) not in known for site in mine)
        ]
        for path, mine in sites.items()
    }
    if not any(left.values()):
        return Assignment({})
    given: Counter[tuple[int, Choice]] = Counter()
    chosen: dict[str, Choice] = {}
    for path, mine in sites.items():
        # Sites begin with different ones, so that each step that is timed has all choices.
        every = choices_of(path) or CHOICES
        turn = min(mine) % len(every)
        options = left[path] or every
        place_of = {choice: place for place, choice in enumerate(every)}
        ordered = sorted(options, key=lambda c: (place_of[c] - turn) % len(every))
        chosen[path] = min(ordered, key=lambda c: max(given[site, c] for site in mine))
        given.update((site, chosen[path]) for site in mine)
    return Assignment(chosen).without_regions(first.no_regions)
