"""memopt: what becomes of a tensor that autograd saves for backward.

It may be kept; made again from what is saved anyway (memopt.functional and memopt.nn, and
memopt.recipes() for whatever reads their outputs); or belong to a region that is checkpointed or
offloaded (memopt.checkpoint, memopt.checkpoint_wrapper). memopt.saved_tensors picks the fate of
each tensor. memopt.convert brings all this to an unmodified model, memopt.compile to a compiled
one. memopt.saved_bytes counts the bytes that are saved, and memopt.anatomy says where all memory
of a training step is. memopt.plan chooses among all this for each block, within a budget of bytes.
"""

from memopt import functional, nn
from memopt._accumulate import Accumulated, accumulate, largest_batch, longest_sequence
from memopt._anatomy import Anatomy, anatomy
from memopt._checkpoint import (
    CheckpointBuffers,
    apply_checkpointing,
    checkpoint,
    checkpoint_buffers,
    checkpoint_sequential,
    checkpoint_wrapper,
    disable_checkpointing,
    is_checkpointing,
    is_recomputing,
    ops_worth_saving,
    unwrap,
)
from memopt._compile import compile, compile_options
from memopt._convert import Report, convert, patch_functional, revert
from memopt._extension import build_info
from memopt._offload import (
    OffloadStats,
    configure_offload,
    empty_offload_cache,
    offload,
    offload_stats,
)
from memopt._plan import BudgetTooSmall, CompiledPlan, Fitted, Plan, fit, plan, plan_compiled
from memopt._version import __version__
from memopt.fates import saved_tensors
from memopt.memory.saved import saved_bytes
from memopt.recipes import recipes

__all__ = [
    "Accumulated",
    "Anatomy",
    "BudgetTooSmall",
    "CheckpointBuffers",
    "CompiledPlan",
    "Fitted",
    "OffloadStats",
    "Plan",
    "Report",
    "__version__",
    "accumulate",
    "anatomy",
    "apply_checkpointing",
    "build_info",
    "checkpoint",
    "checkpoint_buffers",
    "checkpoint_sequential",
    "checkpoint_wrapper",
    "compile",
    "compile_options",
    "configure_offload",
    "convert",
    "disable_checkpointing",
    "empty_offload_cache",
    "fit",
    "functional",
    "is_checkpointing",
    "is_recomputing",
    "largest_batch",
    "longest_sequence",
    "nn",
    "offload",
    "offload_stats",
    "ops_worth_saving",
    "patch_functional",
    "plan",
    "plan_compiled",
    "recipes",
    "revert",
    "saved_bytes",
    "saved_tensors",
    "unwrap",
]
