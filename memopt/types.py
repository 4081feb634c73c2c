"""The classes of what memopt's functions return, for annotations and isinstance."""

from memopt._accumulate import Accumulated
from memopt._anatomy import Advice, Anatomy
from memopt._check import Check, CheckedBlock, FateWithoutEffect
from memopt._checkpoint import CheckpointBuffers
from memopt._convert import Report
from memopt._fits import Fits
from memopt._offload.stats import OffloadStats
from memopt._plan import CompiledPlan, Fitted, Plan, PlannedBlock
from memopt._snapshot import Snapshot

__all__ = [
    "Accumulated",
    "Advice",
    "Anatomy",
    "Check",
    "CheckedBlock",
    "CheckpointBuffers",
    "CompiledPlan",
    "FateWithoutEffect",
    "Fits",
    "Fitted",
    "OffloadStats",
    "Plan",
    "PlannedBlock",
    "Report",
    "Snapshot",
]
