"""`fairscale.nn`, as far as it is about checkpoints."""

from memopt.compat.fairscale.nn.checkpoint import checkpoint_wrapper

__all__ = ["checkpoint_wrapper"]
