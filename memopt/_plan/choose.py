"""The plan for a budget: solved, predicted whole, corrected, and solved again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from memopt._plan.choices import CHOICES
from memopt._plan.groups import apart_option, group_option, groups_of, lengths_of, may_share
from memopt._plan.observe import Observed
from memopt._plan.profile import Profile
from memopt._plan.samples import Look
from memopt._plan.shared import fixed_choices
from memopt._plan.solver import BelowFloor, Option, Timeline, solve, worth
from memopt._plan.terms import Terms, as_chosen, evaluated, link_times, problem, questions, uniform
from memopt.assignment import Assignment, Choice, Paths
from memopt.memory.sizes import BudgetTooSmall, at_least

# How often a plan is predicted, and solved again with what that taught.
_MOST_ROUNDS = 8
# So much of the peak the arithmetic was seen to be too high, where neighbours share a tensor that
# each counts (recipes in a U-Net 2.8 %, an encoder's output 1 %).
_MOST_TOO_HIGH = 0.03

_REGION = Choice(checkpoint=True)


@dataclass(frozen=True)
class Chosen:
    """A plan, predicted."""

    assignment: Assignment
    solution: Timeline
    peak: int
    """Bytes of the whole step."""
    observed: Observed
    """The step without offloading."""


def too_much_measured(measured: int, budget: int, what: str) -> BudgetTooSmall:
    """The error where no step took as little as predicted. `what`: the last one that was tried."""
    needed, got = at_least(measured, budget)
    return BudgetTooSmall(
        f"plan: budget must be at least what a step takes, got {got}, but {needed} "
        f"were measured with the last {what} that was predicted to fit",
        measured,
    )


def choose_plan(profile: Profile, budget: int, look: Look, terms: Terms) -> tuple[Chosen, bool]:
    """The plan with the least added time; and whether it is within the budget. Else it is the one
    that needs least.

    What each prediction of a whole plan shows is noted in the profile. It may be that neighbours
    share a tensor that each counts, or that one of them needs more than its kind did elsewhere. So
    that no plan is slower than one choice for all blocks, those that could fit are predicted too.
    """
    found: dict[_Ways, Chosen] = {}
    aim = budget
    for _ in range(_MOST_ROUNDS):
        solution = solved(profile, aim, terms)
        if _ways(solution) in found:
            break
        chosen = _predicted(profile, solution, look, terms)
        found[_ways(solution)] = chosen
        if chosen.peak <= budget:
            aim = budget + max(0, solution.peak - chosen.peak)
        else:
            now = _again(profile, terms, solution)
            aim = min(aim, budget) - max(0, chosen.peak - max(now.peak, budget))
    for choice, head in product(CHOICES, range(1 + profile.has_head)):
        solution = uniform(profile, choice, terms, head=bool(head))
        if _ways(solution) not in found and _may_be_faster(solution, found.values(), budget):
            found[_ways(solution)] = _predicted(profile, solution, look, terms)
    fitting = [chosen for chosen in found.values() if chosen.peak <= budget]
    if fitting:
        return min(fitting, key=lambda chosen: chosen.solution.seconds), True
    least = least_chosen(profile.uncorrected(), look, terms)
    timed = _again(profile, terms, least.solution)
    if least.peak > budget and terms.place is not None:
        if not terms.in_step:
            return choose_plan(profile, budget, look, replace(terms, in_step=True))
        staying, fits = choose_plan(profile, budget, look, Terms())
        if staying.peak < least.peak:
            return staying, fits
    return replace(least, solution=timed), least.peak <= budget


_Ways = tuple[tuple[int, ...], tuple[int, ...]]


def _ways(solution: Timeline) -> _Ways:
    return solution.choices, solution.groups


def _again(profile: Profile, terms: Terms, solution: Timeline) -> Timeline:
    """Evaluate a solution by the profile as it is now."""
    return evaluated(profile, terms, solution.choices, solution.groups)


def _may_be_faster(solution: Timeline, found: Iterable[Chosen], budget: int) -> bool:
    """Than everything within the budget that was found, and within it."""
    fitting = (chosen for chosen in found if chosen.peak <= budget)
    return solution.peak <= (1 + _MOST_TOO_HIGH) * budget and all(
        solution.seconds < chosen.solution.seconds for chosen in fitting
    )


def _predicted(profile: Profile, solution: Timeline, look: Look, terms: Terms) -> Chosen:
    """The whole plan, and the profile corrected by it."""
    assignment = _assignment(profile, solution, terms)
    observed = look(assignment)
    profile.correct(assignment, observed, solution.groups)
    if assignment.offloads:
        solution = _again(profile, terms, solution)
        return Chosen(assignment, solution, _at_worst(profile, terms, solution), observed)
    return Chosen(assignment, solution, observed.nbytes.peak, observed)


def _at_worst(profile: Profile, terms: Terms, solution: Timeline) -> int:
    """The peak of a plan that offloads, whatever the link's pace in a step: as many copies are
    under way each way as the engine allows, of the largest storages, or all that left before. What
    leaves late may do so while backward is past the block that it is of.
    """
    whole = as_chosen(profile, terms, solution.choices, solution.groups)
    most = terms.copies_in_flight * _largest(profile, terms, solution.choices)
    away = [place for place, stage in enumerate(whole.stages) if stage.choices[0].offloaded]
    last = max(away, default=0)  # the first one that asks: nothing comes back before
    total = sum(stage.choices[0].offloaded for stage in whole.stages)
    held = left = 0
    peak = whole.base + whole.optimizer
    for place, stage in enumerate(whole.stages):
        option = stage.choices[0]
        leaving = 0 if terms.in_step else most
        late = min(leaving, total - left - option.offloaded)
        returning = most if place <= last else 0
        forward = min(leaving, left) + option.forward
        others = late + min(leaving - late + returning, left)
        backward = others + option.backward + stage.before_backward
        peak = max(peak, whole.base + held + max(forward, backward))
        held, left = held + option.resident, left + option.offloaded
    return peak


def _largest(profile: Profile, terms: Terms, numbers: Sequence[int]) -> int:
    """Return the largest of the storages that these choices offload."""
    alone = len(terms.choices)
    every = [terms.every[n] if n < alone else _REGION for n in range(len(terms.every))]
    calls = [(call, every[n]) for call, n in enumerate(numbers[1:-1]) if terms.every[n].offload]
    sizes = (profile.bytes_of(call, choice).may_leave for call, choice in calls)
    return max((nbytes for storages in sizes for nbytes in storages), default=0)


def least_chosen(profile: Profile, look: Look, terms: Terms) -> Chosen:
    """A plan that needs as little as any that was found, which depends on bytes alone: so that the
    next question finds it too, whatever the times are then.
    """
    terms = replace(terms, out=1.0, back=1.0)
    found: dict[_Ways, Chosen] = {}
    for _ in range(_MOST_ROUNDS):
        solution = solved(profile, 0, terms)
        if _ways(solution) in found:
            break
        found[_ways(solution)] = _predicted(profile, solution, look, terms)
    return min(found.values(), key=lambda chosen: chosen.peak)


def solved(profile: Profile, budget: int, terms: Terms) -> Timeline:
    """The plan by the arithmetic alone. Where nothing fits, what needs least."""
    found: list[Timeline] = []
    floors: list[Timeline] = []
    for choices, with_recipes in questions(profile, terms):
        whole = problem(profile, terms, choices, with_recipes=with_recipes)

        def with_fixed(
            only: Mapping[str, Choice],
            choices: Sequence[Choice] = choices,
            with_recipes: bool = with_recipes,
        ) -> Timeline:
            asked = problem(profile, terms, choices, only, with_recipes=with_recipes)
            try:
                best: Timeline = solve(asked, budget)
            except BelowFloor as error:
                best = error.solution
            return _numbered(profile, best, choices, only)

        for only in fixed_choices(profile, whole, choices, budget, with_fixed):
            best = _among_all(profile, with_fixed(only), choices, terms)
            (found if best.peak <= budget else floors).append(best)
    fastest = min(found or floors, key=lambda plan: worth(plan, budget))
    best = _in_order(profile, fastest, budget, terms)
    regions = (terms.choices[number].checkpoint for number in best.choices[1:-1])
    if best.peak <= budget and not all(regions):
        return best
    ways = [best, *_with_groups(profile, budget, terms)]
    return min(ways, key=lambda plan: worth(plan, budget))


def _with_groups(profile: Profile, budget: int, terms: Terms) -> Iterator[Timeline]:
    """Plans in which consecutive calls share regions, for some lengths of these. Calls that could
    share one and do not have all the same choice.
    """
    alone = len(terms.choices)
    for length in lengths_of(profile):
        groups = groups_of(profile, length)
        for with_recipes in (True, False):
            numbers = [
                number
                for number, choice in enumerate(terms.every)
                if (with_recipes or not choice.recipes) and profile.has_parts_of(choice)
            ]

            offered: dict[int, list[int]] = {}

            def options(
                first: int,
                count: int,
                numbers: Sequence[int] = numbers,
                offered: dict[int, list[int]] = offered,
                with_recipes: bool = with_recipes,
            ) -> Iterator[Option]:
                offered[first] = [
                    number
                    for number in numbers
                    if number < alone
                    or (count > 1 and may_share(profile, first, count, terms.every[number]))
                ]
                for number in offered[first]:
                    option_of = apart_option if number < alone else group_option
                    choice = terms.every[number]
                    yield option_of(profile, first, count, choice, with_recipes=with_recipes)

            asked = profile.grouped(groups, link_times(profile, terms), options)
            try:
                found: Timeline = solve(asked, budget)
            except BelowFloor as error:
                found = error.solution
            chosen: list[int] = []
            stages: list[int] = []
            for count, place in zip(groups, found.choices[1:-1], strict=True):
                number = offered[len(chosen)][place]
                chosen += [number] * count
                stages += [count] if number >= alone else [1] * count
            yield evaluated(profile, terms, [0, *chosen, found.choices[-1]], stages)


def _in_order(profile: Profile, solution: Timeline, budget: int, terms: Terms) -> Timeline:
    """Alike blocks in the order that people expect, if that costs nothing: the first ones hold
    least, the last ones most. Backward begins with these, so that what they hold goes soonest.
    """
    choices = list(solution.choices)
    often = {path for path, calls in Counter(profile.paths).items() if calls > 1}
    alike: dict[int, list[int]] = {}
    for number, (path, kind) in enumerate(zip(profile.paths, profile.kinds, strict=True)):
        if path not in often:  # else one choice for all calls
            alike.setdefault(kind, []).append(number)
    for numbers in alike.values():
        held = {
            c: profile.option(numbers[0], terms.choices[c], with_recipes=True).resident
            for c in set(choices)
        }
        mine = sorted((choices[number + 1] for number in numbers), key=lambda c: held[c])
        for number, choice in zip(numbers, mine, strict=True):
            choices[number + 1] = choice
    ordered = evaluated(profile, terms, choices)
    costs_nothing = ordered.seconds <= solution.seconds
    return ordered if costs_nothing and ordered.peak <= max(budget, solution.peak) else solution


def _numbered(
    profile: Profile, solution: Timeline, choices: Sequence[Choice], only: Mapping[str, Choice]
) -> Timeline:
    """Return the solution with the numbers that choices have where no block is fixed to one."""
    pairs = zip(profile.paths, solution.choices[1:-1], strict=True)
    numbers = [choices.index(only[p]) if p in only else number for p, number in pairs]
    return replace(solution, choices=(0, *numbers, solution.choices[-1]))


def _among_all(
    profile: Profile, solution: Timeline, choices: Sequence[Choice], terms: Terms
) -> Timeline:
    """Return the solution with numbers among all choices, and the seconds of what was chosen."""
    numbers = [terms.choices.index(choices[number]) for number in solution.choices[1:-1]]
    return evaluated(profile, terms, [0, *numbers, solution.choices[-1]])


def _assignment(profile: Profile, solution: Timeline, terms: Terms) -> Assignment:
    choices: dict[Paths, Choice] = {}
    first = 0
    for length in solution.groups or [1] * len(profile.paths):
        at = profile.paths[first : first + length]
        choices[at] = profile.allowed(at[0], terms.every[solution.choices[first + 1]])
        first += length
    if solution.choices[-1]:
        choices |= profile.head_choices
    assignment = Assignment(choices, terms.place, terms.in_step)
    return assignment.without_regions(profile.no_regions)
