"""Bytes that the models of convert_models/zoo.py save for backward before `memopt.convert` and
after, with checkpointed regions too, and what stays where more than 0.8 of them stays.

Each model is small, has random weights, and runs one forward in training mode on the CPU in
float32. Bytes are exact; no times are taken. What the report of `convert` claims is compared with
the allocator's count of the same forward, byte for byte.

`python -m benchmarks.convert_zoo [--out FILE.json] [--docs FILE.md] [--only NAME ...] [--add]`
writes the JSON and the table. Libraries that cannot be imported are skipped, by name.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
import warnings
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import memopt
from benchmarks import record
from benchmarks.cli import RESULTS
from benchmarks.convert_models.zoo import ZOO, Entry
from benchmarks.summary import table

OP = "convert_zoo"
OUT = f"cpu_{OP}.json"
DOCS = Path(__file__).parent.parent / "docs" / "models.md"
EXPLAINED = 0.8
"""Above this ratio the table says what stays."""


def measure(entry: Entry) -> dict[str, Any]:
    """The record of a model, as it stands in the JSON file."""
    case: dict[str, Any] = _of(entry)
    model, inputs = entry.make()
    report = memopt.convert(model, _sample(inputs))
    assert report.bytes_before is not None
    assert report.bytes_after is not None
    case["before_bytes"] = report.bytes_before
    case["after_bytes"] = report.bytes_after
    case["ratio"] = round(report.bytes_after / report.bytes_before, 4)
    case["remaining"] = [
        {"what": e.what, "class": e.from_class, "bytes": e.nbytes, "help": e.help}
        for e in report.remaining[:5]
    ]
    if sum(entry.nbytes for entry in report.remaining) != report.bytes_after:
        raise RuntimeError(f"benchmarks.{OP}: shares of {entry.name} do not add up")
    with_regions, inputs = entry.make()
    try:
        report = memopt.convert(with_regions, _sample(inputs), checkpoint=True)
    except Exception as error:  # of memopt or of the model; the table says which
        case["regions_error"] = f"{type(error).__name__}: {error}"[:300]
    else:
        case["regions_bytes"] = report.bytes_after
        case["regions_ratio"] = round(float(report.bytes_after or 0) / case["before_bytes"], 4)
    return case


def _sample(inputs: Any) -> Any:
    return dict(inputs) if isinstance(inputs, Mapping) else tuple(inputs)


def explanation(case: Mapping[str, Any]) -> str:
    """Names the largest shares of what stays, where more than EXPLAINED stays."""
    if case["ratio"] <= EXPLAINED:
        return ""
    shares = [
        f"{100 * e['bytes'] / case['after_bytes']:.0f} % {e['what']} ({e['class']})"
        for e in case["remaining"][:3]
    ]
    return "; ".join(shares)


def markdown(cases: Mapping[str, Any], head: str) -> str:
    rows = []
    for name, case in cases.items():
        if "error" in case:
            rows.append([case["library"], name.partition(": ")[2], "", "", "", "", case["error"]])
            continue
        kilobytes = [f"{case[key] / 1e3:.1f} kB" for key in ("before_bytes", "after_bytes")]
        regions = f"{case['regions_ratio']:.2f}x" if "regions_ratio" in case else "-"
        ratio = f"{case['ratio']:.2f}x"
        library, _, model = name.partition(": ")
        rows.append([library, model, *kilobytes, ratio, regions, explanation(case)])
    columns = ["library", "model", "kept before", "after", "ratio", "with regions", "what stays"]
    return f"{head}\n\n{table(columns, rows)}\n"


HEAD = """# Bytes that convert saves, model by model

Bytes kept for backward by one forward in training mode (float32, CPU, small random configurations)
before `memopt.convert(model)` and after; "with regions" is `memopt.convert(model, checkpoint=True)`
over the same "before", "-" where memopt finds no blocks in the model. Where more than 0.8 stays,
the last column has the largest shares of what stays, from convert's report.

`python -m benchmarks.convert_zoo` makes this file and `benchmarks/results/cpu_convert_zoo.json`,
which has the versions; `tests/benchmarks/test_convert_zoo.py` keeps it."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{OP}")
    add = parser.add_argument
    add("--out", type=Path, default=RESULTS / OUT, help=f"default: benchmarks/results/{OUT}")
    add("--docs", type=Path, default=DOCS, help="the table; default: docs/models.md")
    add("--only", nargs="*", help="names of models or libraries, all without")
    add(
        "--add",
        action="store_true",
        help="to the file's other models: for libraries that cannot be installed side by side",
    )
    args = parser.parse_args(argv)

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # the models are small
    header = record.header(
        OP,
        {},
        {"dtype": "float32", "models": len(ZOO)},
        argv,
        torch.device("cpu"),
    )
    results = record.Record(args.out, header, resume=False)
    if args.add and args.out.exists():
        results.cases.update(json.loads(args.out.read_text())["cases"])
    for entry in ZOO:
        if args.only and not {entry.name, entry.library} & set(args.only):
            continue
        key = f"{entry.library}: {entry.name}"
        if not entry.importable():
            print(f"{key}: skipped, {entry.library} cannot be imported", flush=True)
            continue
        try:
            results.add(key, measure(entry))
        except Exception as error:
            traceback.print_exc()
            text = f"{type(error).__name__}: {error}"[:300]
            results.add(key, {**_of(entry), "error": text})
        case = results.cases[key]
        print(f"{key}: {case.get('error') or case['ratio']}", case.get("regions_ratio"), flush=True)
    order = {f"{entry.library}: {entry.name}": i for i, entry in enumerate(ZOO)}
    results.cases = dict(sorted(results.cases.items(), key=lambda item: order.get(item[0], -1)))
    results.save()
    args.docs.parent.mkdir(parents=True, exist_ok=True)
    args.docs.write_text(markdown(results.cases, HEAD))
    return 0


def _of(entry: Entry) -> dict[str, Any]:
    package = {"open_clip": "open_clip_torch"}.get(entry.library, entry.library)
    return {"library": entry.library, "version": metadata.version(package)}


if __name__ == "__main__":
    sys.exit(main())
