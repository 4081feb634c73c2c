"""The seconds of each stage: measured in real steps, or estimated from the work of a ledger."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from memopt._plan.watch import BlockCall, Watch, spans_of
from memopt._progress import doing
from memopt.memory.batches import device_of
from memopt.memory.ledger import Ledger
from memopt.memory.speed import Speed
from memopt.memory.step import Step
from memopt.memory.totals import Position
from memopt.memory.unchanged import Written, unchanged


@dataclass(frozen=True)
class StageSeconds:
    """The seconds of one stage, with the choice that it had."""

    forward: float
    backward: float
    """Seconds of backward, with the recompute."""

    def scaled(self, to: StageSeconds, of: StageSeconds) -> StageSeconds:
        """These seconds times what `to` takes over what `of` does."""
        whole = of.forward + of.backward
        factor = (to.forward + to.backward) / whole if whole else 1.0
        return StageSeconds(factor * self.forward, factor * self.backward)


@dataclass(frozen=True)
class TimedStages:
    """The seconds of a real step."""

    stages: list[StageSeconds]
    behind: float | None
    """The share of the step that the device took when the host had given it everything; None where
    the device is the host. Near 0 the device waits for the host all the time, and the seconds,
    which its events tell, are the host's.
    """


class _Clock:
    """Moments on a device: of the host, or events on an accelerator's stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = None if device.type == "cpu" else device
        self._first: Any = None
        self._begun = time.perf_counter()

    def stamp(self) -> Any:
        if self._device is None:
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        self._first = self._first or event
        return event

    def end(self) -> float | None:
        """Wait for the device: how far it was behind (see TimedStages)."""
        if self._device is None:
            return None
        given = time.perf_counter()
        torch.accelerator.synchronize(self._device)
        done = time.perf_counter()
        return (done - given) / (done - self._begun)

    def seconds(self, stamp: Any) -> float:
        """Since the first stamp."""
        since: float = stamp if self._device is None else 1e-3 * self._first.elapsed_time(stamp)
        return since


def measured_seconds(step: Step, paths: Sequence[str], written: Written) -> TimedStages:
    """Time a real step: the stages of forward and backward of one micro-batch, by the model as it
    is. All that it changes is put back.

    Args:
        written: what such steps write of what is there before.
    """
    doing("timing step")
    model = step.model
    device = device_of(step.who, model, step.batch)
    with unchanged(*step.roots, written=written):
        clock = _Clock(device)
        turns: list[Any] = []
        with Watch(model, paths, clock.stamp) as watch:
            timed = replace(step, watching=watch.of_function)
            timed.forward_and_backward(
                step.batches()[0],
                lambda _: turns.append(clock.stamp()),
                lambda: turns.append(clock.stamp()),
            )
        behind = clock.end()
    return TimedStages(_stages(watch, clock, turns[-2], turns[-1]), behind)


def estimated_seconds(
    ledger: Ledger,
    begun: Position,
    called: Sequence[BlockCall[Position]],
    speed: Speed,
    turned: Sequence[tuple[Position, Position]] = (),
) -> list[StageSeconds]:
    """Estimate a ledger's step by the operations and bytes of its work.

    Args:
        begun: when forward began.
        called: the blocks' calls.
        turned: when each backward of a step's own function began and ended.
    """
    phases = [work.phase for work in ledger.work]
    end = phases.index("optimizer") if "optimizer" in phases else len(phases)
    is_turn = (p for p in range(end - 1, -1, -1) if phases[p] == "forward")
    turn = next(is_turn, -1) + 1

    def took(span: tuple[int, int] | None) -> float:
        return 0.0 if span is None else sum(map(speed.seconds, ledger.work[slice(*span)]))

    spans = spans_of(called, begun, turned, lambda moment: moment.work, turn, end)
    return [StageSeconds(took(there), took(back)) for there, back in spans]


def _stages(watch: Watch[Any], clock: _Clock, turn: Any, end: Any) -> list[StageSeconds]:
    seconds = clock.seconds
    spans = spans_of(watch.calls, watch.start, watch.turns, seconds, seconds(turn), seconds(end))
    return [
        StageSeconds(stop - begin, 0.0 if span is None else span[1] - span[0])
        for (begin, stop), span in spans
    ]
