"""The models of tables that go model by model, and the command that makes such a table.

Models are those of region_models and, of convert_models/zoo.py, those of libraries that are
installed. Each is small, has random weights, and runs in training mode on the CPU in float32.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import record
from benchmarks.cli import RESULTS
from benchmarks.convert_models.zoo import ZOO
from benchmarks.region_models import OWN
from benchmarks.region_models.parts import Made

DOCS = Path(__file__).parent.parent / "docs"


def models() -> Iterator[tuple[str, Made]]:
    """Each model's name, and what makes it with a batch."""
    yield from OWN.items()
    for entry in ZOO:
        if entry.library in ("transformers", "diffusers") and entry.importable():
            yield f"{entry.library}: {entry.name}", entry.make


def made(make: Made) -> tuple[nn.Module, Any]:
    """The model, in training mode, and its batch."""
    torch.manual_seed(0)
    model, batch = make()
    return model.train(), batch


def make_table(
    op: str,
    measure: Callable[[Made], dict[str, Any]],
    markdown: Callable[[Mapping[str, Any]], str],
    line: Callable[[Mapping[str, Any]], str],
    argv: Sequence[str] | None,
) -> int:
    """Measure each model, and write cpu_OP.json and docs/OP.md.

    Args:
        line: what is printed of a model's case.
    """
    out = f"cpu_{op}.json"
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{op}")
    add = parser.add_argument
    add("--out", type=Path, default=RESULTS / out, help=f"default: benchmarks/results/{out}")
    add("--docs", type=Path, default=DOCS / f"{op}.md", help=f"the table; default: docs/{op}.md")
    add("--only", nargs="*", help="names of models, all without")
    add("--add", action="store_true", help="to the file's other models")
    args = parser.parse_args(argv)

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # the models are small
    every = dict(models())
    settings = {"dtype": "float32", "models": len(every)}
    header = record.header(op, {}, settings, argv, torch.device("cpu"))
    results = record.Record(args.out, header, resume=False)
    if args.add and args.out.exists():
        results.cases.update(json.loads(args.out.read_text())["cases"])
    for name, make in every.items():
        if args.only and name not in args.only:
            continue
        results.add(name, measure(make))
        print(name, line(results.cases[name]), flush=True)
    order = {name: number for number, name in enumerate(every)}
    results.cases = dict(
        sorted(results.cases.items(), key=lambda item: order.get(item[0], len(order)))
    )
    results.save()
    args.docs.parent.mkdir(parents=True, exist_ok=True)
    args.docs.write_text(markdown(results.cases))
    return 0
