"""memopt: what becomes of a tensor that autograd saves for backward.

Kept, recomputed from what is saved anyway (memopt.functional, memopt.nn), checkpointed or offloaded
(memopt.checkpoint, memopt.checkpoint_wrapper).
"""

from memopt import functional, nn
from memopt._extension import build_info
from memopt._version import __version__

# The function takes the name of its package; the package's modules stay importable
# (memopt.checkpoint.wrapper).
from memopt.checkpoint import (
    checkpoint,
    checkpoint_wrapper,
    disable_checkpointing,
    is_checkpointing,
    is_recomputing,
    unwrap,
)

__all__ = [
    "__version__",
    "build_info",
    "checkpoint",
    "checkpoint_wrapper",
    "disable_checkpointing",
    "functional",
    "is_checkpointing",
    "is_recomputing",
    "nn",
    "unwrap",
]
