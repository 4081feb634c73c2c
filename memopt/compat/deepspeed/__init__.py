"""DeepSpeed's names for checkpointed regions: `deepspeed.checkpointing`.

    from memopt.compat.deepspeed import checkpointing
    checkpointing.configure(mpu, partition_activations=True)
    hidden = checkpointing.checkpoint(layer, hidden, mask)

DeepSpeed's engine, optimizers and pipelines are not here.
"""

from memopt.compat.deepspeed import checkpointing

__all__ = ["checkpointing"]
