"""`fairscale.nn.misc.checkpoint_activations`, as of before 0.3.7."""

from memopt.compat.fairscale.nn.checkpoint import checkpoint_wrapper

__all__ = ["checkpoint_wrapper"]
