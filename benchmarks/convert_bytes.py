"""Bytes that twelve models of transformers save for backward before `memopt.convert` and after,
beside the formula that says why.

Models with random weights in bfloat16 on the CPU, with PyTorch's fused attention, without dropout
and without a cache of keys and values. Bytes are counted by saved-tensor hooks, each storage whole
and once, without parameters and buffers, and the same in every run; no times are taken. The
formulas are those of convert_models/model_terms.py, and a count that differs from its formula ends
the run.

`python -m benchmarks.convert_bytes [--out FILE.json]` writes the JSON and prints the README's
table.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.cli import RESULTS
from benchmarks.convert_models.model_terms import MODEL_TERMS, count_before_and_after
from benchmarks.convert_models.sizes import Sizes
from benchmarks.summary import table

OP = "convert_bytes"
OUT = f"cpu_{OP}.json"
SIZES = Sizes(n=6, h=256, heads=8, kv_heads=2, m=1024, words=4096, tokens=128)


def predicted(name: str, sizes: Sizes) -> tuple[int, int]:
    """Bytes before and after, by the formulas."""
    symbols = MODEL_TERMS[name].symbols(sizes)
    before, after = (
        sum(term.count * term.bytes_of_one(symbols["tokens"], symbols) for term in terms)
        for terms in MODEL_TERMS[name].terms(sizes)
    )
    return before, after


def measure(name: str, sizes: Sizes) -> dict[str, Any]:
    """The record of a model, as it stands in the JSON file."""
    before, after = (saved.bytes for saved in count_before_and_after(name, sizes))
    if (before, after) != predicted(name, sizes):
        raise RuntimeError(
            f"benchmarks.{OP}: {name} saves {before} bytes before and {after} after, its formula "
            "says {} and {}".format(*predicted(name, sizes))
        )
    return {
        "before_bytes": before,
        "after_bytes": after,
        "ratio": round(after / before, 4),
        "symbols": MODEL_TERMS[name].symbols(sizes),
        "formulas": MODEL_TERMS[name].formulas(),
    }


def readme_table(cases: Mapping[str, Any]) -> str:
    head = ["model", "a layer, bytes a token: before", "after", "kept before", "after", "ratio"]
    rows = []
    for name, case in cases.items():
        layer = case["formulas"]["layer"]
        megabytes = [f"{case[key] / 1e6:.1f} MB" for key in ("before_bytes", "after_bytes")]
        ratio = f"{case['ratio']:.2f}x"
        rows.append([name, layer["before"], layer["after"], *megabytes, ratio])
    return table(head, rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{OP}")
    add = parser.add_argument
    add("--out", type=Path, default=RESULTS / OUT, help=f"default: benchmarks/results/{OUT}")
    args = parser.parse_args(argv)

    results = record.begin(
        args.out, OP, {}, {**dataclasses.asdict(SIZES), "dtype": "bfloat16", "sequences": 2}, argv
    )
    results.header["versions"]["transformers"] = metadata.version("transformers")
    for name in MODEL_TERMS:
        results.add(name, measure(name, SIZES))
    print(f"{readme_table(results.cases)}\n\n{args.out}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
