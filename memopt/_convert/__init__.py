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
    patch        patch_functional

`memopt.convert` has the names below as attributes: `memopt.convert.rule`.
"""

from memopt._convert.api import convert, revert
from memopt._convert.match import Context, Reason, Rule
from memopt._convert.patch import patch_functional
from memopt._convert.register import register_rule, rule
from memopt._convert.report import Report
from memopt._convert.swap import ClassSwap, ForwardSwap, Swap

__all__ = [
    "ClassSwap",
    "Context",
    "ForwardSwap",
    "Reason",
    "Report",
    "Rule",
    "Swap",
    "convert",
    "patch_functional",
    "register_rule",
    "revert",
    "rule",
]

for _attribute in (ClassSwap, Context, ForwardSwap, Reason, Report, Swap, register_rule, rule):
    setattr(convert, _attribute.__name__, _attribute)
