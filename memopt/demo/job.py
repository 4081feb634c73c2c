"""The demo from arguments to report."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from rich.console import Console

from memopt._errors import UsageError
from memopt.demo.data import Batches, load_text
from memopt.demo.figure import write_panels
from memopt.demo.progress import show_progress
from memopt.demo.report import comparison, write_json
from memopt.demo.results import Result
from memopt.demo.settings import DemoSettings, settings_from
from memopt.demo.train import train
from memopt.show.sections import text_of

PLAIN_WIDTH = 120  # of the table when the output is no terminal


def run_demo(args: argparse.Namespace) -> bool:
    """Trains, prints the table, writes demo.json and demo.png. Returns whether Ctrl-C cut it short.

    Raises UsageError for arguments that cannot be run.
    """
    settings = settings_from(args)
    size, batch = settings.preset.size, settings.preset.batch
    batches = Batches(load_text(settings.text), batch, size.context, settings.steps, settings.seed)
    _make_folder(settings.out)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    console.print(_headline(settings))

    results = [Result(mode, batch * size.context) for mode in settings.modes]
    interrupted = False
    try:
        with show_progress(console, results, settings.steps) as on_step:
            train(settings, batches, results, on_step)
    except KeyboardInterrupt:
        interrupted = True
    if any(result.losses for result in results):
        _report(console, settings, results, interrupted)
    elif interrupted:
        console.print("Interrupted before the first step.")
    else:
        raise UsageError(f"no mode fits into the memory of {settings.device}")
    return interrupted


def _make_folder(out: Path) -> None:
    """Make the folder before the time for training is spent."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out: cannot make {out}: {error.strerror}") from None
    if not os.access(out, os.W_OK):
        raise UsageError(f"--out: cannot write into {out}")


def _headline(settings: DemoSettings) -> str:
    size, batch = settings.preset.size, settings.preset.batch
    return (
        f"GPT of {size.layers} layers, width {size.width}, {size.vocabulary:,} tokens; "
        f"{batch} x {size.context} bytes a step, "
        f"{settings.steps} steps in each of {len(settings.modes)} modes; "
        f"{settings.device}, {settings.dtype_name}"
    )


def _report(
    console: Console, settings: DemoSettings, results: list[Result], interrupted: bool
) -> None:
    if interrupted:
        console.print("Interrupted. What there is:")
    print(text_of(comparison(results)), end="\n\n")
    if settings.device.type == "cpu" and any(result.mode.offload for result in results):
        console.print("On a CPU everything is in host memory: offload moves nothing.", style="dim")
    if settings.device.type == "cuda":
        console.print("PyTorch's deterministic algorithms were on, to compare losses.", style="dim")
    write_json(settings.out / "demo.json", settings, results, interrupted)
    trained = [result for result in results if result.losses]
    write_panels(settings.out / "demo.png", settings, trained)
    console.print(f"Written: {settings.out / 'demo.json'}, {settings.out / 'demo.png'}")
