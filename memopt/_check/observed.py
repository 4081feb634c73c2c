"""A real step: how often each module runs forward, and what the allocator and the links say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from memopt._check.asked import HEAD
from memopt._compat import is_in_backward
from memopt._forwards import AroundCall, around_forward
from memopt._head.call import HeadUse, watched_heads
from memopt._offload.stats import offload_stats
from memopt.memory.allocator import DeviceBytes, LiveBytes
from memopt.memory.asked import home_of
from memopt.memory.modules import seen_modules
from memopt.memory.paths import is_inside
from memopt.memory.step import Step
from memopt.memory.unchanged import Written, unchanged


@dataclass
class ObservedStep:
    """Calls and bytes of a step, by the paths of modules."""

    with_gradients: Counter[str] = field(default_factory=Counter)
    """Calls in forward with gradients enabled."""
    without_gradients: Counter[str] = field(default_factory=Counter)
    """Calls in forward without; reentrant checkpoints run their modules so."""
    again: Counter[str] = field(default_factory=Counter)
    """Calls while backward runs."""
    in_regions: Counter[str] = field(default_factory=Counter)
    """Runs of regions' own forwards, in forward."""
    in_regions_again: Counter[str] = field(default_factory=Counter)
    """Likewise while backward runs."""
    kept: int = 0
    """Bytes that were allocated when forward had ended, beyond those before, by the allocator."""
    peak: int = 0
    """The most bytes at any time of forward and backward, beyond those before."""
    heads: list[HeadUse] = field(default_factory=list)
    """The uses of lazy logits."""
    offloaded: int = 0
    """Bytes that left the device."""

    def of_head(self, path: str) -> str:
        """The fate of a head's logits; empty: they were not lazy."""
        uses = [use for use in self.heads if use.path == path]
        made = [use.by for use in uses if use.were_made]
        if made:
            return f"logits computed, for {made[0]}"
        return HEAD if uses else ""

    def runs_again(self, path: str) -> int:
        """How often backward runs a module again for each call. A region runs the module's forward
        past the module's own hooks, but not past those of the modules inside it; memopt's regions
        are counted where their forward runs, since nothing may be inside.
        """
        inside = [p for p in self.again if p == path or is_inside(p, path)]
        calls = self.with_gradients + self.without_gradients
        times = [_for_each(self.again[p], calls[p]) for p in inside]
        return max(_for_each(self.in_regions_again[path], self.in_regions[path]), *times, 0)


def _for_each(again: int, calls: int) -> int:
    return -(-again // max(calls, 1))


def observed(step: Step) -> ObservedStep:
    """Run forward and backward once to see what they write, and once to watch; everything is
    afterwards as it was.
    """
    found = ObservedStep()
    device = home_of(step.model)
    with unchanged(*step.roots, written=Written()) as before, torch.enable_grad():
        before.rehearse(step.run)
        offloaded = _offloaded_bytes()
        with _counted(step.model, found), watched_heads() as found.heads:
            if device.type == "cpu":
                with LiveBytes() as live:
                    _run(step, live.mark)
                found.kept, found.peak = live.marks[0].nbytes, live.most
            else:
                with DeviceBytes(device) as bytes_:
                    _run(step, lambda: setattr(found, "kept", bytes_.now))
                found.peak = bytes_.above
        found.offloaded = _offloaded_bytes() - offloaded
    return found


def _run(step: Step, at_end_of_forward: Callable[[], object]) -> None:
    with step.context():
        for batch in step.batches():
            step.forward_and_backward(batch, lambda _: at_end_of_forward())


def _offloaded_bytes() -> int:
    return sum(place.out.bytes for place in offload_stats(wait=True).places)


@contextmanager
def _counted(model: nn.Module, found: ObservedStep) -> Iterator[None]:
    with ExitStack() as undo:
        for path, module in seen_modules(model).items():

            def count(module: nn.Module, args: Any, path: str = path) -> None:
                if is_in_backward():
                    found.again[path] += 1
                elif torch.is_grad_enabled():
                    found.with_gradients[path] += 1
                else:
                    found.without_gradients[path] += 1

            undo.callback(module.register_forward_pre_hook(count).remove)
            if (around := around_forward(module)) is not None:
                undo.callback(setattr, around, "call", around.call)
                around.call = partial(_call_counted, around.call, found, path)
        yield


def _call_counted(
    call: AroundCall,
    found: ObservedStep,
    path: str,
    module: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    if not torch.compiler.is_compiling():
        forward = partial(_run_counted, found, path, forward)
    return call(module, forward, args, kwargs)


def _run_counted(
    found: ObservedStep, path: str, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    counts = found.in_regions_again if is_in_backward() else found.in_regions
    counts[path] += 1
    return forward(*args, **kwargs)
