"""`fairscale.nn.misc`, where FairScale had checkpoint_wrapper before 0.3.7, and an alias since."""

from memopt.compat.fairscale.nn.misc.checkpoint_activations import checkpoint_wrapper

__all__ = ["checkpoint_wrapper"]
