"""Offloading: saved tensors that live in host memory, or on disk, between forward and backward.

The engine is C++ (csrc/offload). The modules of this package:

    api     `memopt.offload`, and its limits
    stats   what offloading has done, and what to change
"""

from memopt._offload import api
from memopt._offload.stats import OffloadStats, offload_stats
from memopt._public import P, PublicFunction, R_co

__all__ = ["offload", "offload_stats"]


class _Offload(PublicFunction[P, R_co]):
    Stats = OffloadStats
    configure = staticmethod(api.configure_offload)
    empty_cache = staticmethod(api.empty_offload_cache)
    stats = staticmethod(offload_stats)


offload = _Offload(api.offload)
