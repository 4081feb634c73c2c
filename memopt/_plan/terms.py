"""States what is asked of the solver: problems and timelines, of a profile and a plan's limits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from memopt._plan.choices import CHOICES, choices_with, sharing_with
from memopt._plan.groups import apart_option, group_option
from memopt._plan.profile import Profile
from memopt._plan.solver import LinkTimes, Option, Problem, Timeline, evaluate
from memopt.assignment import Choice
from memopt.place import Place

UNLIMITED = 1 << 60


@dataclass(frozen=True)
class Terms:
    """The limits of a plan, in addition to the budget."""

    place: Place | None = None
    """The place where activations may wait; None: nothing is offloaded."""
    out: float = 1.0
    """Bytes a second, on the way there."""
    back: float = 1.0
    """Bytes a second on the way back."""
    room: int | None = None
    """The most bytes there at one time; None: all that there are."""
    copies_in_flight: int = 4
    """The most under way at one time, each way: see memopt.offload.configure."""
    in_step: bool = False
    """Whether each block waits at its end until what it offloads has left: slower, and less is on
    its way at one time.
    """

    @property
    def choices(self) -> tuple[Choice, ...]:
        """Choices of one call."""
        return choices_with(offload=self.place is not None)

    @property
    def every(self) -> tuple[Choice, ...]:
        """Choices of one call, and behind them those of calls that share a region."""
        return (*self.choices, *sharing_with(offload=self.place is not None))


def problem(
    profile: Profile,
    terms: Terms,
    choices: Sequence[Choice],
    only: Mapping[str, Choice] | None = None,
    *,
    with_recipes: bool,
) -> Problem:
    """State the problem for the solver, with some of the choices. `only`: blocks with one.
    `with_recipes`: whether some block has recipes.
    """

    def options(number: int, _: int) -> Iterator[Option]:
        path = profile.paths[number]
        mine = choices if only is None or path not in only else (only[path],)
        return (profile.option(number, choice, with_recipes=with_recipes) for choice in mine)

    return profile.grouped([1] * len(profile.paths), link_times(profile, terms), options)


def link_times(profile: Profile, terms: Terms) -> LinkTimes:
    largest = max((n for cost in profile.nbytes.values() for n in cost.may_leave), default=0)
    return LinkTimes(
        terms.out,
        terms.back,
        UNLIMITED if terms.room is None else terms.room,
        0 if terms.in_step else terms.copies_in_flight * largest,
    )


def questions(profile: Profile, terms: Terms) -> Iterator[tuple[Sequence[Choice], bool]]:
    """Recipes cost every block something, also those that have none. So a plan with recipes is one
    question, and a plan without another one: the choices, and whether recipes are among them.
    """
    choices = [choice for choice in terms.choices if profile.has_parts_of(choice)]
    yield choices, True
    yield [choice for choice in choices if not choice.recipes], False


def evaluated(
    profile: Profile, terms: Terms, numbers: Sequence[int], groups: Sequence[int] = ()
) -> Timeline:
    """Evaluate choices by their numbers: of what is before the blocks, of each call, and of
    what is after them: 1 where the head runs in chunks.

    Args:
        groups: how many calls share a region, in their order; empty: each is alone.
    """
    whole = as_chosen(profile, terms, numbers, groups)
    found = evaluate(whole, [0] * len(whole.stages))
    groups = groups if any(length > 1 for length in groups) else ()
    return replace(found, choices=tuple(numbers), groups=tuple(groups))


def as_chosen(
    profile: Profile, terms: Terms, numbers: Sequence[int], groups: Sequence[int]
) -> Problem:
    """State the problem with one option for each stage."""
    every = terms.every
    with_recipes = any(every[number].recipes for number in numbers[1:-1])

    def options(first: int, length: int) -> Iterator[Option]:
        option_of = apart_option if length == 1 else group_option
        choice = every[numbers[first + 1]]
        yield option_of(profile, first, length, choice, with_recipes=with_recipes)

    groups = groups or [1] * len(profile.paths)
    whole = profile.grouped(groups, link_times(profile, terms), options)
    *stages, last = whole.stages
    last = replace(last, choices=(last.choices[numbers[-1]],))
    return replace(whole, stages=(*stages, last))


def uniform(profile: Profile, choice: Choice, terms: Terms, *, head: bool = False) -> Timeline:
    """All blocks with one choice. `head`: it runs in chunks, where there is one."""
    number = CHOICES.index(choice)
    last = int(head and profile.has_head)
    return evaluated(profile, terms, [0, *(number for _ in profile.paths), last])
