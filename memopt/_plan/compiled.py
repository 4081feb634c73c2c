"""A plan for a model that is compiled: memopt.compile chooses what its graphs keep."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from memopt._compile import compile
from memopt._errors import in_the_name_of
from memopt._plan import ranks
from memopt._plan.choose import too_much_measured
from memopt._plan.live import Live
from memopt._progress import doing, progress
from memopt.memory.allocator import most_above
from memopt.memory.predicted.predict import hollow_step
from memopt.memory.sizes import BudgetTooSmall, as_text, at_least
from memopt.memory.step import Step
from memopt.memory.totals import totals_of
from memopt.memory.unchanged import unchanged
from memopt.show.sections import Section, Tables
from memopt.show.shown import Shown

# It is compiled and measured so often, each time for less.
_MOST_TRIES = 3


@dataclass
class CompiledPlan(Shown):
    """The share of a step's budget that compiled graphs may take: see `memopt.plan`."""

    budget: int
    base: int
    """Weights, optimizer states and the batch."""
    optimizer: int
    """The most in the optimizer's step, above base."""
    graph_budget: int
    """The budget that `memopt.compile` is told."""
    measured_peak: int | None
    """The peak of a step of the compiled model; None before `apply`."""
    live: Live = field(repr=False)

    def tables(self) -> Tables:
        """The parts of the budget."""
        peak = (
            "apply() compiles the model, and measures the peak of a step"
            if self.measured_peak is None
            else f"peak {as_text(self.measured_peak)} measured"
        )
        parts = [
            ["weights, optimizer states, batch", as_text(self.base)],
            ["what compiled graphs may take", as_text(self.graph_budget)],
            ["what the optimizer's step takes, in their place", as_text(self.optimizer)],
        ]
        title = f"{type(self.live.step.model).__name__}, compiled, within {as_text(self.budget)}"
        return Tables(f"{title}\n{peak}", [Section("", ("Part", "bytes"), parts)], ())

    @in_the_name_of("CompiledPlan.apply", "plan", "compile")
    @progress("CompiledPlan.apply")
    def apply(self, **options: Any) -> Any:
        """Compile the model, run a step of it, and measure its peak. If that is above the budget,
        compile for so much less, at most three times in all. The model itself does not change.

        Args:
            options: of `memopt.compile`: fullgraph, dynamic, mode, options.

        Returns:
            The compiled model.

        Raises:
            BudgetTooSmall: no graph fits, or what was measured does not.
        """
        step = self.live.step
        for _ in range(_MOST_TRIES):
            doing("compiling")
            compiled = compile(step.model, budget=self.graph_budget, **options)
            measured = self.base + max(self._above(step, compiled), self.optimizer)
            if measured <= self.budget:
                self.measured_peak = measured
                return compiled
            self.graph_budget -= measured - self.budget
            if self.graph_budget <= 0:
                break
        raise too_much_measured(measured, self.budget, "graph")

    def _above(self, step: Step, compiled: Any) -> int:
        """The most bytes of a forward and a backward above what is there already."""
        import torch._dynamo  # a second to import, which only those that compile wait for

        device = next(step.model.parameters()).device
        with unchanged(*step.roots, written=self.live.written):
            batch = step.batches()[0]
            try:
                # Beyond a limit PyTorch runs a function without a graph: not what is measured here.
                with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
                    step.forward(batch, compiled).backward()  # is compiled
            except torch._dynamo.exc.FailOnRecompileLimitHit as error:
                raise RuntimeError(
                    "plan: a compiled step cannot be measured where PyTorch compiles the "
                    "model no more: in this process it did so "
                    f"{torch._dynamo.config.recompile_limit} times "
                    "(torch._dynamo.config.recompile_limit). Call torch._dynamo.reset() before"
                ) from error
            except Exception as error:
                below_floor = _too_small(error, self)
                if below_floor is None:
                    raise
                raise below_floor from error
            step.model.zero_grad(set_to_none=True)
            return ranks.most(most_above(device, lambda: step.forward(batch, compiled).backward()))


def compiled_plan(live: Live, budget: int) -> CompiledPlan:
    """The plan for a budget.

    Raises:
        BudgetTooSmall: what is there whatever is kept leaves nothing for a graph.
    """
    found = hollow_step(live.step, None, live.target)
    live.written.add(found.written.tensors)
    ledger = found.ledger
    base = sum(entry.piece.nbytes for entry in ledger.log if entry.instant == 0)
    behind = zip(ledger.log, totals_of(ledger)[1:], strict=True)
    in_optimizer = (t for entry, t in behind if ledger.phases[entry.instant] == "optimizer")
    optimizer = max(0, max(in_optimizer, default=0) - base)
    if base + max(optimizer, 1) > budget:
        needed, got = at_least(base + optimizer, budget)
        raise BudgetTooSmall(
            f"plan: budget must be above {needed}, which weights, gradients, optimizer "
            f"states and the batch take, got {got}",
            base + optimizer,
        )
    return CompiledPlan(budget, base, optimizer, budget - base, None, live)


def _too_small(error: BaseException, plan: CompiledPlan) -> BudgetTooSmall | None:
    """If the compiler says that no graph fits."""
    text = str(error)
    start = text.find("compile: budget must be at least")
    if start < 0:
        return None
    said = text[start:].splitlines()[0]
    return BudgetTooSmall(
        f"plan: of a budget of {as_text(plan.budget)} there are left for a compiled graph "
        f"{as_text(plan.graph_budget)}: {said}",
        plan.budget,
    )
