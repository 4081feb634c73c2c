"""How the demo's tests start it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import memopt.demo

RunDemo = Callable[..., int]


@pytest.fixture(scope="session")
def run_demo() -> RunDemo:
    """run_demo(out, "--steps", "1", ...) runs the demo on the CPU and returns its exit code."""

    def run(out: Path, *options: str) -> int:
        parser = argparse.ArgumentParser()
        memopt.demo.add_demo_arguments(parser)
        return memopt.demo.demo_command(
            parser.parse_args(["--device", "cpu", "--out", str(out), *options])
        )

    return run


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """The demo's small steps wait long for a second thread where other work has the core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
