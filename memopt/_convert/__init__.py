"""memopt for unmodified models: modules are matched against a list of rules, and swapped.

    api          convert and revert: match, swap, report
    match        asks the rules about each module of a model
    rules        memopt's own rules, one file each, and the list of them
    register     rules of your own
    swap         what a rule answers: how a module becomes memopt's
    recipes, regions   what convert puts around the forward of the model, and of its blocks
    report       what convert returns
    sample       counts what the model saves with a sample input
    remaining    what is still saved, and what would help
    skip         which modules are to stay as they are
    supported    which calls memopt's ops support
    probe        runs stand-ins of modules, to see what these compute
    functions    `memopt.convert.functions`

`memopt.convert` has the names below as attributes: `memopt.convert.rule`.
"""

from memopt._convert import api
from memopt._convert.api import revert
from memopt._convert.functions import memopt_functions
from memopt._convert.match import Context, Reason, Rule
from memopt._convert.register import register_rule, rule
from memopt._convert.report import Report
from memopt._convert.swap import ClassSwap, ForwardSwap, Swap
from memopt._public import P, PublicFunction, R_co

__all__ = [
    "ClassSwap",
    "Context",
    "ForwardSwap",
    "Reason",
    "Report",
    "Rule",
    "Swap",
    "convert",
    "register_rule",
    "revert",
    "rule",
]


class _Convert(PublicFunction[P, R_co]):
    ClassSwap = ClassSwap
    Context = Context
    ForwardSwap = ForwardSwap
    Reason = Reason
    Report = Report
    Swap = Swap
    functions = staticmethod(memopt_functions)
    register_rule = staticmethod(register_rule)
    rule = staticmethod(rule)


convert = _Convert(api.convert)
