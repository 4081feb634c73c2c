"""Proves: a call that takes long says on a terminal what it does, and takes the line away when it
ends; short calls, and calls whose stderr is no terminal, write nothing; threads share the line.
"""

from __future__ import annotations

import inspect
import io
import re
import sys
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

import memopt
from memopt import _progress
from memopt._progress import doing, progress
from tests.plan.models import chain


class Stream(io.StringIO):
    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


def write_to(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it were stderr, which pytest replaces between a fixture and a test."""
    standard = types.SimpleNamespace(stderr=stream, modules=sys.modules)
    monkeypatch.setattr(_progress, "sys", standard)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Stream:
    stream = Stream(True)
    write_to(stream, monkeypatch)
    monkeypatch.setattr(_progress, "_AFTER", 0.0)
    monkeypatch.setattr(_progress, "_EVERY", 0.01)
    return stream


def wait_for(happened: Callable[[], object]) -> None:
    for _ in range(3000):
        if happened():
            return
        time.sleep(0.01)
    pytest.fail("it did not happen")


@pytest.fixture(params=["rich", "plain"])
def _each_line(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "plain":
        monkeypatch.setitem(sys.modules, "rich.console", None)
    else:
        pytest.importorskip("rich")


@pytest.mark.usefixtures("_each_line")
def test_a_terminal_reads_what_is_done(terminal: Stream) -> None:
    with progress("a call"):
        doing("trying")
        doing("trying")
        wait_for(lambda: re.search(r"a call: trying 2, \d+ s", terminal.getvalue()))
    assert _progress._board._line is None
    assert not terminal.getvalue().endswith("s")  # the line is wiped


def test_a_short_call_writes_nothing(terminal: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_progress, "_AFTER", 60.0)
    with progress("a call"):
        time.sleep(0.05)
    assert terminal.getvalue() == ""


def test_off_a_terminal_nothing_is_written_and_no_thread_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = Stream(False)
    write_to(stream, monkeypatch)
    with progress("a call"):
        doing("trying")
        assert _progress._board._jobs == []  # whose first one starts the thread
    assert stream.getvalue() == ""


def test_a_notebook_reads_a_line_that_is_written_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its streams are no terminals; as tqdm does, a carriage return writes over the line."""
    shell = type("ZMQInteractiveShell", (), {})()
    ipython = types.SimpleNamespace(get_ipython=lambda: shell)
    stream = Stream(False)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    write_to(stream, monkeypatch)
    monkeypatch.setattr(_progress, "_AFTER", 0.0)
    with progress("a call"):
        wait_for(lambda: re.search(r"\ra call: \d+ s", stream.getvalue()))
    assert stream.getvalue().endswith("\r")
    assert "\x1b" not in stream.getvalue()


@pytest.mark.usefixtures("_each_line")
def test_threads_share_the_line(terminal: Stream) -> None:
    """And a call inside another has none of its own."""
    both = threading.Event()

    def run(name: str) -> None:
        with progress(name), progress("inside"):
            doing("trying")
            both.wait(30)

    threads = [threading.Thread(target=run, args=(name,)) for name in ("one", "other")]
    for thread in threads:
        thread.start()
    wait_for(
        lambda: (
            "one: trying 1, " in terminal.getvalue()
            and "; " in terminal.getvalue()
            and "other: trying 1, " in terminal.getvalue()
        )
    )
    both.set()
    for thread in threads:
        thread.join()
    assert "inside" not in terminal.getvalue()
    assert _progress._board._line is None


def test_a_stream_that_closes_ends_the_line_alone(terminal: Stream) -> None:
    with progress("a call"):
        wait_for(lambda: "a call" in terminal.getvalue())
        terminal.close()
        time.sleep(0.05)
    assert _progress._board._jobs == []


CALLS: dict[str, Callable[[torch.nn.Module, Any], object]] = {
    "memopt.plan": memopt.plan,
    "memopt.anatomy": memopt.anatomy,
    "memopt.check": memopt.check,
    "memopt.fits": lambda model, batch: memopt.fits(model, batch, "1MB"),
    "memopt.fit": lambda model, batch: memopt.fit(
        model, batch, 1 << 30, optimizer=torch.optim.AdamW(model.parameters()), steps=1
    ),
    "memopt.convert": lambda model, batch: memopt.convert(model, batch, checkpoint=True),
    "memopt.apply_activation_checkpointing": lambda model, batch: (
        memopt.apply_activation_checkpointing(model, batch=batch)
    ),
    "memopt.largest_batch": lambda model, batch: memopt.largest_batch(model, batch, "4MB", limit=8),
    "memopt.longest_sequence": lambda model, batch: memopt.longest_sequence(
        model, batch, "4MB", limit=8
    ),
    "memopt.accumulate": lambda model, batch: memopt.accumulate(model, batch, budget="8MB"),
    "Plan.largest_batch": lambda model, batch: memopt.plan(
        model, batch, 1 << 30, measure=False
    ).largest_batch("4MB", limit=8),
}
TIMED = {"memopt.plan": "timing step", "memopt.fit": "timing step", "memopt.check": "running step"}


@pytest.mark.parametrize("who", CALLS)
def test_calls_that_take_long_say_what_they_do(
    who: str, monkeypatch: pytest.MonkeyPatch, terminal: Stream
) -> None:
    said: list[tuple[str, str]] = []
    does = _progress._Job.does

    def noted(job: _progress._Job, what: str) -> None:
        said.append((job.who, what))
        does(job, what)

    monkeypatch.setattr(_progress._Job, "does", noted)
    CALLS[who](*chain())
    before = {"memopt.plan"} if who.startswith("Plan.") else set()
    assert {caller for caller, _ in said} == {who} | before
    assert {"predicting step", TIMED.get(who, "predicting step")} <= {what for _, what in said}


def test_signatures_are_the_functions_own() -> None:
    assert list(inspect.signature(memopt.anatomy).parameters)[:2] == ["model", "batch"]
    assert "within" in dir(memopt.Plan)
