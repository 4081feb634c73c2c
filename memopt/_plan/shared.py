"""Blocks that are called several times in a forward: one choice for all calls of each.

The dynamic programme chooses for stages, and a call is a stage. So the choices of such blocks are
fixed before it runs: all combinations are tried where there are few. Where there are many (both
branches of a siamese network run every block) a search changes one block at a time, from some
combinations where all have the same, until no change is better.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product

from memopt._plan.profile import Profile
from memopt._plan.solver import Problem, Timeline, evaluator, worth
from memopt.assignment import Choice

_MOST_COMBINATIONS = 256
_STARTS = 3
_MOST_ROUNDS = 8

Fixed = Mapping[str, Choice]
Solve = Callable[[Fixed], Timeline]
"""The best plan with these choices of shared blocks, its numbers those of choices."""


def shared_blocks(profile: Profile) -> list[str]:
    return [path for path, calls in Counter(profile.paths).items() if calls > 1]


def fixed_choices(
    profile: Profile, whole: Problem, choices: Sequence[Choice], budget: int, solve: Solve
) -> Iterator[Fixed]:
    """The combinations of choices of shared blocks that are worth solving with.

    Args:
        whole: the problem in which every stage has all of `choices`.
    """
    shared = shared_blocks(profile)
    if len(choices) ** len(shared) <= _MOST_COMBINATIONS:
        for combination in product(choices, repeat=len(shared)):
            yield dict(zip(shared, combination, strict=True))
        return
    solved = [(solve(dict.fromkeys(shared, choice)), choice) for choice in choices]
    starts = sorted(solved, key=lambda pair: worth(pair[0], budget))[:_STARTS]
    starts += [min(solved, key=lambda p: p[0].peak), min(solved, key=lambda p: p[0].seconds)]
    evaluate = evaluator(whole)
    for start, _ in {choice: (plan, choice) for plan, choice in starts}.values():
        counts = dict.fromkeys(shared, len(choices))
        ends = len(whole.stages[-1].choices)
        numbers = _descended(profile, counts, ends, start, budget, evaluate)
        at = {path: profile.paths.index(path) + 1 for path in shared}
        yield {path: choices[numbers[at[path]]] for path in shared}


def _descended(
    profile: Profile,
    counts: Mapping[str, int],
    ends: int,
    start: Timeline,
    budget: int,
    evaluate: Callable[[Sequence[int]], Timeline],
) -> tuple[int, ...]:
    """The numbers of choices when no block's change alone is better.

    Args:
        counts: how many choices each block has.
        ends: how many the stage behind the blocks has.
    """
    stages = [
        ([number + 1 for number, other in enumerate(profile.paths) if other == path], count)
        for path, count in counts.items()
    ]
    stages.append(([len(profile.paths) + 1], ends))
    best = start
    for _ in range(_MOST_ROUNDS):
        before = best
        for mine, count in stages:
            for choice in range(count):
                numbers = list(best.choices)
                for stage in mine:
                    numbers[stage] = choice
                found = evaluate(numbers)
                if worth(found, budget) < worth(best, budget):
                    best = found
        if best is before:
            break
    return best.choices
