"""The anatomy of a training step's memory: what is where, predicted and measured.

After `import memopt`, the attribute `memopt.anatomy` is the function. The modules of this package
can still be imported:

    api       `anatomy`
    findings  what is known of a step; table, page and figure show it
    formulas  closed formulas for transformers
    report    what `anatomy` returns: findings that show themselves

Steps, ledgers and predictions are memopt/memory, other fates and advice memopt/whatif.
"""

from memopt._submodules import add_submodules
from memopt.anatomy.api import anatomy
from memopt.anatomy.report import Anatomy
from memopt.memory.predicted.outcome import DependsOnValues
from memopt.whatif.advice import Advice

__all__ = ["Advice", "Anatomy", "DependsOnValues", "anatomy"]

add_submodules(anatomy, __name__)
