"""memopt: what becomes of a tensor that autograd saves for backward.

Kept, recomputed from what is saved anyway (memopt.functional, memopt.nn), checkpointed or offloaded
(memopt.checkpoint, memopt.checkpoint_wrapper).
"""

from memopt import functional, nn
from memopt._extension import build_info
from memopt._version import __version__

__all__ = [
    "__version__",
    "build_info",
    "functional",
    "nn",
]
