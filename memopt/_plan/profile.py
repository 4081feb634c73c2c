"""Costs of a model's blocks with each choice: the numbers that a plan is made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import NamedTuple

from memopt._plan.bytes import StageBytes, joined_bytes
from memopt._plan.choices import CHUNKED, EACH
from memopt._plan.levels import Case, Timed
from memopt._plan.observe import Observed
from memopt._plan.parts import NO_PARTS, BlockParts
from memopt._plan.seconds import StageSeconds
from memopt._plan.solver import LinkTimes, Option, Problem, Stage
from memopt._plan.times import seconds_of
from memopt.assignment import Assignment, Choice, Paths

BEFORE, AFTER, WITH_HEAD = "before", "after", "after, with the head in chunks"

_BEHIND = 0.1
"""A device that ends a step by such a share later than the host sets the pace itself."""


class StepSeconds(NamedTuple):
    """The seconds of a step with an assignment."""

    assignment: Assignment
    stages: Sequence[StageSeconds]
    round: int = 0
    """The round of steps, in which every sample has its turn."""
    behind: float | None = None
    """How far the device was behind the host at its end: see TimedStages."""


@dataclass
class Profile:
    """The costs of one model and batch."""

    paths: tuple[str, ...]
    """The blocks, in the order of their calls; one that is called several times as often."""
    kinds: tuple[int, ...]
    """The kind of each call. Calls of one kind do the same, and are timed together."""
    sites: tuple[int, ...]
    """The site of each call. Calls of one site do the same between the same operators: their bytes
    are looked at once.
    """
    base: int
    optimizer: int
    gradients: tuple[int, ...]
    """The gradients of each stage: see StageBytes."""
    ends: dict[str, tuple[StageBytes, StageSeconds]]
    """BEFORE the blocks and AFTER them; and, where the model has a head that can run in chunks with
    its loss, what is behind the blocks WITH_HEAD so."""
    nbytes: dict[tuple[int, Choice], StageBytes]
    """Bytes by site and choice, which offloads nothing."""
    seconds: dict[Case, StageSeconds]
    exact: dict[tuple[int, Choice], StageBytes] = field(default_factory=dict)
    """Bytes by the number of the call, as they were in a plan that was predicted whole."""
    is_timed: bool = False
    """Whether seconds are those of real steps."""
    spread: tuple[float, float] | None = None
    """The least and the most time of steps that were timed, each by the median of those that did
    the same; None where no two did."""
    behind: float | None = None
    """The median of how far the device was behind the host when steps that were timed ended."""
    first: tuple[int, dict[str, StageBytes]] | None = None
    """The base and the ends' bytes as they were before plans were predicted; None: not known."""
    no_regions: tuple[str, ...] = ()
    """Blocks that cannot be recomputed as they ran: they are never checkpointed."""
    follows: tuple[bool, ...] = ()
    """Whether a call gets what the one before returned, with nothing between: see Observed."""
    parts: dict[str, BlockParts] = field(default_factory=dict)
    """The sets of parts that choices stand for, by block."""
    exact_groups: dict[tuple[int, int, Choice], StageBytes] = field(default_factory=dict)
    """Bytes of calls that share a region, by the first one's number, how many, and the choice, as
    they were in a plan that was predicted whole."""
    heads: tuple[str, ...] = ()
    """The linears that run in chunks WITH_HEAD."""
    in_order: bool = True
    """Whether backward passes the blocks in the opposite order, as the arithmetic assumes."""

    @property
    def waits_for_host(self) -> bool:
        """Whether the device waited for the host throughout the steps that were timed."""
        return self.behind is not None and self.behind < _BEHIND

    @property
    def blocks(self) -> tuple[str, ...]:
        """Each once."""
        return tuple(dict.fromkeys(self.paths))

    def allowed(self, path: str, choice: Choice) -> Choice:
        """The choice with the parts that its names stand for; of a block that cannot be a region
        the same without one.
        """
        if path in self.no_regions:
            return replace(choice, checkpoint=False, parts=())
        return self.parts.get(path, NO_PARTS).of(choice)

    def has_parts_of(self, choice: Choice) -> bool:
        """Whether some block has parts for the names of a choice."""
        if CHUNKED in choice.parts:
            return any(parts.rows for parts in self.parts.values())
        return bool(self.parts) or not set(choice.parts) - {EACH}

    @property
    def has_head(self) -> bool:
        """Whether there is a head that can run in chunks."""
        return WITH_HEAD in self.ends

    @property
    def head_choices(self) -> dict[Paths, Choice]:
        """The choices of the heads, where they run in chunks."""
        return {(path,): Choice(head=True) for path in self.heads if self.has_head}

    def uniform(self, choice: Choice, head: bool = False) -> Assignment:
        """One choice for all blocks. `head`: it runs in chunks."""
        choices: dict[Paths, Choice] = {(path,): choice for path in self.blocks}
        choices |= self.head_choices if head else {}
        return Assignment(choices).without_regions(self.no_regions)

    def set_seconds(self, steps: Iterable[StepSeconds], is_timed: bool) -> None:
        """Take over the seconds of steps with assignments: estimates, or times, which vary."""
        steps, found = list(steps), []
        ends: dict[str, list[StageSeconds]] = {}
        for assignment, stages, round, _ in steps:
            ends.setdefault(BEFORE, []).append(stages[0])
            ends.setdefault(behind_blocks(assignment), []).append(stages[-1])
            has_recipes = assignment.recipes
            calls = zip(self.paths, self.kinds, stages[1:-1], strict=True)
            for number, (path, kind, stage) in enumerate(calls):
                choice = assignment.of(path)
                case = Case(kind, choice, is_beside=has_recipes and not choice.recipes)
                found.append(Timed(number, case, stage, round))
        self._set_ends({name: _median(seconds) for name, seconds in ends.items()})
        if is_timed:
            mine = (case for case in self.seconds if case.choice.parts or case.choice.chunks)
            shares = {case: self._share(case) for case in mine}
            self.seconds = seconds_of(found, shares)
        else:
            self.seconds = _medians(found)
        self.is_timed = is_timed
        self.spread = _spread(steps) if is_timed else None
        behind = [step.behind for step in steps if step.behind is not None]
        self.behind = median(behind) if behind else None

    def _set_ends(self, seconds: Mapping[str, StageSeconds]) -> None:
        """Take over seconds of the ends. One that no step had keeps its ratio to the other one."""
        before = dict(self.ends)
        for name, (nbytes, estimate) in before.items():
            mine = seconds.get(name)
            other = WITH_HEAD if name == AFTER else AFTER
            if mine is None and other in seconds:
                mine = estimate.scaled(seconds[other], before[other][1])
            self.ends[name] = nbytes, mine or estimate

    def _share(self, case: Case) -> float:
        """The share of a block's forward that backward runs again, by the estimates."""
        plain = self.seconds[Case(case.kind, Choice(case.choice.recipes), case.is_beside)]
        again = self.seconds[case].backward - plain.backward
        return max(0.0, again) / plain.forward if plain.forward else 0.0

    def handed_on(self, assignment: Assignment, places: int) -> Assignment:
        """Return these choices, each moved on among the blocks of its kind: in several steps a
        block has several, and what its place costs is not taken for what a choice costs.
        """
        alike: dict[int, list[str]] = {}
        for path, kind in dict(zip(self.paths, self.kinds, strict=True)).items():
            alike.setdefault(kind, []).append(path)
        choices = dict(assignment.choices)
        for paths in alike.values():
            for number, path in enumerate(paths):
                choices[path,] = assignment.of(paths[(number + places) % len(paths)])
        return Assignment(choices, assignment.place).without_regions(self.no_regions)

    def correct(
        self, assignment: Assignment, observed: Observed, groups: Sequence[int] = ()
    ) -> None:
        """Take over what a step with this assignment had.

        Args:
            groups: how many calls share a region, in their order; empty: each is alone.

        Raises:
            ValueError: it calls other blocks than the steps before.
        """
        check_same_calls(self.paths, observed.paths)
        step = observed.nbytes
        self.base = step.base
        first = 0
        for length in groups or [1] * len(self.paths):
            choice = replace(assignment.of(self.paths[first]), offload=0.0)
            stages = step.stages[first + 1 : first + 1 + length]
            if length == 1:
                self.exact[first, choice] = stages[0]
            else:
                self.exact_groups[first, length, choice] = joined_bytes(stages)
            first += length
        behind = behind_blocks(assignment)
        for name, stage in ((BEFORE, step.stages[0]), (behind, step.stages[-1])):
            self.ends[name] = (stage, self.ends[name][1])

    def grouped(
        self,
        groups: Sequence[int],
        link: LinkTimes,
        options_of: Callable[[int, int], Iterable[Option]],
    ) -> Problem:
        """State the problem for the solver: the stages before, of the calls, of which consecutive
        ones may be one stage, and after.

        Args:
            groups: how many calls each stage is of.
            options_of: the options of the stage that begins with a call, and is of so many.
        """
        stages = [Stage((self._end(BEFORE),), self.gradients[0])]
        first = 0
        for length in groups:
            first += length
            options = tuple(options_of(first - length, length))
            stages.append(Stage(options, self.gradients[first]))
        behind = (AFTER, WITH_HEAD) if self.has_head else (AFTER,)
        stages.append(Stage(tuple(map(self._end, behind)), self.gradients[-1]))
        return Problem(tuple(stages), self.base, self.optimizer, link)

    def bytes_of(self, number: int, choice: Choice) -> StageBytes:
        """The bytes of a call with a choice, before anything leaves."""
        choice = self.allowed(self.paths[number], choice)
        stays = replace(choice, offload=0.0)
        return self.exact.get((number, stays)) or self.nbytes[self.sites[number], stays]

    def uncorrected(self) -> Profile:
        """Return it as it was before plans were predicted, and as if all choices took the same
        time.
        """
        none = StageSeconds(0.0, 0.0)
        base, ends = self.first or (self.base, {n: nbytes for n, (nbytes, _) in self.ends.items()})
        return replace(
            self,
            base=base,
            ends={name: (nbytes, none) for name, nbytes in ends.items()},
            seconds=dict.fromkeys(self.seconds, none),
            exact={},
            exact_groups={},
        )

    def without_head(self) -> Profile:
        """Return it as it is where the head does not run in chunks."""
        return replace(self, ends={n: end for n, end in self.ends.items() if n != WITH_HEAD})

    def without_rows(self) -> Profile:
        """Return it as it is where no part of a block runs in chunks of rows."""
        parts = {path: replace(mine, rows=()) for path, mine in self.parts.items()}
        return replace(self, parts=parts)

    def _end(self, name: str) -> Option:
        nbytes, seconds = self.ends[name]
        return Option(
            max(0, nbytes.resident),
            nbytes.forward,
            nbytes.backward,
            seconds.forward,
            seconds.backward,
            0,
        )

    def option(self, number: int, choice: Choice, *, with_recipes: bool) -> Option:
        """The cost of a call with a choice, in a step in which some block has recipes, or none."""
        kind = self.kinds[number]
        choice = self.allowed(self.paths[number], choice)
        stays = replace(choice, offload=0.0)
        nbytes = self.bytes_of(number, choice)
        seconds = self.seconds[Case(kind, stays, with_recipes and not choice.recipes)]
        away = nbytes.away(choice.offload) if choice.offload else 0
        return Option(
            max(0, nbytes.resident - away),
            nbytes.forward,
            nbytes.backward,
            seconds.forward,
            seconds.backward,
            away,
        )


def behind_blocks(assignment: Assignment) -> str:
    """The name of what is behind the blocks in a step with this assignment."""
    return WITH_HEAD if assignment.heads else AFTER


def _spread(steps: Sequence[StepSeconds]) -> tuple[float, float] | None:
    """Steps do the same whose blocks have the same choices, whichever has which."""
    alike: dict[tuple[str, ...], list[float]] = {}
    for assignment, stages, *_ in steps:
        key = tuple(sorted(map(str, assignment.choices.values())))
        seconds = sum(stage.forward + stage.backward for stage in stages)
        alike.setdefault(key, []).append(seconds)
    groups = [values for values in alike.values() if len(values) > 1 and median(values) > 0]
    shares = [value / median(values) for values in groups for value in values]
    return (min(shares), max(shares)) if shares else None


def _medians(timed: Iterable[Timed]) -> dict[Case, StageSeconds]:
    """Medians of estimates, to which it makes no difference what other blocks have."""
    found: dict[Case, list[StageSeconds]] = {}
    for one in timed:
        for is_beside in {False, not one.case.choice.recipes}:
            case = one.case._replace(is_beside=is_beside)
            found.setdefault(case, []).append(one.seconds)
    return {case: _median(seconds) for case, seconds in found.items()}


def _median(seconds: Sequence[StageSeconds]) -> StageSeconds:
    return StageSeconds(
        median(one.forward for one in seconds), median(one.backward for one in seconds)
    )


def check_same_calls(first: Sequence[str], other: Sequence[str]) -> None:
    """Raises ValueError where a step calls other blocks than the first one did."""
    if other != first:
        raise _other_calls(first, other)


def check_skips_some(deepest: Observed, other: Observed) -> None:
    """Raises ValueError where a step whose random numbers are others does more than to leave out
    some of the calls.
    """
    calls = iter(deepest.paths)
    if not all(path in calls for path in other.paths):
        raise _other_calls(deepest.paths, other.paths)


def _other_calls(first: Sequence[str], other: Sequence[str]) -> ValueError:
    odd = next(
        iter(Counter(first) - Counter(other) or Counter(other) - Counter(first)), "the order"
    )
    return ValueError(
        "plan: model must call the same blocks in every step, got one that calls "
        f"{len(first)} and one that calls {len(other)} ({odd} differs); for a "
        "model that skips or mixes layers by numbers of its own, turn that off for planning: the "
        "plan holds for steps that skip some"
    )
