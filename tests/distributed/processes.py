"""Processes joined by gloo that run the functions which tests send them.

They are started once and kept, since starting one takes seconds. What goes over the pipes is plain
pickle: functions by name, tensors by value.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

WORLD_SIZE = 2
PATIENCE_S = 120.0


class World:
    """Started by the first `run`; after a failure the next one starts new processes."""

    def __init__(self, folder: Path, size: int, timeout_s: float = PATIENCE_S) -> None:
        """
        Args:
            folder: where the processes meet, in a file store.
            size: how many there are.
            timeout_s: of their collectives.
        """
        self._folder = folder
        self._size = size
        self._timeout_s = timeout_s
        self._starts = 0
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._connections: list[Connection] = []

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """`function(*args)` in all processes at once; what it returned, by rank.

        Raises:
            RuntimeError: the function raised in one of them (with its traceback), or it ended.
            TimeoutError: no answer in PATIENCE_S seconds.
        """
        return self._run(function, args, may_end=False)

    def run_some_to_their_end(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """The same, but a process may end itself, and has None in its place then. All end."""
        answers = self._run(function, args, may_end=True)
        self.close()
        return answers

    def _run(self, function: Callable[..., Any], args: tuple[Any, ...], may_end: bool) -> list[Any]:
        if not self._processes:
            self._start()
        try:
            message = pickle.dumps((function, args))
            for connection in self._connections:
                connection.send_bytes(message)
            return self._answers(may_end)
        except BaseException:
            # Another process may be waiting in a collective for good.
            self.close()
            raise

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.kill()
            process.join()
        self._connections, self._processes = [], []

    def _start(self) -> None:
        self._starts += 1
        rendezvous = str(self._folder / f"store{self._starts}")
        context = multiprocessing.get_context("spawn")
        for rank in range(self._size):
            here, there = context.Pipe()
            place = (rank, self._size, rendezvous, self._timeout_s)
            process = context.Process(target=_serve, args=(there, *place), daemon=True)
            process.start()
            there.close()  # so that the end of the process is the end of the pipe
            self._connections.append(here)
            self._processes.append(process)

    def _answers(self, may_end: bool) -> list[Any]:
        """In the order in which they come, so that a failure is seen while the other waits."""
        answers: dict[Connection, Any] = {}
        deadline = time.monotonic() + PATIENCE_S
        while len(answers) < self._size:
            pending = [c for c in self._connections if c not in answers]
            ready = wait(pending, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                ranks = [self._connections.index(c) for c in pending]
                raise TimeoutError(f"no answer from ranks {ranks} in {PATIENCE_S} s")
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = self._connections.index(connection)
                try:
                    succeeded, answer = pickle.loads(connection.recv_bytes())
                except EOFError as error:
                    if not may_end:
                        raise RuntimeError(f"the process of rank {rank} ended") from error
                    succeeded, answer = True, None
                if not succeeded:
                    raise RuntimeError(f"in the process of rank {rank}:\n{answer}")
                answers[connection] = answer
        return [answers[connection] for connection in self._connections]


class Pair(World):
    """WORLD_SIZE of them."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, WORLD_SIZE)


def _serve(connection: Connection, rank: int, size: int, rendezvous: str, timeout_s: float) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # whatever the host's name resolves to
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(rendezvous, size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
    )
    with contextlib.suppress(EOFError, OSError):  # the tests' process ended, or gave up
        while True:
            connection.send_bytes(_call(connection.recv_bytes()))


def _call(message: bytes) -> bytes:
    try:
        function, args = pickle.loads(message)
        return pickle.dumps((True, function(*args)))
    except Exception:
        return pickle.dumps((False, traceback.format_exc()))
