"""Activation checkpointing: regions whose saved tensors are made again in backward.

After `import memopt`, the attribute `memopt.checkpoint` is the function. The modules of this
package are there for `from memopt.checkpoint.wrapper import ...`:

    flags       where the calling thread is: first forward, recompute, or neither
    ambient     what a result depends on besides the arguments: generators, autocast, default device
    arguments   the region's arguments, from forward until the recompute
    offload     an argument that waits in host memory
    batch_norm  running statistics that stand still in the recompute
    region      the region itself, and `checkpoint`
    wrapper     a module whose every forward is a region
"""

from memopt.checkpoint.flags import disable_checkpointing, is_checkpointing, is_recomputing
from memopt.checkpoint.region import checkpoint
from memopt.checkpoint.wrapper import checkpoint_wrapper, unwrap

__all__ = [
    "checkpoint",
    "checkpoint_wrapper",
    "disable_checkpointing",
    "is_checkpointing",
    "is_recomputing",
    "unwrap",
]
