"""Random numbers that are not drawn, but are at an end of their range."""

from __future__ import annotations

import math
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from memopt.memory.exchanged import exchanged

LEAST, LARGEST = 0.0, 1.0 - 2.0**-24
_MOST_PLACES = 1024
"""Orders of more are those of rows or words: a model has fewer layers."""


class End(NamedTuple):
    """An end of the range of random numbers."""

    at: float
    """LEAST or LARGEST."""
    whole: bool = False
    """Whether a sample is all that it would be taken from."""

    def of(self, sequence: Sequence[Any]) -> Any:
        """The first one, or the last one."""
        return sequence[-1] if self.at == LARGEST else sequence[0]

    def ordered(self, sequence: Sequence[Any]) -> list[Any]:
        """Lists it as it is, or from its end."""
        return [*sequence][::-1] if self.at == LARGEST else [*sequence]

    def sample(self, population: Sequence[Any], count: int) -> list[Any] | None:
        if not 0 <= count <= len(population):
            return None
        return self.ordered(population)[: len(population) if self.whole else count]


@dataclass
class Drawn:
    """Counts of what was asked for."""

    numbers: int = 0
    """All, samples among them."""
    samples: int = 0


_thread = threading.local()


@contextmanager
def drawn_as_ever() -> Iterator[None]:
    """Inside, this thread's random numbers are drawn, also in `drawn_at`."""
    before = _is_as_ever()
    _thread.as_ever = True
    try:
        yield
    finally:
        _thread.as_ever = before


def _is_as_ever() -> bool:
    return getattr(_thread, "as_ever", False)


@contextmanager
def drawn_at(end: End) -> Iterator[Drawn]:
    """Inside, this thread's single random numbers, choices, samples and orders are those at `end`,
    and no generator of PyTorch, Python or NumPy moves for them. Functions give None for what is
    drawn as ever.
    """
    drawn = Drawn()

    def instead(owner: Any, name: str, number: Callable[..., Any]) -> None:
        def draw(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            found = None if _is_as_ever() else number(*args, **kwargs)
            if found is None:
                return original(*args, **kwargs)
            drawn.numbers += 1
            return found

        stack.enter_context(exchanged(owner, name, draw))

    def between(low: float = 0.0, high: float = 1.0, size: object = None) -> float | None:
        return low + (high - low) * end.at if size is None else None

    def one(size: object = None) -> float | None:
        return end.at if size is None else None

    def tensor(*size: Any, out: object = None, **options: Any) -> torch.Tensor | None:
        shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        if out is not None or "size" in options or math.prod(shape) != 1:
            return None
        options.pop("generator", None)
        options.setdefault("dtype", torch.get_default_dtype())
        return torch.full(shape, end.at, **options)

    def of_chance(chance: object, *, generator: object = None, out: object = None) -> Any:
        if out is not None or not isinstance(chance, torch.Tensor) or chance.numel() != 1:
            return None
        return (chance > 0 if end.at == LARGEST else chance >= 1).to(chance.dtype)

    def places(n: int, *, out: object = None, generator: object = None, **options: Any) -> Any:
        if out is not None or n > _MOST_PLACES:
            return None
        first_last = (n - 1, -1, -1) if end.at == LARGEST else (n,)
        return torch.arange(*first_last, **options)

    def sample(population: Sequence[Any], k: int, *, counts: object = None) -> list[Any] | None:
        found = end.sample(population, k) if counts is None else None
        drawn.samples += found is not None
        return found

    def shuffle(original: Callable[..., Any], x: Any, *of: Any) -> None:
        if _is_as_ever():
            original(*of, x)
            return
        drawn.numbers += 1
        x[:] = end.ordered(x)

    def for_numpy(a: Any, size: Any = None, replace: bool = True, p: object = None) -> Any:
        among = range(a) if isinstance(a, int) else a
        if p is not None or not hasattr(among, "__len__"):
            return None
        if size is None:
            return end.of(among)
        found = None if replace or not isinstance(size, int) else sample(among, size)
        return None if found is None else numpy.array(found)

    def order_for_numpy(x: Any) -> Any:
        return numpy.array(end.ordered(range(x) if isinstance(x, int) else x))

    with ExitStack() as stack:
        instead(torch, "rand", tensor)
        instead(torch, "bernoulli", of_chance)
        instead(torch, "randperm", places)
        python: dict[str, Callable[..., Any]] = {
            "random": one,
            "uniform": between,
            "randint": lambda low, high: end.of((low, high)),
            "randrange": lambda *bounds: end.of(range(*bounds)),
            "choice": end.of,
            "sample": sample,
        }
        for name, number in python.items():
            instead(random, name, number)
            instead(random.Random, name, _of_an_instance(number))
        stack.enter_context(exchanged(random, "shuffle", shuffle))
        stack.enter_context(
            exchanged(random.Random, "shuffle", lambda original, own, x: shuffle(original, x, own))
        )
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None:
            instead(numpy.random, "random", one)
            instead(numpy.random, "rand", lambda *size: None if size else end.at)
            instead(numpy.random, "uniform", between)
            instead(numpy.random, "choice", for_numpy)
            instead(numpy.random, "permutation", order_for_numpy)
            stack.enter_context(exchanged(numpy.random, "shuffle", shuffle))
        yield drawn


def _of_an_instance(number: Callable[..., Any]) -> Callable[..., Any]:
    return lambda _, *args, **kwargs: number(*args, **kwargs)
