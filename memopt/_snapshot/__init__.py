"""PyTorch's memory snapshots: a prediction written as one, and one read as a report.

The modules of this package:

    write     a step's pieces as a snapshot, for https://pytorch.org/memory_viz
    read      `memopt.anatomy.read_snapshot`: what was alive at the peak, by category and line
    stacks    the category that the frames of an allocation tell
    report    what `read_snapshot` returns
"""

from memopt._snapshot.read import read_snapshot
from memopt._snapshot.report import Snapshot
from memopt._snapshot.write import write_snapshot

__all__ = ["Snapshot", "read_snapshot", "write_snapshot"]
