"""memopt decides what becomes of each tensor that autograd saves for backward.

A saved tensor is kept; recomputed from a recipe (memopt.functional, memopt.nn and memopt.recipes);
recomputed with its checkpointed region (memopt.checkpoint, memopt.checkpoint_wrapper); or offloaded
(memopt.offload). memopt.saved_tensors picks for each tensor. memopt.convert brings all this to an
unmodified model, memopt.compile to a compiled one. memopt.saved_bytes counts the bytes that are
kept for backward, and memopt.anatomy says where all memory of a training step is. memopt.plan
chooses for each block, within a budget of bytes.

Some functions have others under their name: memopt.checkpoint.buffers, memopt.compile.options,
memopt.convert.rule, memopt.offload.stats. The classes of results are in memopt.types.
"""

import sys
import warnings
from typing import Any

from memopt import functional, nn, types
from memopt._accumulate import accumulate, largest_batch, longest_sequence
from memopt._anatomy import anatomy
from memopt._check import check
from memopt._checkpoint import (
    apply_activation_checkpointing,
    checkpoint,
    checkpoint_sequential,
    checkpoint_wrapper,
    unwrap,
)
from memopt._compile import compile
from memopt._convert import convert, revert
from memopt._extension import HAS_NATIVE, build_info
from memopt._fits import fits
from memopt._offload import offload
from memopt._plan import Plan, fit, plan
from memopt._public import moved
from memopt._version import __version__
from memopt.fates import saved_tensors
from memopt.memory.predicted.outcome import DependsOnValues
from memopt.memory.saved import saved_bytes
from memopt.memory.sizes import BudgetTooSmall
from memopt.recipes import recipes

__all__ = [
    "BudgetTooSmall",
    "DependsOnValues",
    "Plan",
    "__version__",
    "accumulate",
    "anatomy",
    "apply_activation_checkpointing",
    "build_info",
    "check",
    "checkpoint",
    "checkpoint_sequential",
    "checkpoint_wrapper",
    "compile",
    "convert",
    "fit",
    "fits",
    "functional",
    "largest_batch",
    "longest_sequence",
    "nn",
    "offload",
    "plan",
    "recipes",
    "revert",
    "saved_bytes",
    "saved_tensors",
    "types",
    "unwrap",
]


if not HAS_NATIVE:
    warnings.warn(
        "memopt was installed without its native library: regions are PyTorch's own checkpoint, "
        "there are plan, anatomy and check, and neither recipes nor offloading",
        stacklevel=2,
    )


def __getattr__(name: str) -> Any:
    return moved(sys.modules[__name__], name)
