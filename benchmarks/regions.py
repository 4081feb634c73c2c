"""Bytes kept for backward with default regions, model by model: plain, with regions chosen by how
the model is written, and with regions chosen with a batch; and with gradient checkpointing of the
model's own, where it has some.

Models are those of region_models and, of convert_models/zoo.py, those of libraries that are
installed. Each is small, has random weights, and runs in training mode on the CPU in float32. Bytes
are those of `memopt.saved_bytes` without the batch's own. Bytes are exact; no times are taken.

`python -m benchmarks.regions [--out FILE.json] [--docs FILE.md] [--only NAME ...] [--add]`
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import memopt
from benchmarks import record
from benchmarks.cli import RESULTS
from benchmarks.convert_models.zoo import ZOO
from benchmarks.region_models import OWN
from benchmarks.region_models.parts import Made
from benchmarks.summary import table
from memopt._checkpoint.best import best_cut
from memopt._checkpoint.measured import kept_by_its_own, measured_regions
from memopt.applied import assign
from memopt.assignment import Assignment, Choice
from memopt.memory.calls.measure import predicted_tree, step_with, sum_of_outputs
from memopt.memory.depth import Depth
from memopt.memory.paths import paths_around
from memopt.memory.step import Step

OP = "regions"
OUT = f"cpu_{OP}.json"
DOCS = Path(__file__).parent.parent / "docs" / "regions.md"
MUCH = 0.8
GOAL = 0.35
"""Above this ratio a sentence below the table says why."""


def models() -> Iterator[tuple[str, Made]]:
    """Each model's name, and what makes it with a batch."""
    yield from OWN.items()
    for entry in ZOO:
        if entry.library in ("transformers", "diffusers") and entry.importable():
            yield f"{entry.library}: {entry.name}", entry.make


def measure(make: Made) -> dict[str, Any]:
    """The record of a model, as it stands in the JSON file."""
    plain, _ = _kept(make, lambda model, batch: [])
    case: dict[str, Any] = {"plain_bytes": plain}
    ways = {"without": _by_structure, "with": _measured, "own": None}
    for name, put in ways.items():
        try:
            nbytes, regions = _kept(make, put) if put else (_own(make), ())
        except Exception as error:
            case[f"{name}_error"] = f"{type(error).__name__}: {error}"[:300]
        else:
            case[f"{name}_bytes"] = nbytes
            case[f"{name}_ratio"] = round(nbytes / plain, 4)
            case[f"{name}_regions"] = list(regions)
    if case.get("with_ratio", 0) > GOAL:
        case["why"] = why(make)
    return case


def why(make: Made) -> str:
    """Say what stays with the chosen regions, and what keeping less would cost."""
    torch.manual_seed(0)
    model, batch = make()
    model.train()
    found = measured_regions(step_with(OP, model, batch))
    tree, regions = found.tree, set(found.paths)

    def is_covered(call: int) -> bool:
        path = tree.calls[call].path
        return not {path, *paths_around(path)}.isdisjoint(regions)

    stays = [s for s in tree.storages if s.savers and not is_covered(s.home)]
    passed = sum(s.nbytes for s in stays if is_covered(s.maker))
    between = sum(s.nbytes for s in stays) - passed
    said = (
        f"{passed:,} bytes are what regions return to others, {between:,} are made outside of them"
    )
    less = best_cut(tree, found.reasons, limit=int(GOAL * tree.kept_bytes))
    if less.stays >= found.cut.stays:
        return f"{said}; no set of its modules keeps {GOAL} or less"
    share = _peak(model, batch, less.paths) / _peak(model, batch, found.paths)
    paths = ", ".join(f"`{path}`" for path in less.paths)
    return (
        f"{said}; {paths} would keep {less.stays / tree.kept_bytes:.2f}, at {share:.3f} of the peak"
    )


def _peak(model: nn.Module, batch: Any, regions: Sequence[str]) -> int:
    """The predicted peak of a step, above what is there before."""
    fates = Assignment({path: Choice(checkpoint=True) for path in regions})
    step = Step(model, batch, None, sum_of_outputs, who=OP)
    return predicted_tree(step, lambda copy: assign(copy, fates), by_processor=False).peak


def _kept(make: Made, put: Callable[[nn.Module, Any], Sequence[str]]) -> tuple[int, Sequence[str]]:
    torch.manual_seed(0)
    model, batch = make()
    regions = put(model.train(), batch)
    args, kwargs = ((), batch) if isinstance(batch, Mapping) else (batch, {})
    found = memopt.saved_bytes(model, *args, **kwargs)
    return sum(s.nbytes for s in found.storages if not s.is_input), regions


def _by_structure(model: nn.Module, batch: Any) -> Sequence[str]:
    return memopt.apply_activation_checkpointing(model)


def _measured(model: nn.Module, batch: Any) -> Sequence[str]:
    return memopt.apply_activation_checkpointing(model, batch=batch)


def _own(make: Made) -> int:
    torch.manual_seed(0)
    model, batch = make()
    step = Step(model.train(), batch, None, sum_of_outputs, who=OP)
    nbytes = kept_by_its_own(step, Depth())
    if nbytes is None:
        raise AttributeError("it has none")
    return nbytes


def markdown(cases: Mapping[str, Any]) -> str:
    columns = ["model", "kept plain", "without a batch", "with a batch", "its own", "regions"]
    rows = []
    for name, case in cases.items():
        ratios = [
            f"{case[f'{way}_ratio']:.3f}" if f"{way}_ratio" in case else "-"
            for way in ("without", "with", "own")
        ]
        paths = case.get("with_regions", [])
        shown = ", ".join(f"`{path}`" for path in paths[:2])
        shown += f" and {len(paths) - 2} more" if len(paths) > 2 else ""
        shown = case.get("with_error", shown or "none")
        rows.append([name, f"{case['plain_bytes'] / 1e3:.1f} kB", *ratios, shown])
    said = [f"- {name}: {case['why']}.\n" for name, case in cases.items() if case.get("why")]
    return f"{HEAD}\n\n{summary(cases)}\n\n{table(columns, rows)}\n\n{WHY}\n\n{''.join(said)}"


def summary(cases: Mapping[str, Any]) -> str:
    ratios = [case["with_ratio"] for case in cases.values() if "with_ratio" in case]
    own = [c for c in cases.values() if "own_bytes" in c and c["own_bytes"] < c["plain_bytes"]]
    more = [c for c in own if c.get("with_bytes", 0) > c["own_bytes"]]
    return (
        f"{len(cases)} models. With a batch regions keep at most {GOAL} of the plain bytes in "
        f"{sum(ratio <= GOAL for ratio in ratios)} of them, and more than {MUCH} in "
        f"{sum(ratio > MUCH for ratio in ratios)}. Of {len(own)} models with gradient "
        f"checkpointing of their own, regions keep more than that in {len(more)}."
    )


HEAD = """# Bytes that default regions keep, model by model

Bytes kept for backward by one forward in training mode (float32, CPU, small random configurations),
without those of the batch, and as parts of them: with `apply_activation_checkpointing(model)`, "-"
where it finds no blocks; with `apply_activation_checkpointing(model, batch=batch)`; and with the
gradient checkpointing that transformers or diffusers have for the model, whose arguments are held
for the recompute and count as those of regions do, "-" where there is none.
The last column says which regions the batch leads to. They are those that give the least peak,
which counts what a region takes when it is recomputed too: fewer bytes could be kept with larger
regions, and then the peak would be higher.

`python -m benchmarks.regions` makes this file and `benchmarks/results/cpu_regions.json`."""

WHY = f"""## Why some keep more than {GOAL}

A region keeps what it gets. So what stays is what regions return to others, as the elements of a
chain and the levels of a U-Net do, and what is made outside of them: by the forward of the model
(concatenations, sums, losses), and by modules that a region would help little. Larger regions would
drop it; where modules are there for that, the peak with them is given. [Plans](plan.md) also make
one region of several elements of a chain."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{OP}")
    add = parser.add_argument
    add("--out", type=Path, default=RESULTS / OUT, help=f"default: benchmarks/results/{OUT}")
    add("--docs", type=Path, default=DOCS, help="the table; default: docs/regions.md")
    add("--only", nargs="*", help="names of models, all without")
    add("--add", action="store_true", help="to the file's other models")
    args = parser.parse_args(argv)

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # the models are small
    every = dict(models())
    settings = {"dtype": "float32", "models": len(every)}
    header = record.header(OP, {}, settings, argv, torch.device("cpu"))
    results = record.Record(args.out, header, resume=False)
    if args.add and args.out.exists():
        results.cases.update(json.loads(args.out.read_text())["cases"])
    for name, make in every.items():
        if args.only and name not in args.only:
            continue
        results.add(name, measure(make))
        case = results.cases[name]
        print(name, *(case.get(f"{way}_ratio") for way in ("without", "with", "own")), flush=True)
    order = {name: number for number, name in enumerate(every)}
    results.cases = dict(
        sorted(results.cases.items(), key=lambda item: order.get(item[0], len(order)))
    )
    results.save()
    args.docs.parent.mkdir(parents=True, exist_ok=True)
    args.docs.write_text(markdown(results.cases))
    return 0


if __name__ == "__main__":
    sys.exit(main())
