"""Bytes kept for backward with default regions, model by model: plain, with regions chosen by how
the model is written, and with regions chosen with a batch; and with gradient checkpointing of the
model's own, where it has some.

Models are those of by_model.py. Bytes are those of `memopt.saved_bytes` without the batch's own.
Bytes are exact; no times are taken.

`python -m benchmarks.regions [--out FILE.json] [--docs FILE.md] [--only NAME ...] [--add]`
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

import memopt
from benchmarks.by_model import made, make_table
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
MUCH = 0.8
GOAL = 0.35
"""Above this ratio a sentence below the table says why."""


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
    model, batch = made(make)
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
    model, batch = made(make)
    regions = put(model, batch)
    args, kwargs = ((), batch) if isinstance(batch, Mapping) else (batch, {})
    found = memopt.saved_bytes(model, *args, **kwargs)
    return sum(s.nbytes for s in found.storages if not s.is_input), regions


def _by_structure(model: nn.Module, batch: Any) -> Sequence[str]:
    return memopt.apply_activation_checkpointing(model)


def _measured(model: nn.Module, batch: Any) -> Sequence[str]:
    return memopt.apply_activation_checkpointing(model, batch=batch)


def _own(make: Made) -> int:
    model, batch = made(make)
    step = Step(model, batch, None, sum_of_outputs, who=OP)
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


def line(case: Mapping[str, Any]) -> str:
    return " ".join(str(case.get(f"{way}_ratio")) for way in ("without", "with", "own"))


def main(argv: Sequence[str] | None = None) -> int:
    return make_table(OP, measure, markdown, line, argv)


if __name__ == "__main__":
    sys.exit(main())
