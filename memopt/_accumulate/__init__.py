"""Gradient accumulation, and what fits into a budget of bytes.

The modules of this package:

    loop    `accumulate`
    run     one batch in micro-batches
    peers   the processes of a sharded model, in step with each other
    weight  with what weight a micro-batch's loss counts
    chosen  what a choice of "auto" depends on
    undo    a micro-batch that ran out of memory, undone
    fit     `largest_batch`, `longest_sequence`, and the largest micro-batch, by prediction
"""

from memopt._accumulate.fit import largest_batch, longest_sequence
from memopt._accumulate.loop import accumulate
from memopt._accumulate.run import Accumulated

__all__ = ["Accumulated", "accumulate", "largest_batch", "longest_sequence"]
