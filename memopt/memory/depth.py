"""Steps of random depth, at their deepest.

LayerDrop (Fan et al., 2019) and stochastic depth leave layers out by a number that is drawn for
each: `if torch.rand([]) < self.layerdrop: continue`. Two steps then differ, and a budget has to
hold for the one with all layers. So while a step is looked at, single random numbers are not drawn:
all are the largest, or all the least, whichever makes the step run more operators.
"""

from __future__ import annotations

import math
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

T = TypeVar("T")

_LEAST, _LARGEST = 0.0, 1.0 - 2.0**-24


@dataclass
class Depth:
    """The end of the range at which single random numbers are, for all looks at one step."""

    end: float | None = None
    """None: not known yet."""

    def run(self, look: Callable[[], T], operators: Callable[[T], int]) -> T:
        """Returns what `look` finds at the end at which the step that it runs is deepest.

        At the other end `look` may raise, where a model may have no layer left.
        """
        if self.end is not None:
            with drawn_at(self.end):
                return look()
        with drawn_at(_LARGEST) as drawn:
            found, error = _tried(look)
        self.end = _LARGEST
        if drawn:
            with drawn_at(_LEAST):
                other, _ = _tried(look)
            if other and (not found or operators(other[0]) > operators(found[0])):
                found, self.end = other, _LEAST
        if not found:
            assert error is not None  # nothing was found
            raise error
        return found[0]


def _tried(look: Callable[[], T]) -> tuple[list[T], Exception | None]:
    try:
        return [look()], None
    except Exception as error:
        return [], error


@contextmanager
def drawn_at(end: float) -> Iterator[list[None]]:
    """Inside, this thread's single random numbers are the one at `end` of their range, and no
    generator moves for them. What it yields has an entry for each.
    """
    drawn: list[None] = []
    thread = threading.get_ident()

    def instead(module: Any, name: str, number: Callable[..., Any]) -> None:
        original = getattr(module, name)

        def draw(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread:
                found = number(*args, **kwargs)
                if found is not None:
                    drawn.append(None)
                    return found
            return original(*args, **kwargs)

        setattr(module, name, draw)
        stack.callback(setattr, module, name, original)

    def between(low: float = 0.0, high: float = 1.0, size: object = None) -> float | None:
        return low + (high - low) * end if size is None else None

    def one(size: object = None) -> float | None:
        return end if size is None else None

    def tensor(*size: Any, out: object = None, **options: Any) -> torch.Tensor | None:
        shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        if out is not None or "size" in options or math.prod(shape) != 1:
            return None
        options.pop("generator", None)
        options.setdefault("dtype", torch.get_default_dtype())
        return torch.full(shape, end, **options)

    def whole(low: int, high: int) -> int:
        return high if end == _LARGEST else low

    def of_chance(chance: object, *, generator: object = None, out: object = None) -> Any:
        if out is not None or not isinstance(chance, torch.Tensor) or chance.numel() != 1:
            return None
        return (chance > 0 if end == _LARGEST else chance >= 1).to(chance.dtype)

    with ExitStack() as stack:
        instead(torch, "rand", tensor)
        instead(torch, "bernoulli", of_chance)
        instead(random, "random", one)
        instead(random, "uniform", between)
        instead(random, "randint", whole)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            instead(numpy.random, "random", one)
            instead(numpy.random, "rand", lambda *size: None if size else end)
            instead(numpy.random, "uniform", between)
        yield drawn
