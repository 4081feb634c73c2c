"""The anatomy of a training step's memory: what is where, predicted and measured.

The modules of this package:

    api       `anatomy`
    findings  what is known of a step; table, page and figure show it
    formulas  closed formulas for transformers
    report    what `anatomy` returns: findings that show themselves

Steps, ledgers and predictions are memopt/memory, other fates and advice memopt/whatif.
"""

from memopt._anatomy import api
from memopt._anatomy.report import Anatomy
from memopt._public import P, PublicFunction, R_co
from memopt._snapshot.read import read_snapshot
from memopt.whatif.advice import Advice

__all__ = ["Advice", "Anatomy", "anatomy"]


class _Anatomy(PublicFunction[P, R_co]):
    read_snapshot = staticmethod(read_snapshot)


anatomy = _Anatomy(api.anatomy)
