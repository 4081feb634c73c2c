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

After `import memopt`, the attribute `memopt.convert` is the function. It has the names below and
the modules above as attributes (`memopt.convert.rule`, `import memopt.convert.report`);
`from memopt.convert import rule` works as well.
"""

from memopt._submodules import add_submodules
from memopt.convert.api import convert, revert
from memopt.convert.match import Context, Reason, Rule
from memopt.convert.patch import patch_functional
from memopt.convert.register import register_rule, rule
from memopt.convert.report import Report
from memopt.convert.swap import ClassSwap, ForwardSwap, Swap

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

add_submodules(convert, __name__)
for _attribute in (ClassSwap, Context, ForwardSwap, Reason, Report, Swap, register_rule, rule):
    setattr(convert, _attribute.__name__, _attribute)
