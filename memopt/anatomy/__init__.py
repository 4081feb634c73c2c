"""The anatomy of a training step's memory: what is where, predicted and measured.

After `import memopt`, the attribute `memopt.anatomy` is the function. The modules of this package
can still be imported:

    api       `anatomy`
    pieces    pieces of memory, their categories and fates
    ledger    every piece of memory of a step, from its birth to its end
    places    where something was made: a module, a line of user code
    hollow    tensors without values, and a ledger that computes nothing
    step      one training step under a ledger
    away      a real step whose activations leave the device
    predict   a step's memory without running it
    whatif    other fates, another device
    trace     what a ledger says: moments, timeline, shares
    work      kinds of operators, their operations and bytes
    formulas  closed formulas for transformers
    advice    what would help
    findings  what is known of a step; table, page and figure show it
    report    what `anatomy` returns: findings that show themselves
    batches   a batch and its parts
    presets   models by name
    command   `python -m memopt anatomy`
"""

from memopt._submodules import add_submodules
from memopt.anatomy.api import anatomy
from memopt.anatomy.findings import Advice
from memopt.anatomy.report import Anatomy
from memopt.memory.predicted.outcome import DependsOnValues

__all__ = ["Advice", "Anatomy", "DependsOnValues", "anatomy"]

add_submodules(anatomy, __name__)
