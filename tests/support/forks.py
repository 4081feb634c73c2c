"""Runs functions and programs in processes of their own, on one thread, forked from one that has
imported what takes long to import and did nothing else: memopt reads some environment variables
once per process, and a script is to find nothing that another left.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

IMPORTED = (
    *("torch", "torch._dynamo", "transformers", "transformers.trainer"),
    *("memopt", "tests.support.cases"),
)
"""Those that are not here are left out."""
PATIENCE_S = 300  # of a busy machine


class Ended(NamedTuple):
    """How a process ended, and what it wrote."""

    exitcode: int | None
    """None: it was ended, since it took too long."""
    stdout: str
    stderr: str


def run_forked(
    environment: Mapping[str, str], run: Callable[..., object], *arguments: object
) -> Ended:
    """Run `run(*arguments)` in a process with these environment variables and no others."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    with TemporaryDirectory() as folder:
        process = context.Process(target=_run, args=(folder, dict(environment), run, arguments))
        process.start()
        process.join(PATIENCE_S)
        exitcode = process.exitcode
        if exitcode is None:
            process.kill()
            process.join()
        return Ended(exitcode, *((Path(folder) / name).read_text() for name in ("out", "err")))


def _run(
    folder: str, environment: dict[str, str], run: Callable[..., object], arguments: Sequence[Any]
) -> None:
    for descriptor, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    run(*arguments)


def run_in_forks(
    program: str, settings: Sequence[Mapping[str, str]], environment: Mapping[str, str]
) -> list[str]:
    """What `program` prints in `environment` under each of the settings."""
    ended = [run_forked({**environment, **one}, _execute, program) for one in settings]
    for one, variables in zip(ended, settings, strict=True):
        assert one.exitcode == 0, f"with {dict(variables)}: {one.stderr}"
    return [one.stdout for one in ended]


def _execute(program: str) -> None:
    exec(program, {"__name__": "__main__"})
