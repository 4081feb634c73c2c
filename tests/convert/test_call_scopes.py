"""Proves: the scopes around the calls of a converted model's modules end with the calls: of a
module inside itself with the outer one, and after an interrupt, of which PyTorch tells no hook, at
the next call, with the region around, with the measurement or with revert.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt._extension import _C
from tests.convert.test_entry_points import WIDTH, mlp


class Interrupted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.interrupt: type[BaseException] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.interrupt:
            raise self.interrupt
        y: Tensor = self.net(x)
        return y


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_leaves_nothing_on_for_long(error: type[BaseException]) -> None:
    """PyTorch calls no hook after it. The next call of the model ends what it left, and leaves
    hooks alone that someone has entered since.
    """
    model = Interrupted()
    memopt.convert(model)
    model.interrupt = error
    x = torch.randn(2, WIDTH, requires_grad=True)
    with pytest.raises(error):
        model(x)
    model.interrupt = None
    seen: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (seen.append(t), t)[1], lambda t: t):
        y = model(x)
        top = torch._C._autograd._top_saved_tensors_default_hooks(False)
        assert top is not None
        assert "lambda" in top[0].__qualname__
    assert seen
    assert not _C.recipes_are_on()
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    y.sum().backward()
    assert x.grad is not None


class InterruptedLater(Interrupted):
    """Is interrupted in one of its calls, which a file counts: all else is put back between."""

    def __init__(self, file: int, call: int) -> None:
        super().__init__()
        self.file, self.call = file, call

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.net(x)
        os.write(self.file, b".")
        if os.fstat(self.file).st_size == self.call:
            raise KeyboardInterrupt
        return y.square().mean()


X = torch.randn(64, WIDTH)
CALLS: dict[str, Callable[[nn.Module], object]] = {
    "convert": lambda model: memopt.convert(model, X, checkpoint=True),
    "plan": lambda model: memopt.plan(model, X, "1MB", blocks=["net"], measure=False).apply(),
    "saved_bytes": lambda model: memopt.saved_bytes(model, X),
}


@pytest.mark.parametrize("name", CALLS)
def test_measurements_leave_nothing_on_after_an_interrupt(name: str, tmp_path: Path) -> None:
    """In the last call as in the first: other models would run memopt's functions."""
    file = os.open(tmp_path / "calls", os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def run(call: int) -> None:
        os.ftruncate(file, 0)
        model = InterruptedLater(file, call)
        CALLS[name](memopt.convert(model) and model if name == "saved_bytes" else model)

    try:
        run(0)
        number = os.fstat(file).st_size
        assert number > 0
        for call in sorted({1, (number + 1) // 2, number}):
            with pytest.raises(KeyboardInterrupt):
                run(call)
            assert not _C.recipes_are_on()
            assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    finally:
        os.close(file)


def test_revert_ends_what_an_interrupt_left() -> None:
    model = Interrupted()
    memopt.convert(model)
    model.interrupt = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        model(torch.randn(2, WIDTH))
    assert _C.recipes_are_on()
    memopt.revert(model)
    assert not _C.recipes_are_on()


_EXITS = """
import sys, threading, torch, memopt
from torch import nn

class Exits(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
    def forward(self, x):
        sys.exit(3)  # as a handler of SIGTERM does

model = nn.Sequential(Exits())
memopt.convert(model)
"""
_ENDS = {
    "the process": "model(torch.randn(2, 8))",
    "a caught interrupt": "try: model(torch.randn(2, 8))\nexcept SystemExit: sys.exit(3)",
    # join returns before the system's thread has ended, in which PyTorch lets go of its own hooks:
    # that takes the GIL, and a process that ends meanwhile has none to give.
    "threads": """
import os, time
before = len(os.listdir("/proc/self/task"))
for _ in range(3):
    thread = threading.Thread(target=lambda: model(torch.randn(2, 8)))
    thread.start()
    thread.join()
while len(os.listdir("/proc/self/task")) > before:
    time.sleep(0.01)
sys.exit(3)
""",
}


@pytest.mark.parametrize("end", _ENDS)
def test_a_thread_or_a_process_ends_inside_a_call(end: str) -> None:
    """It ends without the GIL, or without an interpreter: Python's objects are not touched then."""
    done = subprocess.run([sys.executable, "-c", _EXITS + _ENDS[end]], check=False)
    assert done.returncode == 3


def test_a_module_inside_itself() -> None:
    class Recursive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: Tensor, depth: int = 2) -> Tensor:
            if depth:
                x = self(x, depth - 1)
            assert _C.recipes_are_on()  # still, after the call inside
            y: Tensor = self.net(x)
            return y

    model = Recursive()
    memopt.convert(model)
    model(torch.randn(2, WIDTH)).sum().backward()
    assert not _C.recipes_are_on()
