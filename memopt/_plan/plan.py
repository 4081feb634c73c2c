"""A plan: a fate for each block; to read, to keep, and to put on a model."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from memopt._arguments import as_path, check_count, check_flags
from memopt._checkpoint.caches import note_on_caches
from memopt._checkpoint.probe import left_out
from memopt._errors import in_the_name_of
from memopt._plan import ranks, stored
from memopt._plan.choose import Chosen, choose_plan, too_much_measured
from memopt._plan.curve import Curve, curve_of
from memopt._plan.figure import draw_curve
from memopt._plan.floor import too_small
from memopt._plan.largest import largest_size
from memopt._plan.live import Live
from memopt._plan.own import check_is_plain, note_on
from memopt._plan.page import plan_page
from memopt._plan.planned import Planned, planned_blocks
from memopt._plan.profile import Profile
from memopt._plan.table import plan_tables
from memopt._plan.terms import Terms, uniform
from memopt._progress import progress
from memopt.applied import Applied, assign
from memopt.assignment import KEEP
from memopt.memory.allocator import capacity_of
from memopt.memory.asked import check_module
from memopt.memory.messages import note_on_mode
from memopt.memory.parallel import without_ddp
from memopt.memory.sizes import as_bytes, as_text
from memopt.memory.trace import trace_of
from memopt.place import copies_in_flight
from memopt.show.figure import write_figure
from memopt.show.page import PartOfPage
from memopt.show.sections import Tables
from memopt.show.shown import Shown

# A plan is measured, and corrected if it needs more than was predicted, at most so often.
_MOST_TRIES = 3


@dataclass
class Plan(Shown, Planned):
    """A fate for each block. `print` it, `apply` it, `save` it; see `memopt.plan`."""

    live: Live | None = field(default=None, repr=False)
    _applied: Applied | None = field(default=None, repr=False)

    @in_the_name_of("Plan.apply", "plan", "assign", "convert", "checkpoint_wrapper")
    @progress("Plan.apply")
    def apply(self, model: nn.Module | None = None, *, watch: bool = True) -> Plan:
        """Put the fates on a model, in place; `undo` takes them off.

        The model that the plan was made for then runs one forward and backward; all that these
        change is put back. If its peak is above the budget, a plan is made for a budget that is
        lower by the difference, at most three times in all. From then on the plan holds no memory
        of the batch, which would be there beside those of training: where nobody else holds it,
        later plans and sizes are predicted without its values, and no step of it runs.

        Args:
            model: default: the one that the plan was made for. Another one must have the same
                blocks, also inside DistributedDataParallel; nothing of it is measured.
            watch: whether the step runs.

        Returns:
            The plan, which may have changed.

        Raises:
            TypeError, ValueError: the plan is on a model already, `model` has other blocks, or has
                regions, was converted or has another plan on it; or the plan offloads, and
                `memopt.offload.configure` was given another `copies_in_flight` since it was made.
            BudgetTooSmall: what was measured is above the budget with every plan tried. The model
                is as before.
        """
        check_flags("Plan.apply", watch=watch)
        if self._applied is not None:
            raise ValueError("Plan.apply: the plan must not be on a model already; undo it first")
        model = model if model is None else without_ddp(model)
        is_own = self.live is not None and model in (None, self.live.step.model)
        if self.live is not None:
            self.live.take_back()
        if model is None:
            if self.live is None:
                raise TypeError("Plan.apply: a loaded plan must be given a model, got None")
            model = self.live.step.model
        self._check(model)
        check_is_plain("Plan.apply", model)
        self._check_copies()
        if self.live is None or not is_own or not watch or not self.live.runs:
            self._applied = assign(model, self.assignment)
            self.measured_peak = None
        else:
            self._applied = self._apply_and_watch(self.live)
        if self.live is not None and is_own:
            self.live.let_go()
        return self

    def _apply_and_watch(self, live: Live) -> Applied:
        model = live.step.model
        budget = self.budget
        for _ in range(_MOST_TRIES):
            with live.looks.facts(live.step):
                put = assign(model, self.assignment)
            try:
                above = live.watch()
            except BaseException:
                put.undo()
                raise
            profile = self.profile
            measured = profile.base + max(above, profile.optimizer)
            if measured <= self.budget:
                self.measured_peak = measured
                return put
            put.undo()
            budget -= measured - self.budget
            chosen, fits = choose_plan(profile, budget, live.look, self.terms)
            if not fits:
                break
            self._take(chosen)
        raise too_much_measured(measured, self.budget, "plan")

    @in_the_name_of("Plan.run_step", "plan")
    def run_step(self) -> None:
        """Run one forward and backward of the model that the plan was made for, with what is on it
        now; all that these change is put back.

        Raises:
            ValueError: the plan was loaded, its model or batch has no values, or the plan is on its
                model and nobody else has held the batch.
        """
        if self.live is not None:
            self.live.take_back()
        if self.live is None or not self.live.runs:
            raise ValueError(
                "Plan.run_step: the plan must be of a model and a batch that can run, got "
                f"{'a loaded one' if self.live is None else 'one without values'}"
            )
        self.live.watch()
        if self._applied is not None:
            self.live.let_go()

    @in_the_name_of("Plan.undo", "undo")
    def undo(self) -> None:
        """Take the fates off the model, which is as it was before `apply`. Regions that were made
        since, or got other settings, stay.

        Raises:
            ValueError: the plan is on no model, or more of it was converted since.
            RuntimeError: something else has changed the class of a block since.
        """
        if self._applied is None:
            raise ValueError("Plan.undo: the plan must be on a model; apply it first")
        self._applied.undo()
        self._applied = None
        self.measured_peak = None

    @in_the_name_of("Plan.within", "plan", "assign", "convert", "checkpoint_wrapper")
    @progress("Plan.within")
    def within(self, budget: int | str) -> Plan:
        """The plan for another budget, of the same numbers: nothing is timed again. Copies of
        offloading are those that may be under way now.

        Raises:
            TypeError, ValueError: the plan was loaded; it, another plan, regions or a conversion
                are on its model; or steps of it cannot be predicted, and nobody has held the batch.
            BudgetTooSmall: there is none.
        """
        live = self._free("Plan.within")
        wanted = ranks.least(as_bytes("Plan.within: budget", budget))
        terms = self.terms
        if terms.place is not None:
            copies = ranks.most(copies_in_flight("Plan.within", terms.place))
            terms = replace(terms, copies_in_flight=copies)
        return made(live, self.profile, wanted, terms)

    def tables(self) -> Tables:
        return plan_tables(self)

    def table(self) -> str:
        """Return text, as wide as the terminal."""
        return str(self)

    def pareto(self, path: str | Path | None = None, count: int = 40) -> Curve:
        """Step time against peak over all budgets, with the usual settings; also drawn to `path`,
        a PNG, if there is one (which needs matplotlib).
        """
        check_count("Plan.pareto", "count", count, least=2)
        curve = curve_of(self.profile, self.terms, count, self.plain_peak)
        if path is not None:
            write_figure(
                as_path("Plan.pareto", path), (8, 5), lambda figure: draw_curve(figure, self, curve)
            )
        return curve

    @in_the_name_of("Plan.largest_batch", "plan", "assign", "convert", "checkpoint_wrapper")
    @progress("Plan.largest_batch")
    def largest_batch(self, budget: int | str | None = None, limit: int = 1 << 16) -> int:
        """The most rows with which some plan stays within a budget, as predicted.

        Args:
            budget: as for `memopt.plan`. Default: the plan's.
            limit: the most rows to try.

        Returns:
            From 0, if one row does not fit, to `limit`.

        Raises:
            TypeError, ValueError: the plan was loaded, or it, another plan, regions or a conversion
                are on its model.
        """
        return self._largest("Plan.largest_batch", 0, budget, limit)

    @in_the_name_of("Plan.longest_sequence", "plan", "assign", "convert", "checkpoint_wrapper")
    @progress("Plan.longest_sequence")
    def longest_sequence(self, budget: int | str | None = None, limit: int = 1 << 20) -> int:
        """The longest sequence with which some plan stays within a budget, as predicted. As
        `largest_batch`, but tensors are resized in their second dimension. Of a model with a table
        of positions its size is the limit.
        """
        return self._largest("Plan.longest_sequence", 1, budget, limit)

    def _largest(self, who: str, dim: int, budget: int | str | None, limit: int) -> int:
        live = self._free(who)
        wanted = self.budget if budget is None else as_bytes(f"{who}: budget", budget)
        check_count(who, "limit", limit)
        return largest_size(live, self.terms, dim, wanted, limit, who)

    def to_dict(self) -> dict[str, Any]:
        """Lists, dicts, strings, numbers and None, as JSON has them."""
        return stored.plan_as_dict(self)

    def save(self, path: str | Path) -> None:
        """Write JSON, with the numbers that it was made of; see `load`."""
        as_path("Plan.save", path).write_text(
            json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n"
        )

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """A plan that was saved, for `apply(model)` on a model of the same architecture.

        Raises:
            ValueError: the file holds no plan, one of another format, or one that is damaged.
        """
        return cls(**stored.load(as_path("Plan.load", path)))

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickle is what `save` writes: for another process, or `torch.save`."""
        return _from_dict, (type(self), self.to_dict())

    def __deepcopy__(self, memo: dict[int, Any]) -> Plan:
        other = memo[id(self)] = object.__new__(type(self))
        vars(other).update(copy.deepcopy(vars(self), memo))
        return other

    def to_html(self, path: str | Path | None = None, anatomy: PartOfPage | None = None) -> str:
        """Return one page that needs no network: the step's bytes with the plan, and below them
        those without it; also written to `path`, if there is one. With an `anatomy` (what
        `memopt.anatomy` returned) of the step without the plan, its tables come behind.
        """
        file = None if path is None else as_path("Plan.to_html", path)
        if anatomy is not None and not hasattr(anatomy, "parts_of_page"):
            raise TypeError(
                f"Plan.to_html: anatomy must be what memopt.anatomy returned, got {anatomy!r}"
            )
        capacity = None if self.live is None else capacity_of(self.live.target)
        text = plan_page(self, self.pareto(), anatomy, capacity)
        if file is not None:
            file.write_text(text)
        return text

    def _free(self, who: str) -> Live:
        """The model's step, with nothing on it."""
        if self.live is None:
            raise TypeError(f"{who}: the plan must have a model, got a loaded one")
        if self._applied is not None and self._applied.model is self.live.step.model:
            raise ValueError(f"{who}: the plan must not be on its model; undo it first")
        check_is_plain(who, self.live.step.model)
        self.live.take_back()
        return self.live

    def _take(self, chosen: Chosen) -> None:
        """This choice is the plan's."""
        self.assignment = chosen.assignment
        self.peak = chosen.peak
        self.seconds = chosen.solution.seconds
        self.trace = trace_of(chosen.observed.ledger, 0.0)
        self.blocks = tuple(planned_blocks(self.profile, chosen))

    def _check_copies(self) -> None:
        """They take memory, and the plan's peak counts so many."""
        if not self.assignment.offloads or self.terms.place is None:
            return
        planned = self.terms.copies_in_flight
        now = ranks.most(copies_in_flight("Plan.apply", self.terms.place))
        if now != planned:
            raise ValueError(
                f"Plan.apply: copies_in_flight must be what the plan was made for, {planned}, got "
                f"{now} (memopt.offload.configure); within(budget) plans again"
            )

    def _check(self, model: nn.Module) -> None:
        check_module("Plan.apply", model)
        found = stored.signature_of(model, self.signature)
        for path in (*self.signature, *found):
            look, wanted = (of.get(path, "nothing") for of in (found, self.signature))
            if look != wanted:
                raise ValueError(
                    f"Plan.apply: model must have the plan's blocks, got {type(model).__name__} "
                    f"with {look} at {path!r} in place of {wanted}"
                )


def _from_dict(kind: type[Plan], data: dict[str, Any]) -> Plan:
    return kind(**stored.fields_of(data))


def made(live: Live, profile: Profile, budget: int, terms: Terms) -> Plan:
    """The plan for a budget.

    Raises:
        BudgetTooSmall: there is none.
    """
    chosen, fits = choose_plan(profile, budget, live.look, terms)
    if ranks.least(int(fits)) == 0:
        raise too_small(live, profile, terms, chosen, budget)
    by_arithmetic = uniform(profile, KEEP, terms)
    plain = live.plain()
    notes = []
    idle = [path for path in live.blocks if path not in profile.paths]
    if idle:
        notes.append(
            f"not called in forward with gradients enabled, and left as they are: {', '.join(idle)}"
        )
    if live.no_regions:
        notes.append(left_out(live.no_regions))
    if not profile.in_order:
        notes.append(
            "backward does not pass the blocks in the opposite order of forward, which the search "
            "for a plan assumes; the plan's peak was predicted as it is"
        )
    if not live.predictable:
        notes.append("bytes are those of real steps: the step asks for values while it runs")
    if profile.waits_for_host:
        notes.append(
            "the host is the bound: the device waits for it, and the times are the host's; CUDA "
            "graphs and memopt.compile are ways out"
        )
    margin = trace_of(chosen.observed.ledger, 0.0).peak.margin
    if margin:
        notes.append(
            f"up to {as_text(margin)} of the peak may not be allocated: a bound of kernels' scratch"
        )
    if chosen.observed.again:
        notes.append(note_on(chosen.observed.again))
    if chosen.assignment.offloads and chosen.assignment.in_step:
        notes.append(
            "the budget leaves no space for copies that leave late: each block waits at its end "
            "until what it offloads has left"
        )
    model = live.step.model
    regions = chosen.assignment.where(lambda choice: choice.checkpoint or bool(choice.parts))
    on_caches = note_on_caches(model, [model.get_submodule(path) for path in regions])
    notes += filter(None, (on_caches, note_on_mode(model)))
    plan = Plan(
        model=type(model).__qualname__,
        budget=budget,
        blocks=(),
        peak=0,
        seconds=0.0,
        plain_peak=by_arithmetic.peak if plain is None else plain.nbytes.peak,
        plain_seconds=by_arithmetic.seconds,
        measured_peak=None,
        is_timed=profile.is_timed,
        notes=tuple(notes),
        assignment=chosen.assignment,
        profile=profile,
        terms=terms,
        signature=stored.signature_of(model, (*profile.blocks, *profile.heads)),
        plain_trace=None if plain is None else trace_of(plain.ledger, 0.0),
        live=live,
    )
    plan._take(chosen)
    return plan
