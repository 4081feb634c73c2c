"""rotor: optimal checkpointing of chains, by its published recurrence, for comparison.

O. Beaumont, L. Eyraud-Dubois, J. Herrmann, A. Joly, A. Shilova, "Optimal checkpointing for
heterogeneous chains: how to train deep neural networks with limited memory" (hal-02352969), the
theorem on the optimal memory-persistent schedule, restated here.

A chain of stages 0..n-1. In units of memory: `sizes[i]`, the input of stage i, and so of the
gradient by it (sizes[n]: the chain's output); `saved[i]`, all that stage i saves for backward, with
its output and without its input; `forward_extra[i]` and `backward_extra[i]`, what a stage needs
beside that while it runs. A schedule is a list of operations on stages:

    checkpoint   forward that keeps the stage's input and nothing else
    forget       forward that keeps nothing, not its input either
    save         forward that saves all that backward needs
    backward     with what `save` has saved

With C(s, t, m) the least time to run stages s..t forward and backward in memory m, the input of s
not counted and the gradient by the output of t counted:

    C(s, s, m) = f[s] + b[s]                                       if m >= all(s, s)
    C(s, t, m) = the lesser of
        f[s] + C(s+1, t, m - saved[s]) + b[s]                      if m >= all(s, t)
        min over s < k <= t of
            f[s] + .. + f[k-1] + C(k, t, m - sizes[k]) + C(s, k-1, m)    if m >= none(s, t)

where all(s, t) and none(s, t) are what the first forward and backward, and the forwards up to the
last, need themselves.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.memory import held_bytes, peak_bytes

SLOTS = 500  # the paper's: sizes are rounded up to this many parts of the memory


@dataclass(frozen=True)
class Chain:
    """Sizes in any unit (bytes), times in any unit (seconds); see the top of this file."""

    sizes: Sequence[float]
    saved: Sequence[float]
    forward_times: Sequence[float]
    backward_times: Sequence[float]
    forward_extra: Sequence[float]
    backward_extra: Sequence[float]
    """With the gradient by the stage's input, which it makes."""

    def __len__(self) -> int:
        return len(self.saved)


class Operation(NamedTuple):
    name: str
    """checkpoint, forget, save or backward."""
    stage: int


Schedule = list[Operation]


class Solved(NamedTuple):
    seconds: float
    schedule: Schedule


def rotor(chain: Chain, memory: float, slots: int = SLOTS) -> Solved | None:
    """The fastest schedule in `memory`, with the chain's input and the gradient by its output; None
    if there is none. Sizes are rounded up to memory / slots, so that it keeps the bound.

    Time O(slots n^3), memory O(slots n^2).
    """
    n = len(chain)

    def in_slots(sizes: Sequence[float]) -> list[int]:
        # Rounding in the division must not cost a slot.
        return [math.ceil(size * slots / memory - 1e-9) for size in sizes]

    sizes, saved = in_slots(chain.sizes), in_slots(chain.saved)
    forward_extra, backward_extra = in_slots(chain.forward_extra), in_slots(chain.backward_extra)
    start = [0.0, *accumulate(chain.forward_times)]  # start[k] - start[s]: forwards of s..k-1
    left = np.arange(slots + 1)

    # By (s, t): for each m the time, and how to begin: 0 saves all of s, else the k of the minimum.
    times: dict[tuple[int, int], np.ndarray] = {}
    begin: dict[tuple[int, int], np.ndarray] = {}

    def with_less(values: np.ndarray, less: int) -> np.ndarray:
        """values[m - less] for each m."""
        shifted = np.full(slots + 1, np.inf)
        if less <= slots:
            shifted[less:] = values[: slots + 1 - less]
        return shifted

    for s in reversed(range(n)):
        for t in range(s, n):
            save_needs = max(
                sizes[t + 1] + saved[s] + forward_extra[s],
                sizes[s + 1] + saved[s] + backward_extra[s],
            )
            both = chain.forward_times[s] + chain.backward_times[s]
            rest = with_less(times[s + 1, t], saved[s]) if s < t else np.zeros(slots + 1)
            best = np.where(left >= save_needs, both + rest, np.inf)
            how = np.zeros(slots + 1, dtype=np.int32)
            none_needs = sizes[t + 1] + sizes[s + 1] + forward_extra[s]
            for k in range(s + 1, t):
                none_needs = max(
                    none_needs, sizes[t + 1] + sizes[k] + sizes[k + 1] + forward_extra[k]
                )
            enough = left >= none_needs
            for k in range(s + 1, t + 1):
                again = start[k] - start[s] + with_less(times[k, t], sizes[k]) + times[s, k - 1]
                better = enough & (again < best)
                best = np.where(better, again, best)
                how[better] = k
            times[s, t], begin[s, t] = best, how

    def schedule(s: int, t: int, m: int) -> Schedule:
        k = int(begin[s, t][m])
        if k:
            forgotten = [Operation("forget", i) for i in range(s + 1, k)]
            kept = schedule(k, t, m - sizes[k])
            return [Operation("checkpoint", s), *forgotten, *kept, *schedule(s, k - 1, m)]
        between = schedule(s + 1, t, m - saved[s]) if s < t else []
        return [Operation("save", s), *between, Operation("backward", s)]

    m = slots - sizes[0]
    if m < 0 or not np.isfinite(times[0, n - 1][m]):
        return None
    return Solved(float(times[0, n - 1][m]), schedule(0, n - 1, m))


def in_segments(lengths: Sequence[int]) -> Schedule:
    """What checkpointing in contiguous segments does; the last one is not run again."""
    ends = list(accumulate(lengths))
    segments = [range(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    made: Schedule = []
    for segment in segments[:-1]:
        made += [Operation("checkpoint", segment[0])]
        made += [Operation("forget", i) for i in segment[1:]]
    for segment in reversed(segments):
        made += [Operation("save", i) for i in segment]
        made += [Operation("backward", i) for i in reversed(segment)]
    return made


def simulate(chain: Chain, schedule: Schedule) -> tuple[float, float]:
    """(seconds, peak) of the schedule, held by held thing. ValueError where it cannot be run."""
    inputs: dict[int, float] = {0: chain.sizes[0]}  # of stages, where no `saved` has them
    saved: dict[int, float] = {}
    loose = 0.0  # an output on its way to the next stage
    ready: int | None = None  # the stage whose input it is
    todo = len(chain) - 1  # the stage whose backward is next
    seconds = peak = 0.0
    for name, i in schedule:
        gradient = chain.sizes[todo + 1]
        held = sum(inputs.values()) + sum(saved.values()) + loose + gradient
        if name == "backward":
            if i != todo or i not in saved:
                raise ValueError(f"backward of stage {i} is not possible here")
            seconds += chain.backward_times[i]
            peak = max(peak, held + chain.backward_extra[i])
            del saved[i]
            inputs.pop(i, None)
            todo -= 1
            continue
        in_saved = i - 1 in saved  # its input, as the output of the stage before
        if i not in inputs and not in_saved and ready != i:
            raise ValueError(f"{name}: there is no input of stage {i}")
        if i in inputs or in_saved:
            loose = 0.0
        elif name != "forget":
            inputs[i] = chain.sizes[i]
            loose = 0.0
        output = chain.saved[i] if name == "save" else chain.sizes[i + 1]
        held = sum(inputs.values()) + sum(saved.values()) + loose + gradient
        seconds += chain.forward_times[i]
        peak = max(peak, held + output + chain.forward_extra[i])
        loose = 0.0
        if name == "save":
            saved[i] = output
        else:
            loose = output
        ready = i + 1
    if todo != -1:
        raise ValueError(f"backward of stage {todo} is missing")
    return seconds, peak


Stage = Callable[[Tensor], Tensor]


def run_chain(
    modules: Sequence[Stage], schedule: Schedule, x: Tensor, gradient: Tensor | None = None
) -> Tensor:
    """Runs a step of the chain by the schedule: returns its output, leaves gradients in the
    parameters and, if it requires one, in `x`.

    `gradient` is the one by the output; None where that is one number. Stages must compute the same
    each time that they are run: no dropout, no statistics of batches.
    """
    inputs: dict[int, Tensor] = {0: x.detach()}
    saved: dict[int, tuple[Tensor, Tensor]] = {}
    current: Tensor | None = inputs[0]
    output = None
    for name, i in schedule:
        if name == "backward":
            given, made = saved.pop(i)
            current = None
            torch.autograd.backward(made, gradient)
            gradient = given.grad
            del given, made
            continue
        taken = inputs.get(i, saved[i - 1][1].detach() if i - 1 in saved else current)
        assert taken is not None, f"{name}: there is no input of stage {i}"
        if name == "save":
            inputs.pop(i, None)
            given = taken.detach().requires_grad_(i > 0 or x.requires_grad)
            made = modules[i](given)
            saved[i] = (given, made)
            current = made.detach()
            if i == len(modules) - 1:
                output = current
            del given, made
        else:
            if name == "checkpoint" and i - 1 not in saved:
                inputs[i] = taken
            current = None
            with torch.no_grad():
                current = modules[i](taken)
        del taken
    if x.requires_grad and gradient is not None:
        x.grad = gradient if x.grad is None else x.grad + gradient
    assert output is not None
    return output


def measure(modules: Sequence[Stage], x: Tensor, repeats: int = 5) -> Chain:
    """The chain of these modules on `x`: bytes counted, times medians. Their gradients must be
    there already, or they count as a stage's own.
    """
    device = x.device
    found: dict[str, list[Any]] = {name: [] for name in ("saved", "f", "b", "f_extra", "b_extra")}
    sizes: list[float] = [x.nbytes]
    for module in modules:
        given = x.detach().requires_grad_()
        results: list[Tensor] = []

        def forward(module: Stage = module, given: Tensor = given) -> Tensor:
            return module(given)

        def held(results: list[Tensor] = results, forward: Any = forward) -> None:
            results.append(forward())

        def backward(results: list[Tensor] = results, given: Tensor = given) -> None:
            given.grad = None
            made = results.pop()
            made.backward(torch.ones_like(made))

        output = forward().detach()
        saved = held_bytes(forward, device) + output.nbytes
        found["saved"].append(saved)
        found["f_extra"].append(max(0, peak_bytes(held, device) - saved))
        found["b_extra"].append(max(0, peak_bytes(backward, device)))
        forwards, backwards = [], []
        for _ in range(repeats):
            forwards.append(_seconds(held, device))
            backwards.append(_seconds(backward, device))
        found["f"].append(median(forwards))
        found["b"].append(median(backwards))
        sizes.append(output.nbytes)
        x = output
    return Chain(sizes, found["saved"], found["f"], found["b"], found["f_extra"], found["b_extra"])


def _seconds(fn: Callable[[], None], device: torch.device) -> float:
    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    begin = now()
    fn()
    return now() - begin
