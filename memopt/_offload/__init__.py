"""Offloading: saved tensors that live in host memory, or on disk, between forward and backward.

The engine is C++ (csrc/offload); how it is used is in `api`, what it has done in `stats`.
"""

from memopt._offload.api import configure_offload, empty_offload_cache, offload
from memopt._offload.stats import OffloadStats, offload_stats

__all__ = [
    "OffloadStats",
    "configure_offload",
    "empty_offload_cache",
    "offload",
    "offload_stats",
]
