"""Says of each block of a model what was asked of it and what happened.

asked     fates that a model's modules are set to, by memopt and by others
observed  what each module does in a real step
report    `Check`: the table, and whether everything took effect
api       `memopt.check`
"""

from memopt._check.api import check
from memopt._check.report import Check, CheckedBlock, FateWithoutEffect

__all__ = ["Check", "CheckedBlock", "FateWithoutEffect", "check"]
