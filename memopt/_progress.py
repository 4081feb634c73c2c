"""A line on what a long call does: on a terminal by rich where it is installed, in a notebook as
tqdm writes there, and elsewhere none.

    with progress("memopt.plan"):     # also a decorator
        doing("predicting step")      # says "memopt.plan: predicting step 1, 4 s"

The line comes when a call has taken three seconds, and goes when it ends. It is written to stderr,
by a thread of its own. Calls in several threads share it; a call inside another has none of its
own; in a process group the first rank alone writes.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

import torch.distributed

_AFTER = 3.0
_EVERY = 0.2
"""Seconds."""


@contextmanager
def progress(who: str) -> Iterator[None]:
    """Show a line while this runs.

    Args:
        who: the function that the user called.
    """
    stream = sys.stderr
    if getattr(_here, "job", None) is not None or not _shows(stream):
        yield
        return
    _here.job = job = _Job(who)
    _board.add(job, stream)
    try:
        yield
    finally:
        _here.job = None
        _board.remove(job)


def doing(what: str) -> None:
    """Say what the call in this thread does from now on. It is counted."""
    job = getattr(_here, "job", None)
    if job is not None:
        job.does(what)


class _Job:
    """A call that runs."""

    def __init__(self, who: str) -> None:
        self.who = who
        self.since = time.monotonic()
        self._counts: Counter[str] = Counter()
        self._does = ""

    def does(self, what: str) -> None:
        self._counts[what] += 1
        self._does = f" {what} {self._counts[what]},"

    def text(self, now: float) -> str:
        return f"{self.who}:{self._does} {now - self.since:.0f} s"


class _Board:
    """The line of all calls."""

    def __init__(self) -> None:
        self._jobs: list[_Job] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._line: _RichLine | _PlainLine | None = None
        self._stream: TextIO | None = None
        """The stream of the first of the calls that run."""

    def add(self, job: _Job, stream: TextIO) -> None:
        with self._changed:
            if not self._jobs:  # the thread of the calls before may not have ended yet
                self._stream = stream
            self._jobs.append(job)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, daemon=True, name="memopt progress"
                )
                self._thread.start()
            self._changed.notify()

    def remove(self, job: _Job) -> None:
        with self._changed:
            self._jobs.remove(job)
            self._write()
            self._changed.notify()

    def _run(self) -> None:
        with self._changed:
            while self._jobs:
                self._write()
                self._changed.wait(_EVERY)
            self._thread = None

    def _write(self) -> None:
        now = time.monotonic()
        text = "; ".join(job.text(now) for job in self._jobs if now - job.since >= _AFTER)
        try:
            if text and self._line is None and self._stream is not None:
                self._line = _line_on(self._stream)
            if text and self._line is not None:
                self._line.write(text)
            elif self._line is not None:
                line, self._line = self._line, None
                line.end()
        except (OSError, ValueError):  # the stream was closed
            self._line = None


class _PlainLine:
    """A line that is written over: carriage returns do that on terminals and in notebooks."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._width = 0

    def write(self, text: str) -> None:
        self._stream.write("\r" + text.ljust(self._width))
        self._stream.flush()
        self._width = len(text)

    def end(self) -> None:
        self._stream.write("\r" + " " * self._width + "\r")
        self._stream.flush()


class _RichLine:
    """A line by rich."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.spinner import Spinner
        from rich.text import Text

        self._plain = Text  # no markup, no colours of numbers
        self._spinner = Spinner("dots")
        self._live = Live(
            self._spinner,
            console=Console(file=stream),
            transient=True,
            redirect_stdout=False,  # what others print stays theirs
            redirect_stderr=False,
        )

    def write(self, text: str) -> None:
        self._spinner.update(text=self._plain(text))
        self._live.start()

    def end(self) -> None:
        self._live.stop()


def _line_on(stream: TextIO) -> _RichLine | _PlainLine:
    if not _is_notebook():
        try:
            return _RichLine(stream)
        except Exception:  # not installed, or another display of rich is there
            pass
    return _PlainLine(stream)


def _shows(stream: TextIO | None) -> bool:
    if stream is None or not (stream.isatty() or _is_notebook()):
        return False
    distributed = torch.distributed
    is_group = distributed.is_available() and distributed.is_initialized()
    return not is_group or distributed.get_rank() == 0


def _is_notebook() -> bool:
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return type(shell).__name__ == "ZMQInteractiveShell"


_here = threading.local()
_board = _Board()
