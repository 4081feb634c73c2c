"""The host time of memopt.recipes() per tensor that autograd saves, forward and backward.

Tiny tensors, one thread: what is left is bookkeeping. A step saves the same number of tensors of
one kind; contenders do it in turns as in harness.py. Ops that recipes know save without hooks
(csrc/intercept/savers.h). **added** is a contender's step minus the
plain one's in the same round, for each saved tensor; **over identity** is that minus the identity
hook's: saved-tensor hooks that give the very tensor back without a Python frame, the least that any
hook costs. The goal: at most 2 us over identity.

`python -m benchmarks.recipes_overhead [--quick] [--seed N] [--out FILE.json]` writes the JSON and
prints the table.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import memopt
import memopt.functional as M
from benchmarks import record
from benchmarks.checkpoint_overhead import return_argument
from benchmarks.cli import parse_ways
from benchmarks.clocks import Clock, CpuClock
from benchmarks.harness import QUICK, Effort, alternate, spread
from benchmarks.summary import describe, quartiles, table
from memopt.memory.saved import SavedTensors

PLAIN, FLOOR, OURS = "plain", "identity hook", "memopt.recipes()"
GOAL_OVER_IDENTITY_US = 2.0
FULL = Effort(rounds=41, min_rounds=15, case_seconds=4.0)
LENGTH = 64  # ops in a row

Scope = Callable[[], AbstractContextManager[Any]]

CONTENDERS: dict[str, Scope] = {
    PLAIN: nullcontext,
    FLOOR: lambda: saved_tensors_hooks(return_argument, return_argument),
    "identity hook, Python lambda": lambda: saved_tensors_hooks(lambda t: t, lambda t: t),
    OURS: memopt.recipes,
}


def inputs(x: Tensor) -> Tensor:
    """Each op saves its input."""
    for _ in range(LENGTH):
        x = x.sin()
    return x


def hooked(x: Tensor) -> Tensor:
    """Each op saves its input, and recipes do not know the op: a hook is called for it."""
    for _ in range(LENGTH):
        x = x.sinh()
    return x


def outputs(x: Tensor) -> Tensor:
    """Each op saves its output."""
    for _ in range(LENGTH):
        x = x.sigmoid()
    return x


def recipes(x: Tensor) -> Tensor:
    """Every second tensor is an output of memopt's, saved by the op behind: made again. The second
    forward of gelu is part of what this costs.
    """
    for _ in range(LENGTH // 2):
        x = M.gelu(x).sin()
    return x


CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "saved inputs": inputs,
    "saved inputs, hooked": hooked,
    "saved outputs": outputs,
    "gelu in front of each op": recipes,
}


def step(run: Callable[[Tensor], Tensor], scope: Scope, x: Tensor, grad: Tensor) -> None:
    with scope():
        y = run(x)
    torch.autograd.backward(y, grad)


def measure(name: str, clock: Clock, effort: Effort) -> dict[str, Any]:
    """The record of a case, as it stands in the JSON file."""
    run = CASES[name]
    x = torch.randn(4, 16, requires_grad=True)
    with SavedTensors() as saved:
        run(x)
    number = len(saved.tensors)
    runs: dict[str, Callable[[], object]] = {
        contender: functools.partial(step, run, scope, x, torch.ones_like(x))
        for contender, scope in CONTENDERS.items()
    }
    for each in runs.values():
        for _ in range(20):  # a first step takes milliseconds, by which a sample would be one step
            each()
    seconds, calls_per_sample = alternate(runs, clock, effort)
    found = figures(seconds, number)
    for contender, calls in calls_per_sample.items():
        found[contender]["calls_per_sample"] = calls
    return {
        "name": name,
        "saved_tensors": number,
        "rounds": len(seconds[PLAIN]),
        "goal_us": GOAL_OVER_IDENTITY_US,
        "variants": found,
    }


def figures(seconds: Mapping[str, Sequence[float]], saved_tensors: int) -> dict[str, Any]:
    """Each contender's microseconds a step, and what it adds for each saved tensor: medians and
    quartiles over the rounds of differences within a round.
    """
    us = {name: [1e6 * t for t in times] for name, times in seconds.items()}

    def added(name: str, to: str) -> list[float]:
        return [(a - b) / saved_tensors for a, b in zip(us[name], us[to], strict=True)]

    found: dict[str, Any] = {}
    for name, times in us.items():
        found[name] = {"us": spread(times), "samples_us": [round(t, 3) for t in times]}
        if name != PLAIN:
            found[name]["added_us"] = spread(added(name, PLAIN))
        if name not in (PLAIN, FLOOR):
            found[name]["over_identity_us"] = spread(added(name, FLOOR))
    return found


def report(run: Mapping[str, Any]) -> str:
    """The run as Markdown: a table of all cases."""
    head = ["saved", "", "added, us a tensor", "over identity, us a tensor"]
    rows = []
    for case in run["cases"].values():
        for name, found in case["variants"].items():
            spreads = [found[key] for key in ("added_us", "over_identity_us") if key in found]
            texts = [quartiles(s) for s in spreads]
            rows.append([case["name"], name, *texts, *[""] * (2 - len(texts))])
    return "\n\n".join(
        [
            "# Host time of memopt.recipes() per saved tensor",
            describe(dict(run)),
            "Medians, in brackets the quartiles. What is measured: "
            "`benchmarks/recipes_overhead.py`.",
            *[verdict(case) for case in run["cases"].values()],
            table(head, rows),
        ]
    )


def verdict(case: Mapping[str, Any]) -> str:
    over = case["variants"][OURS]["over_identity_us"]["median"]
    reached = "reached" if over <= case["goal_us"] else "missed"
    return f"{case['name']}: {over:.2f} us over identity, goal {case['goal_us']} us {reached}."


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_ways("recipes_overhead", argv)

    torch.set_num_threads(1)
    effort = dataclasses.replace(QUICK if args.quick else FULL, seed=args.seed)
    settings = dataclasses.asdict(effort)
    results = record.begin(
        args.out, "recipes_overhead", {"us over identity": GOAL_OVER_IDENTITY_US}, settings, argv
    )
    for name in CASES:
        results.add(name, measure(name, CpuClock(), effort))
    text = report(results.run)
    print(f"\n{text}\n\n{args.out}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
