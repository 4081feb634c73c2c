"""Gradient accumulation, and what fits into a budget of bytes.

After `import memopt`, the attribute `memopt.accumulate` is the function. The modules of this
package can still be imported:

    loop    `accumulate`
    run     one batch in micro-batches
    peers   the processes of a sharded model, in step with each other
    weight  with what weight a micro-batch's loss counts
    chosen  what a choice of "auto" depends on
    sync    when gradients travel between processes
    undo    a micro-batch that ran out of memory, undone
    measured  the peak of a step that runs
    fit     `largest_batch`, `longest_sequence`, and the largest micro-batch, by prediction
"""

from memopt._submodules import add_submodules
from memopt.accumulate.fit import largest_batch, longest_sequence
from memopt.accumulate.loop import accumulate
from memopt.accumulate.run import Accumulated

__all__ = ["Accumulated", "accumulate", "largest_batch", "longest_sequence"]

add_submodules(accumulate, __name__)
