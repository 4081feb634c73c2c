"""Whole models in every way that people train them: bytes held, peak, and time of a step.

Models of transformers in float32 on the CPU, with a real vocabulary; a step is forward, loss and
backward. Ways: **eager**; each block under `torch.utils.checkpoint` (and FairScale's wrapper, where
it is installed); **memopt**'s recipes, regions, both, and a plan for half of eager's peak;
`torch.compile`, with half of its `activation_memory_budget`, and `memopt.compile`. With dropout the
compiled ways are left out (they take the longest).

Bytes are the allocator's (memopt.live_bytes): what is held when forward ends, and the most at any
time, beyond weights. `row_bytes` is what one more row of the batch adds to the peak, and `rows_fit`
how many rows have the peak of eager's batch: the largest batch that fits where eager's just does.
Times are taken in turns as in harness.py; `over_eager` is of the same round.

`python -m benchmarks.models [--quick] [--seed N] [--out FILE.json]` writes the JSON, the figure of
peaks against times beside it, and prints the table.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch._functorch.config
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memopt
from benchmarks import record
from benchmarks.cli import parse_ways
from benchmarks.clocks import CpuClock
from benchmarks.convert_models.sizes import Sizes
from benchmarks.harness import QUICK, Effort, alternate, spread
from benchmarks.summary import describe, table
from memopt.checkpoint.blocks import find_blocks
from memopt.live_bytes import LiveBytes

OP = "models"
FULL = Effort(rounds=15, min_rounds=7, case_seconds=25.0, sample_seconds=0.05)
SIZES = Sizes(n=4, h=256, heads=8, kv_heads=4, m=1024, words=16384, tokens=128)
SMALLEST = Sizes(n=2, h=32, heads=4, kv_heads=2, m=64, words=99, tokens=16)
FAMILIES = ("GPT-2", "BERT", "Llama", "T5", "ViT")
DROPOUT = {
    "GPT-2": ("attn_pdrop", "embd_pdrop", "resid_pdrop"),
    "BERT": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    "T5": ("dropout_rate",),
    "ViT": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
}
"""The names of the config's probabilities."""
EAGER = "eager"
SHARE = 0.5
"""Of eager's peak, that a plan may take."""


@dataclasses.dataclass(frozen=True)
class Way:
    """A step as it is run, and its bytes."""

    run: Callable[[], None]
    held: int
    peak: int
    row: float
    """Bytes that another row adds to the peak."""


def measured(model: nn.Module, batch: Mapping[str, Tensor], call: Any = None) -> Way:
    """Of a model that is changed already; `call` is its compiled form."""
    call = model if call is None else call

    def run(inputs: Mapping[str, Tensor] = batch) -> None:
        model.zero_grad(set_to_none=True)
        call(**inputs).loss.backward()

    def bytes_of(inputs: Mapping[str, Tensor]) -> LiveBytes:
        run(inputs)
        model.zero_grad(set_to_none=True)
        with LiveBytes() as live:
            loss = call(**inputs).loss
            live.mark()
            loss.backward()
        return live

    rows = len(next(iter(batch.values())))
    live = bytes_of(batch)
    doubled = bytes_of({name: torch.cat([tensor, tensor]) for name, tensor in batch.items()})
    return Way(run, live.marks[0].nbytes, live.most, (doubled.most - live.most) / rows)


def every_block(model: nn.Module, wrap: Callable[[nn.Module], object]) -> None:
    for block in find_blocks(model).modules:
        wrap(block)


def torch_checkpoint(block: nn.Module) -> None:
    forward = block.forward
    block.forward = lambda *args, **kwargs: checkpoint(  # type: ignore[method-assign]
        forward, *args, use_reentrant=False, **kwargs
    )


def planned(model: nn.Module, batch: Mapping[str, Tensor]) -> None:
    """A plan for SHARE of eager's peak, beside the weights."""
    weights = sum(p.nbytes for p in model.parameters())
    sgd = {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.0)}
    everything = memopt.plan(model, dict(batch), **sgd)
    budget = weights + SHARE * (everything.plain_peak - weights)
    try:
        memopt.plan(model, dict(batch), int(budget), **sgd).apply()
    except memopt.BudgetTooSmall as error:
        print(f"plan: {error}", flush=True)
        every_block(model, memopt.checkpoint_wrapper)


def ways_of(make: Callable[[], tuple[nn.Module, dict[str, Tensor]]], compiles: bool) -> Any:
    """The ways, by name."""
    ways: dict[str, Way] = {}

    def add(name: str, change: Callable[[nn.Module, dict[str, Tensor]], Any]) -> None:
        model, batch = make()
        ways[name] = measured(model, batch, change(model, batch))

    def both(model: nn.Module, batch: dict[str, Tensor]) -> None:
        memopt.convert(model)
        every_block(model, memopt.checkpoint_wrapper)

    add(EAGER, lambda model, batch: None)
    add("torch.utils.checkpoint", lambda model, batch: every_block(model, torch_checkpoint))
    if find_spec("fairscale") is not None:
        fairscale = import_module("fairscale.nn.checkpoint").checkpoint_wrapper
        add("FairScale", lambda model, batch: every_block(model, fairscale))
    add("memopt.convert", lambda model, batch: memopt.convert(model) and None)
    add(
        "memopt.checkpoint_wrapper",
        lambda model, batch: every_block(model, memopt.checkpoint_wrapper),
    )
    add("convert and regions", both)
    add("memopt.plan, half", planned)
    if compiles:
        torch.compiler.reset()
        add("torch.compile", lambda model, batch: torch.compile(model))
        torch.compiler.reset()
        with torch._functorch.config.patch(activation_memory_budget=0.5):
            add("torch.compile, budget 0.5", lambda model, batch: torch.compile(model))
        torch.compiler.reset()
        add("memopt.compile", lambda model, batch: memopt.compile(model))
    return ways


def maker(name: str, sizes: Sizes, dropout: float) -> Callable[[], Any]:
    from benchmarks.convert_models.model_terms import MODEL_TERMS  # needs transformers
    from benchmarks.convert_models.models import MODELS

    terms = MODEL_TERMS[name]

    def make() -> tuple[nn.Module, dict[str, Tensor]]:
        changes = {**terms.changes(sizes), **dict.fromkeys(DROPOUT.get(name, ()), dropout)}
        model = MODELS[name].make(**changes).train()
        return model, MODELS[name].inputs(**terms.inputs(sizes))

    return make


def case_of(ways: Mapping[str, Way], effort: Effort) -> dict[str, Any]:
    """The record of a case, as it stands in the JSON file."""
    seconds, _ = alternate({name: way.run for name, way in ways.items()}, CpuClock(), effort)
    eager = ways[EAGER]
    found = {}
    for name, way in ways.items():
        over = [own / base for own, base in zip(seconds[name], seconds[EAGER], strict=True)]
        rows = len(seconds[EAGER])
        found[name] = {
            "held_bytes": way.held,
            "peak_bytes": way.peak,
            "row_bytes": round(way.row),
            "rows_fit": 2 + int((eager.peak - way.peak) / way.row) if way.row > 0 else None,
            "seconds": spread(seconds[name]),
            "over_eager": spread(over),
        }
    return {"rounds": rows, "variants": found}


def tables(run: Mapping[str, Any]) -> str:
    """A table for each model."""
    parts = []
    for name, case in run["cases"].items():
        eager = case["variants"][EAGER]
        rows = []
        for way, found in case["variants"].items():
            over = found["over_eager"]
            bytes_ = [
                f"{found[key] / 1e6:.1f} MB ({found[key] / eager[key]:.2f}x)"
                for key in ("held_bytes", "peak_bytes")
            ]
            time = f"{over['median']:.2f} ({over['q1']:.2f} to {over['q3']:.2f})"
            rows.append([way, *bytes_, time, str(found["rows_fit"])])
        head = [name, "held", "peak", "time over eager", "rows where eager has 2"]
        parts.append(table(head, rows))
    return "\n\n".join(parts)


def draw(cases: Mapping[str, Any], out: Path) -> None:
    """A panel for each model: peak over eager's against time over eager's."""
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    import matplotlib.pyplot as plt

    figure, grid = plt.subplots(
        1, len(cases), figsize=(3 * len(cases), 3.4), layout="constrained", squeeze=False
    )
    for axes, (name, case) in zip(grid.flat, cases.items(), strict=True):
        eager = case["variants"][EAGER]["peak_bytes"]
        for number, (way, found) in enumerate(case["variants"].items()):
            over = found["over_eager"]
            axes.errorbar(
                found["peak_bytes"] / eager,
                over["median"],
                yerr=[[over["median"] - over["q1"]], [over["q3"] - over["median"]]],
                fmt="o" if "memopt" in way or "convert" in way else "s",
                color=f"C{number}",
                label=way,
            )
        axes.set_title(name)
        axes.set_xlabel("peak over eager's")
    grid[0][0].set_ylabel("time over eager's")
    figure.legend(
        *grid[0][0].get_legend_handles_labels(), loc="outside lower center", ncol=4, fontsize=8
    )
    figure.savefig(out, dpi=120)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_ways(OP, argv)
    effort = dataclasses.replace(QUICK if args.quick else FULL, seed=args.seed)
    sizes = SMALLEST if args.quick else SIZES
    families = FAMILIES[:1] if args.quick else FAMILIES
    header = record.header(
        OP,
        {},
        {**dataclasses.asdict(effort), "sizes": dataclasses.asdict(sizes)},
        ["python", "-m", f"benchmarks.{OP}", *(sys.argv[1:] if argv is None else argv)],
        torch.device("cpu"),
        copy_bandwidths={},
    )
    if find_spec("transformers") is None:
        print("models: transformers is not installed", file=sys.stderr)
        return 2
    results = record.Record(args.out, header, resume=False)
    for name in families:
        results.add(name, case_of(ways_of(maker(name, sizes, 0.0), compiles=True), effort))
        print(f"{name} done", flush=True)
        if name in DROPOUT and not args.quick:
            ways = ways_of(maker(name, sizes, 0.1), compiles=False)
            results.add(f"{name}, dropout", case_of(ways, effort))
    figure = args.out.with_suffix(".png")
    draw({n: c for n, c in results.cases.items() if "dropout" not in n}, figure)
    run = {**results.header, "cases": results.cases}
    print(f"\n# Whole models\n\n{describe(run)}\n\n{tables(run)}\n\n{args.out}\n{figure}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
