"""The host time of a checkpointed region beyond the plain call, forward and backward.

Tiny modules, one thread, float32: what is left is bookkeeping. Every contender does the same step,
`backward(forward(x), grad)`, in turns with the others as in harness.py, and per round

- **added** is the contender's step minus the plain step;
- **beyond** is what remains of that without the second forward, which is measured as a contender of
  its own (a plain forward under grad) and taken off as often as the contender really recomputes.

The floor is saved-tensor hooks that return the very tensor without a Python frame: less than any
region that exchanges what autograd saves. The goal is the floor and 25 us, for memopt's beyond. A
contender that runs the module again in backward, under such hooks too, shows what no checkpoint
that is built on hooks can go below.

`python -m benchmarks.checkpoint_overhead [--quick] [--seed N] [--out FILE.json]` writes the JSON
and, beside it, the tables as Markdown. FairScale takes part where it is installed.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module, metadata
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import memopt
from benchmarks import record
from benchmarks.cli import parse_ways
from benchmarks.clocks import Clock, CpuClock
from benchmarks.harness import QUICK, Effort, alternate, spread
from benchmarks.summary import describe, quartiles, table
from memopt.memory.saved import SavedTensors

Forward = Callable[[Tensor], Tensor]

PLAIN, SECOND_FORWARD, FLOOR = "plain", "plain, forward alone", "identity hook"
OURS, TORCH, FAIRSCALE = "memopt.checkpoint", "torch, non-reentrant", "FairScale"
GOAL_ABOVE_FLOOR_US = 25.0
# More rounds than the op benchmarks have: a difference of two times is noisier than their ratio.
FULL = Effort(rounds=41, min_rounds=15, case_seconds=4.0)

# Returns its argument, all of it C: a lookup in an empty dictionary with that argument as default.
return_argument = types.MethodType({}.get, "no such key")


class Block(nn.Module):
    """A pre-LN transformer block with two heads."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, width) to the same."""
        batch, sequence, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, sequence, 3, 2, width // 2)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind()
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        attended = attended.transpose(1, 2).reshape(batch, sequence, width)
        x = x + self.dropout(self.out(attended))
        x = x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm2(x)))))
        return x


def linears(dropout: float) -> nn.Module:
    between = [nn.ReLU(), nn.Dropout(dropout)] if dropout else [nn.ReLU()]
    return nn.Sequential(nn.Linear(16, 16), *between, nn.Linear(16, 16))


class CountCalls(nn.Module):
    """Passes its input on and counts how often it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    shape: tuple[int, ...]
    """The input's shape."""
    make: Callable[[], nn.Module]

    def make_input(self) -> Tensor:
        return torch.randn(self.shape, requires_grad=True)


CASES = (
    Case("empty", (4, 16), nn.Identity),
    Case("two linears", (4, 16), lambda: linears(0.0)),
    Case("two linears, dropout", (4, 16), lambda: linears(0.1)),
    Case("block", (2, 8, 32), lambda: Block(32, 0.0)),
    Case("block, dropout", (2, 8, 32), lambda: Block(32, 0.1)),
)


def under_hooks(hook: Callable[[Tensor], Tensor]) -> Callable[[nn.Module], Forward]:
    hooks = saved_tensors_hooks(hook, hook)

    def contend(module: nn.Module) -> Forward:
        def forward(x: Tensor) -> Tensor:
            with hooks:
                return module(x)  # type: ignore[no-any-return]

        return forward

    return contend


def run_again(module: nn.Module) -> Forward:
    """The least that a checkpoint on saved-tensor hooks can do: hooks on both forwards, the second
    one inside backward. Its result is thrown away.
    """
    hooks = saved_tensors_hooks(return_argument, return_argument)

    def forward(x: Tensor) -> Tensor:
        with hooks:
            y: Tensor = module(x)

        def again(_: Tensor) -> None:
            with torch.enable_grad(), hooks:
                module(x)

        if y.grad_fn is not None:  # the empty module returns the leaf, which would keep every hook
            y.register_hook(again)
        return y

    return forward


def calls(checkpoint: Callable[..., Tensor], **options: Any) -> Callable[[nn.Module], Forward]:
    return lambda module: functools.partial(checkpoint, module, **options)


def contenders() -> tuple[dict[str, Callable[[nn.Module], Forward]], dict[str, str]]:
    """Name to what makes a module's forward of a module of its own; and those that are not here,
    with the reason.
    """
    known: dict[str, Callable[[nn.Module], Forward]] = {
        PLAIN: lambda module: module,
        FLOOR: under_hooks(return_argument),
        "identity hook, Python lambda": under_hooks(lambda t: t),
        "identity hooks, run again in backward": run_again,
        OURS: calls(memopt.checkpoint),
        "memopt.checkpoint_wrapper": memopt.checkpoint_wrapper,
        TORCH: calls(torch_checkpoint, use_reentrant=False),
        # With dropout its recompute draws other numbers, so its gradients are wrong: a lower bound.
        TORCH + ", RNG not preserved": calls(
            torch_checkpoint, use_reentrant=False, preserve_rng_state=False
        ),
        "torch, reentrant": calls(torch_checkpoint, use_reentrant=True),
    }
    try:
        known[FAIRSCALE] = import_module("fairscale.nn.checkpoint").checkpoint_wrapper
    except ImportError as error:
        return known, {FAIRSCALE: f"{type(error).__name__}: {error}"}
    return known, {}


def step(forward: Forward, x: Tensor, grad: Tensor) -> None:
    torch.autograd.backward(forward(x), grad)  # not autograd.grad: reentrant checkpoints refuse it


def recomputes(contend: Callable[[nn.Module], Forward], case: Case) -> int:
    """How often one step of a contender runs the module's forward again."""
    count, x = CountCalls(), case.make_input()
    step(contend(nn.Sequential(count, case.make())), x, torch.ones_like(x))
    return count.calls - 1


def saved_tensors(case: Case) -> int:
    """How many tensors the plain forward saves for backward, each as often as it is saved."""
    module, x = case.make(), case.make_input()
    with SavedTensors() as saved:
        module(x)
    return len(saved.tensors)


def measure(case: Case, clock: Clock, effort: Effort) -> dict[str, Any]:
    """The record of a case, as it stands in the JSON file."""
    present, failed = contenders()
    runs: dict[str, Callable[[], object]] = {}
    for name, contend in present.items():
        torch.manual_seed(0)
        x = case.make_input()
        runs[name] = functools.partial(step, contend(case.make()), x, torch.ones_like(x))
    runs[SECOND_FORWARD] = functools.partial(case.make(), case.make_input())
    for run in runs.values():
        for _ in range(20):  # a first step takes milliseconds, by which a sample would be one step
            run()
    seconds, calls_per_sample = alternate(runs, clock, effort)
    found = figures(seconds, {name: recomputes(contend, case) for name, contend in present.items()})
    saved, floor = saved_tensors(case), found[FLOOR]["added_us"]["median"]
    for name, number in calls_per_sample.items():
        found[name]["calls_per_sample"] = number
    return {
        "name": case.name,
        "shape": list(case.shape),
        "baseline": PLAIN,
        "rounds": len(seconds[PLAIN]),
        "saved_tensors": saved,
        "floor_us": floor,
        "floor_us_per_saved_tensor": round(floor / saved, 3) if saved else None,
        "goal_us": round(floor + GOAL_ABOVE_FLOOR_US, 2),
        "variants": found,
        "failed": failed,
    }


def figures(
    seconds: Mapping[str, Sequence[float]], recomputed: Mapping[str, int]
) -> dict[str, dict[str, Any]]:
    """Each contender's times in microseconds and, but for the plain step and the second forward,
    what it adds: medians and quartiles over the rounds of differences within a round.

    `seconds`: per step of every contender in every round; `recomputed`: how often each recomputes.
    """
    us = {name: [1e6 * t for t in times] for name, times in seconds.items()}
    added = {name: _minus(us[name], us[PLAIN]) for name in recomputed}
    beyond = {
        name: _minus(times, [recomputed[name] * t for t in us[SECOND_FORWARD]])
        for name, times in added.items()
    }
    found: dict[str, dict[str, Any]] = {}
    for name, times in us.items():
        found[name] = {"us": spread(times), "samples_us": [round(t, 3) for t in times]}
        if name in recomputed and name != PLAIN:
            found[name] |= {
                "recomputes": recomputed[name],
                "added_us": spread(added[name]),
                "beyond_us": spread(beyond[name]),
                "added_over_torch": _over(added[name], added[TORCH]),
                "beyond_over_torch": _over(beyond[name], beyond[TORCH]),
            }
    return found


def _minus(a: Sequence[float], b: Sequence[float]) -> list[float]:
    return [x - y for x, y in zip(a, b, strict=True)]


def _over(a: Sequence[float], b: Sequence[float]) -> dict[str, float]:
    return spread([x / y for x, y in zip(a, b, strict=True)])


def report(run: Mapping[str, Any]) -> str:
    """The run as Markdown: a table for each case."""
    head = ["", "step, us", "added, us", "beyond the recompute, us", "added", "beyond"]
    parts = [
        "# Host time that a checkpointed region adds",
        describe(dict(run)),
        "Medians, in brackets the quartiles. The last two columns are of torch's non-reentrant "
        "region. What is measured: `benchmarks/checkpoint_overhead.py`.",
    ]
    for case in run["cases"].values():
        rows = []
        for name, found in case["variants"].items():
            differences = [found[k] for k in ("added_us", "beyond_us") if k in found]
            ratios = [found[k] for k in ("added_over_torch", "beyond_over_torch") if k in found]
            row = [name, f"{found['us']['median']:.1f}"]
            row += [quartiles(d, 1) for d in differences]
            row += [f"{r['median']:.2f}x ({r['q1']:.2f}-{r['q3']:.2f})" for r in ratios]
            rows.append(row + [""] * (len(head) - len(row)))
        rows += [[name, f"not measured: {why}", *[""] * 4] for name, why in case["failed"].items()]
        parts += [f"## {case['name']}", verdict(case), table(head, rows)]
    return "\n\n".join(parts) + "\n"


def verdict(case: Mapping[str, Any]) -> str:
    """The floor, the goal, and whether `memopt.checkpoint` reached it, in one line."""
    beyond = case["variants"][OURS]["beyond_us"]["median"]
    each = case["floor_us_per_saved_tensor"]
    per_tensor = "" if each is None else f", {each:.2f} us for each"
    return (
        f"{case['saved_tensors']} saved tensors; floor {case['floor_us']:.1f} us{per_tensor}; "
        f"goal {case['goal_us']:.1f} us beyond the recompute: {beyond:.1f} us, "
        f"{'reached' if beyond <= case['goal_us'] else 'missed'}."
    )


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_ways("checkpoint_overhead", argv)

    torch.set_num_threads(1)
    effort = dataclasses.replace(QUICK if args.quick else FULL, seed=args.seed)
    settings = dataclasses.asdict(effort)
    results = record.begin(
        args.out, "checkpoint_overhead", {"us above the floor": GOAL_ABOVE_FLOOR_US}, settings, argv
    )
    if FAIRSCALE in contenders()[0]:
        results.header["versions"]["fairscale"] = metadata.version("fairscale")
    if results.header["load_average"] > 0.5:
        print(
            f"this machine is busy (load {results.header['load_average']}): expect noise",
            flush=True,
        )
    for case in CASES:
        results.add(case.name, found := measure(case, CpuClock(), effort))
        print(f"{case.name}: {verdict(found)}", flush=True)
    text = report(results.run)
    args.out.with_suffix(".md").write_text(text)
    print(f"\n{text}\n{args.out}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
