"""FairScale's names for checkpointed modules, where its users import them from.

    from memopt.compat.fairscale.nn import checkpoint_wrapper
    from memopt.compat.fairscale.nn.checkpoint import is_checkpointing, is_recomputing
    from memopt.compat.fairscale.nn.checkpoint.checkpoint_activations import disable_checkpointing
    from memopt.compat.fairscale.nn.misc import checkpoint_wrapper  # of before 0.3.7

They are memopt's own functions. Sharding, pipelines and the rest of FairScale are not here.
"""
