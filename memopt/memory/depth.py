"""Steps of random depth, at their deepest.

LayerDrop (Fan et al., 2019) and stochastic depth leave layers out by a number that is drawn for
each: `if torch.rand([]) < self.layerdrop: continue`, or draw which layers run:
`random.sample(range(24), 18)`. Two steps then differ, and a budget has to hold for the one with all
layers. So while a step is looked at, single random numbers are not drawn: all are the largest, or
all the least, and of what is chosen from it is the last, or the first, or a sample is all that it
is taken from; whichever makes the step run most operators.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from memopt.memory.draws import LARGEST, LEAST, End, drawn_at

T = TypeVar("T")


@dataclass
class Depth:
    """The end of the range at which random numbers are, for all looks at one step."""

    end: End | None = None
    """None: not known yet."""

    def run(
        self,
        look: Callable[[], T],
        operators: Callable[[T], int],
        agree: Callable[[T, T], object] = lambda deepest, other: None,
    ) -> T:
        """Returns what `look` finds at the end at which the step that it runs is deepest.

        At the other ends `look` may raise, where a model may have no layer left.

        Args:
            agree: is called with what was found there and what was found at each other end.
        """
        if self.end is not None:
            with drawn_at(self.end):
                return look()
        ends = [End(LARGEST)]
        found: list[tuple[T, End]] = []
        errors: list[Exception] = []
        for end in ends:
            with drawn_at(end) as drawn:
                try:
                    found.append((look(), end))
                except Exception as error:
                    errors.append(error)
            if len(ends) == 1 and drawn.numbers:
                ends.append(End(LEAST))
                ends += [End(LARGEST, True), End(LEAST, True)] if drawn.samples else []
        if not found:
            raise errors[0]
        deepest, self.end = max(found, key=lambda one: operators(one[0]))
        for other, _ in found:
            agree(deepest, other)
        return deepest
