"""Every plan of a small problem, by formulas of its own, and small problems at random."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from memopt._plan.solver import LinkTimes, Option, Problem, Stage

NO_ROOM = LinkTimes(1.0, 1.0, room=0)


@dataclass
class Found:
    """A plan by brute force."""

    choices: tuple[int, ...]
    seconds: float
    peak: int
    offloaded: int


def all_plans(problem: Problem) -> Iterator[Found]:
    """Walks over all of them, stage by stage, in plain numbers: shares nothing with the solver."""
    link = problem.link or NO_ROOM
    stages = problem.stages

    def walk(
        i: int,
        choices: tuple[int, ...],
        seconds: float,
        peak: int,
        resident: int,
        queue: int,
        offloaded: int,
    ) -> Iterator[Found]:
        last = stages[i - 1].choices[choices[-1]] if choices else Option()
        if i == len(stages):
            yield Found(choices, seconds + last.offloaded / link.back, peak, offloaded)
            return
        for c, choice in enumerate(stages[i].choices):
            in_forward = problem.base + resident + queue + choice.forward
            left = math.floor(link.out * choice.forward_seconds)
            after = max(0, queue + choice.offloaded - left)
            wait = max(0, after - link.in_flight) / link.out
            after = min(after, link.in_flight)
            in_backward = problem.base + resident + after + last.offloaded
            in_backward += choice.backward + stages[i].before_backward
            wait += max(0.0, last.offloaded / link.back - choice.backward_seconds)
            yield from walk(
                i + 1,
                (*choices, c),
                seconds + choice.forward_seconds + choice.backward_seconds + wait,
                max(peak, in_forward, in_backward),
                resident + choice.resident,
                after,
                offloaded + choice.offloaded,
            )

    for plan in walk(0, (), 0.0, problem.base + problem.optimizer, 0, 0, 0):
        if plan.offloaded <= link.room:
            yield plan


def random_problem(rng: random.Random) -> Problem:
    """Seconds are multiples of 1/8 and rates powers of two, so that all sums are exact and many
    plans equal in time.
    """
    most = rng.choice((3, 20, 1000))
    offloads = rng.random() < 0.7
    stages: list[Stage] = []
    for _ in range(rng.randint(1, 5)):
        if stages and rng.random() < 0.5:
            stages.append(replace(stages[-1], before_backward=rng.randint(0, most)))
            continue
        choices = tuple(
            Option(
                rng.randint(0, most),
                rng.randint(0, most),
                rng.randint(0, most),
                rng.randint(0, 24) / 8,
                rng.randint(0, 24) / 8,
                rng.randint(0, most) if offloads and rng.random() < 0.6 else 0,
            )
            for _ in range(rng.randint(1, 4))
        )
        stages.append(Stage(choices, rng.randint(0, most)))
    needed = sum(min(c.offloaded for c in stage.choices) for stage in stages)
    link = LinkTimes(
        2.0 ** rng.randint(-2, 10),
        2.0 ** rng.randint(-2, 10),
        needed + rng.choice((0, most, 3 * most, 10**6)),
        rng.choice((0, most, 2 * most, 10**6)),
    )
    if needed == 0 and rng.random() < 0.1:
        return Problem(tuple(stages), rng.randint(0, most), rng.randint(0, 5 * most))
    return Problem(tuple(stages), rng.randint(0, most), rng.randint(0, 5 * most), link)
