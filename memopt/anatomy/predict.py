"""A step's memory, predicted."""

from __future__ import annotations

import copy
import time
from typing import Any

from memopt.anatomy.hollow import HollowLedger, hollow_copy
from memopt.anatomy.ledger import Ledger
from memopt.anatomy.step import Step, traced
from memopt.anatomy.trace import Trace, trace_of
from memopt.anatomy.whatif import AsOnCuda, Fates, as_on_cuda, offloaded


def predict(step: Step, fates: Fates, target: str) -> tuple[Trace, Ledger]:
    """The trace of a step that computes nothing, on copies; and its ledger.

    Raises:
        DependsOnValues: the step looks at values.
    """
    (model, optimizer, batch), without = hollow_copy((step.model, step.optimizer, step.batch))
    fates.apply(model)
    context: Any = step.context
    if target == "cuda":
        as_on_cuda(optimizer)
        context = AsOnCuda
    ledger = HollowLedger(model, target, without)
    hollow = copy.copy(step)
    hollow.model, hollow.optimizer, hollow.batch, hollow.context = model, optimizer, batch, context
    start = time.perf_counter()
    traced(hollow, ledger)
    entries = offloaded(ledger, fates) if fates.offload else None
    return trace_of(ledger, time.perf_counter() - start, entries), ledger
