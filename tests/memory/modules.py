"""Blocks that leave something behind whenever they run, each in another way."""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import functools
import io
import itertools
import queue
import random
import threading
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 8
CALLS = 0
IDS = itertools.count()
LOG: list[Tensor] = []
TABLE = nn.Parameter(torch.ones(WIDTH))


@dataclasses.dataclass(frozen=True)
class Frozen:
    calls: int = 0


@dataclasses.dataclass
class Slotted:
    __slots__ = ("calls", "last")
    calls: int
    last: Tensor | None


class Habit(nn.Module):
    """Does something on the side, and hands the input on (or something that depends on it)."""

    made = 0

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Counts(Habit):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.words = collections.Counter(a=1)
        self.recent: collections.deque[int] = collections.deque([1, 2, 3], maxlen=3)
        self.order = collections.OrderedDict(a=1, b=2)
        self.seen = {1}
        self.raw = bytearray(b"abc")
        self.box = types.SimpleNamespace(inner={"deep": [Frozen()]}, slotted=Slotted(0, None))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.words.update("ab")
        self.recent.append(self.calls)
        self.order.move_to_end("a")
        self.seen.add(1 + self.calls)
        self.raw[0] += 1
        object.__setattr__(self.box.inner["deep"][0], "calls", self.calls)
        self.box.inner["deep"].append(x)
        self.box.slotted.calls += 1
        self.box.slotted.last = x
        del self.order["b"]
        self.order["b"] = 3
        return x


class Remembers(Habit):
    def __init__(self) -> None:
        super().__init__()
        self.log: list[Any] = []
        self.by_tensor: Any = weakref.WeakKeyDictionary()
        self.keep = self.log.append
        self.gone = "attribute"
        self.array = np.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        self.keep(x)
        self.by_tensor[self] = len(self.log)
        self.array += 1
        LOG.append(x)
        if hasattr(self, "gone"):
            del self.gone
        self.came = x
        return x


class Buffers(Habit):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("anew", torch.zeros(WIDTH))
        self.register_buffer("in_place", torch.zeros(WIDTH), persistent=False)
        self.register_buffer("shared", torch.zeros(WIDTH))
        self.register_buffer("large", torch.zeros(40, 1 << 10))
        self.queues = [torch.zeros(40, 1 << 10) for _ in range(3)]  # 160 KiB each
        self.plain = torch.zeros(WIDTH)
        self.grown = torch.zeros(2)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.anew = self.anew + x.mean(0)
            self.in_place.add_(x.mean(0))
            self.large[3:5].mul_(0.5).add_(1)
            self.plain += 1
            self.grown.resize_(4)
        self.shared.numpy()[:2] += 1
        np.asarray(self.queues[0])[3] += 1
        np.from_dlpack(self.queues[1])[4] += 1
        ctypes.memset(self.queues[2].data_ptr(), 1, 1 << 10)
        return self.norm(x[:, :, None].expand(-1, -1, 2)).mean(-1)  # also of a single row


class Momentum(Habit):
    """Frozen parameters that forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Linear(WIDTH, WIDTH)
        self.target = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.codes = nn.ParameterList([nn.Parameter(torch.ones(150, 150), requires_grad=False)])
        self.swapped = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            torch._foreach_lerp_([*self.target.parameters()], [*self.online.parameters()], 0.5)
            self.codes[0].view(-1)[:3] += 1
        self.swapped.data = self.swapped.data * 2
        return self.online(x) + self.target(x) * self.swapped


class Closes(Habit):
    """Weights that only functions know."""

    def __init__(self) -> None:
        super().__init__()
        scale, calls = nn.Parameter(torch.ones(WIDTH)), 0
        adapter = nn.Linear(WIDTH, WIDTH)
        state = torch.zeros(WIDTH)

        def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            state.add_(1)
            return output + adapter(output) * scale * TABLE

        self.layer = nn.Linear(WIDTH, WIDTH)
        self.layer.register_forward_hook(hook)
        self.f: Callable[[Tensor], Tensor] = lambda x: self.layer(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.f(x)


class Draws(Habit):
    def __init__(self) -> None:
        super().__init__()
        self.own = random.Random(3)
        self.numbers = np.random.default_rng(3)
        self.old = np.random.RandomState(3)

    def forward(self, x: Tensor) -> Tensor:
        self.own.random(), self.numbers.random(), self.old.rand(), random.random(), np.random.rand()
        return F.dropout(x, 0.5, self.training)


class Iterates(Habit):
    """Moves iterators, which no method sets back, and what else Python has to put things into."""

    numbers = itertools.count(10)

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.turns, self.rows = (
            itertools.count(3),
            itertools.cycle("ab"),
            iter([1] * 999),
        )
        self.pairs = enumerate(self.rows)
        self.held = {"again": [self.calls], "slot": Slotted(0, None)}
        self.held["slot"].last = itertools.count()  # type: ignore[attr-defined]
        closed_over = itertools.count()
        self.next = lambda: next(closed_over)
        self.queue: queue.Queue[int] = queue.Queue()
        self.queue.put(1)
        self.text, self.bytes = io.StringIO("first "), io.BytesIO(b"first ")
        self.local = threading.local()
        self.local.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        next(self.calls), next(self.turns), next(self.pairs), next(self.numbers), next(IDS)
        next(self.held["slot"].last), self.next()  # type: ignore[attr-defined]
        assert next(self.held["again"][0]) == next(self.calls) - 1  # type: ignore[index]
        self.queue.put(self.queue.get() + 1)
        self.text.write("and this")
        self.bytes.write(b"and this")
        self.local.calls += 1
        return x


class FirstCall(Habit):
    """Installs things when it is called first, as transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.outputs: list[Tensor] = []

    @functools.cache  # noqa: B019
    def table(self, size: int) -> Tensor:
        return torch.arange(size, dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        global CALLS
        CALLS += 1
        if not hasattr(self, "installed"):
            self.installed = True
            self.inner.register_forward_hook(lambda m, i, o: self.outputs.append(o))
            self.inner.weight.register_hook(lambda g: g * 2)
            type(self).helper = lambda self: CALLS
            self.other = nn.Linear(2, 2)
            self.inner.eval()
        type(self).made += 1
        return self.inner(x) + self.table(WIDTH)


HABITS: tuple[type[Habit], ...] = (
    Counts,
    Remembers,
    Buffers,
    Momentum,
    Closes,
    Draws,
    Iterates,
    FirstCall,
)


class Block(nn.Module):
    def __init__(self, habits: Sequence[type[Habit]]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.habits = nn.ModuleList(habit() for habit in habits)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        for habit in self.habits:
            y = habit(y)
        return x + self.down(F.gelu(self.up(y)))


class Model(nn.Module):
    """Blocks of one class, and a batch that is written in place."""

    def __init__(self, habits: Sequence[Sequence[type[Habit]]], writes_batch: bool = True) -> None:
        super().__init__()
        self.writes_batch = writes_batch
        self.blocks = nn.ModuleList(map(Block, habits))

    def forward(self, x: Tensor, notes: list[Any]) -> Tensor:
        if self.writes_batch:
            x.data.mul_(0.5)
        notes.append(x.shape)
        for block in self.blocks:
            x = block(x)
        return x


def weighted_loss() -> Callable[[Tensor], Tensor]:
    """A loss with weights, a state and a log of its own."""
    weight, log = nn.Parameter(torch.ones(WIDTH)), []
    head = nn.Linear(WIDTH, 1)
    mean = torch.zeros(())

    def loss(output: Tensor) -> Tensor:
        found = (head(output) * (output * weight).sum(-1, keepdim=True)).square().mean()
        log.append(found)
        mean.add_(1)
        return found

    return loss
