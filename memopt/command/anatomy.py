"""`python -m memopt anatomy`: a model by name or by a function of yours, and its report."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from memopt._anatomy.api import anatomy
from memopt._anatomy.report import Anatomy
from memopt._errors import USAGE_ERROR, UsageError
from memopt.command import presets
from memopt.memory.predicted.outcome import DependsOnValues
from memopt.place import Place

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
OPTIMIZERS = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "none": None,
}


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options that say which model and batch are meant."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "model",
        nargs="?",
        help="module:callable, which returns a model and its batch (on the meta device)",
    )
    what.add_argument("--preset", choices=presets.PRESETS, help="a model of known size")
    what.add_argument("--config", help="a config of transformers: llama, GPT2Config, or a folder")
    parser.add_argument(
        "--set", default="", help="changes to the config, as JSON: '{\"hidden_size\": 512}'"
    )
    parser.add_argument("--batch", type=int, default=4, help="rows (default: 4)")
    parser.add_argument("--seq", type=int, default=512, help="tokens in a row (default: 512)")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="of weights (default: the model's)")
    parser.add_argument(
        "--autocast", choices=("bfloat16", "float16"), help="run forward under autocast"
    )


def add_step_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares these, and those of the rest of its step."""
    add_model_arguments(parser)
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="predict for (default: cuda; where a step runs, its device)",
    )
    parser.add_argument("--optimizer", choices=tuple(OPTIMIZERS), default="adamw")
    parser.add_argument("--micro-batches", type=int, default=1, help="accumulate (default: 1)")


def add_what_if(parser: argparse.ArgumentParser) -> None:
    """Declares options on what becomes of activations."""
    parser.add_argument("--recipes", action="store_true", help="what if memopt.convert")
    parser.add_argument("--checkpoint", help="what if regions: all, sqrt, optimal or a number")
    add_place(parser, "what if activations waited there")


def add_place(parser: argparse.ArgumentParser, what: str) -> None:
    """Declares the option that names where activations wait."""
    parser.add_argument(
        "--offload",
        nargs="?",
        const="cpu",
        metavar="PLACE",
        help=f'{what}: "cpu" (default), "disk" or a directory',
    )


def place_of(value: str | None) -> Place | None:
    """The place that the option names."""
    return cast("Place", value) if value in (None, "cpu", "disk") else Path(value)


def add_measure(parser: argparse.ArgumentParser) -> None:
    """Declares the option to run real steps."""
    parser.add_argument(
        "--measure", action="store_true", help="also run the step (--preset only), here"
    )


def add_files(parser: argparse.ArgumentParser, *names: str) -> None:
    """Declares the options that name a file to write."""
    for name in names:
        parser.add_argument(f"--{name}", type=Path, metavar="FILE", help=f"write {name.upper()}")


def add_anatomy_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's options."""
    add_step_arguments(parser)
    add_measure(parser)
    add_what_if(parser)
    add_files(parser, "json", "html", "png")
    parser.add_argument("--formula", action="store_true", help="closed formulas with the bytes")
    parser.add_argument("--advice", action="store_true", help="predict what would help")


def write_fields(report: Any, path: Path) -> None:
    """Write what a report's `to_dict` returns."""
    path.write_text(json.dumps(report.to_dict(), indent=1) + "\n")


class Output(NamedTuple):
    """The output that a command makes of a model and its batch."""

    text: str
    files: Mapping[str, Callable[[Path], object]]
    """Functions that write a file, by the option that names it."""
    status: int = 0
    """The command's exit status."""


def run_command(make: Callable[[argparse.Namespace], Output], args: argparse.Namespace) -> int:
    """Writes the files that are asked for and prints the text. Returns the output's status; or 2,
    and the reason on stderr, for arguments that cannot be run.
    """
    try:
        made = make(args)
        for name, write in made.files.items():
            path = getattr(args, name)
            if path is not None:
                write(path)
        print(made.text)
        return made.status
    except (UsageError, ValueError, DependsOnValues, OSError) as error:
        text = str(error).removeprefix("anatomy.read_").removeprefix(f"{args.command}: ")
        print(f"memopt {args.command}: {text}", file=sys.stderr)
        return USAGE_ERROR


def step_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of the step that `anatomy` and `plan` share."""
    return {
        "optimizer": OPTIMIZERS[args.optimizer],
        "autocast": None if args.autocast is None else DTYPES[args.autocast],
        "micro_batches": args.micro_batches,
        "device": args.device or (None if _measures(args) else "cuda"),
    }


def _measures(args: argparse.Namespace) -> bool:
    return getattr(args, "measure", False) is True


def with_note(report: Any, job: presets.Job) -> Any:
    """A report (a dataclass with notes) with what is known of the job."""
    return dataclasses.replace(report, notes=(*report.notes, job.note)) if job.note else report


def anatomy_output(args: argparse.Namespace) -> Output:
    """The report."""
    job = job_of(args)
    found: Anatomy = with_note(
        anatomy(
            job.model,
            job.batch,
            measure=args.measure,
            recipes=args.recipes,
            checkpoint=checkpoint_of(args.checkpoint),
            offload=place_of(args.offload),
            advice=args.advice,
            **step_options(args),
        ),
        job,
    )

    def write_page(path: Path) -> None:
        found.to_html(path, formula=args.formula)

    text = found.table(formula=args.formula)
    return Output(text, {"json": found.to_json, "html": write_page, "png": found.to_png})


def job_of(args: argparse.Namespace) -> presets.Job:
    """The model and the batch that the options name.

    Raises:
        UsageError: there are none.
    """
    if args.batch < 1 or args.seq < 1:
        raise UsageError(f"--batch and --seq: must be at least 1, got {args.batch} and {args.seq}")
    job = _named(args)
    if args.dtype is not None:
        job.model.to(DTYPES[args.dtype])
    return job


def _named(args: argparse.Namespace) -> presets.Job:
    if _measures(args) and not args.preset:
        raise UsageError("--measure: needs --preset, whose models have values")
    if args.preset:
        place = ("cuda" if torch.cuda.is_available() else "cpu") if _measures(args) else "meta"
        return presets.preset(args.preset, args.batch, args.seq, place)
    if args.config:
        return presets.from_config(args.config, args.batch, args.seq, _sizes(args.set))
    return presets.from_callable(args.model)


def _sizes(text: str) -> dict[str, Any]:
    try:
        sizes = json.loads(text or "{}")
    except json.JSONDecodeError:
        sizes = None
    if not isinstance(sizes, dict):
        raise UsageError(f"--set: must be a JSON object, got {text!r}")
    return sizes


def checkpoint_of(value: str | None) -> Any:
    """The option's value: a word or a number."""
    return int(value) if value is not None and value.isdigit() else value
