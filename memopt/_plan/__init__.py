"""The planner: a budget of bytes in, a fate for each block out.

The modules of this package:

    api      `plan`
    fit      `fit`: the largest micro-batch, and the plan for it
    planned  what a plan says; table, figure and page show it, stored keeps it
    plan     what `plan` returns: applied, chosen again, shown
    choices  what a plan may choose for a block (memopt/assignment.py)
    watch    when a step enters and leaves each block
    bytes    what each stage of a step holds, from a ledger
    seconds  how long each takes, measured or estimated
    times    what the times of real steps say of choices
    observe  one step with choices, predicted or watched
    parts    sets of a block's parts that are worth regions
    profile  what blocks of each kind cost with each choice
    samples  the steps that show it
    groups   consecutive calls that share one region
    live     a model that is being planned
    own      what a model brings that a plan would choose
    shared   blocks that are called several times
    solver   the dynamic programme (csrc/plan)
    choose   solve, predict, correct, and solve again
    curve    all budgets, and the usual settings
    compiled a plan for a model that is compiled
    floor    why a budget is too small
    least    the peak with the plan that needs least
    link     how fast activations leave and return
    ranks    one plan for all ranks
"""

from memopt._plan.api import plan
from memopt._plan.compiled import CompiledPlan
from memopt._plan.fit import Fitted, fit
from memopt._plan.plan import Plan
from memopt._plan.planned import PlannedBlock

__all__ = [
    "CompiledPlan",
    "Fitted",
    "Plan",
    "PlannedBlock",
    "fit",
    "plan",
]
