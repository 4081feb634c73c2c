"""Activation checkpointing: regions whose saved tensors are recomputed in backward.

The modules of this package:

    region      `checkpoint` and its options
    settings    how a region runs, and running statistics that stand still in its recompute
    partition   the ranks that share a region's inputs
    wrapper     a module whose every forward is a region
    buffers     their inputs in memory that is allocated once
    apply       which submodules of a model are wrapped
    assigned    the regions of an assignment (memopt/assignment.py)
    measured    which, by what a step with a batch keeps
    best        the set of modules that gives a tree of calls the least peak
    blocks      which of them are its blocks
    probe       which modules can be recomputed, on a sample
    state       the values that a module holds at one moment
    other       checkpointing of a model's own
    sequential  a chain of stages whose segments are regions
    segments    where to cut such a chain
    stage_bytes the bytes that each stage of it saves, counted
    flags       where the calling thread is: first forward, recompute, or neither
    decisions   what a region chose in forward, kept for its recompute
    chunks      a call in chunks of rows
    rows        whether a call works on each row alone
    row_modules the modules of a model that do
    selective   the operators that a selective checkpoint should keep
    uncompiled  a region's function runs out of sight of torch.compile
    debug       the operators that forward and recompute ran, for error messages
    caches      caches of keys and values, which must not grow twice
    naming      the name of a region in error messages

The engine itself is csrc/saved: regions, slots, random generators, autocast, host copies.
"""

from memopt._checkpoint import region
from memopt._checkpoint.apply import apply_activation_checkpointing
from memopt._checkpoint.buffers import CheckpointBuffers, checkpoint_buffers
from memopt._checkpoint.decisions import decision_contexts
from memopt._checkpoint.flags import disable_checkpointing, is_checkpointing, is_recomputing
from memopt._checkpoint.selective import ops_worth_saving
from memopt._checkpoint.sequential import checkpoint_sequential
from memopt._checkpoint.wrapper import checkpoint_wrapper, unwrap
from memopt._public import P, PublicFunction, R_co

__all__ = [
    "CheckpointBuffers",
    "apply_activation_checkpointing",
    "checkpoint",
    "checkpoint_buffers",
    "checkpoint_sequential",
    "checkpoint_wrapper",
    "decision_contexts",
    "disable_checkpointing",
    "is_checkpointing",
    "is_recomputing",
    "ops_worth_saving",
    "unwrap",
]


class _Checkpoint(PublicFunction[P, R_co]):
    Buffers = CheckpointBuffers
    buffers = staticmethod(checkpoint_buffers)
    decision_contexts = staticmethod(decision_contexts)
    disable = staticmethod(disable_checkpointing)
    is_checkpointing = staticmethod(is_checkpointing)
    is_recomputing = staticmethod(is_recomputing)
    ops_worth_saving = staticmethod(ops_worth_saving)


checkpoint = _Checkpoint(region.checkpoint)
