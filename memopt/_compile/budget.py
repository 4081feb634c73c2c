"""memopt's own ways to divide a compiled graph: minimum cuts.

They differ in two things. *Contractions* are recomputed too where a budget asks for that: in the
order of the operations that it costs for each byte that it saves, the earlier ones first among
equals: what the last layers keep is read as soon as backward begins, and to recompute it frees
nothing at the peak. Of what PyTorch keeps and a minimum cut would recompute, a *part* is kept,
those first that save the most work for their bytes: masks of dropout, say, on a CPU, where to draw
takes long.

Each way is a whole cut with its own timeline: a sum of its tensors' bytes would count what is not
alive at the peak, and miss what the recompute itself needs.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from memopt._compile.candidates import AGAIN, EXACT, Candidate, candidate
from memopt._compile.graph import JointGraph
from memopt._compile.ops import (
    base,
    has_tensor,
    is_contraction,
    nbytes,
    op_name,
    operations,
    policy_of,
)
from memopt._compile.policy import Cut, choose

_ENOUGH_GUESSES = 12
_MOST_GROUPS = 8
_PARTS = tuple(part / 6 for part in range(7))


class OwnCuts:
    """The cuts, made and predicted as they are asked for."""

    def __init__(self, joint: JointGraph, pytorchs: Cut) -> None:
        """
        Args:
            pytorchs: PyTorch's own choice, of which parts are kept.
        """
        self._joint = joint
        # Those first whose recompute takes the fewest operations for each byte of its output.
        self._contractions = sorted(
            _contractions(joint), key=lambda node: operations(node) / max(nbytes(node), 1)
        )
        self._made: dict[tuple[int, int], Candidate] = {}
        self._parts: list[fx.Node] = []
        self._parts = self._worth_keeping(pytorchs)

    def without_products(self) -> Iterator[Candidate]:
        """The cuts that recompute no contraction."""
        yield from self._in_parts(0)

    def fitting(self, budget: int) -> Iterator[Candidate]:
        """The cuts that recompute as few contractions as that takes to be within `budget`."""
        number = self._fewest(budget)
        if number is not None:
            yield from self._in_parts(number)

    @property
    def contractions(self) -> int:
        """How many may be recomputed."""
        return len(self._contractions)

    def tried(self) -> list[Candidate]:
        """Returns those that were predicted."""
        return list(self._made.values())

    def _fewest(self, budget: int) -> int | None:
        if self._cut(0).most <= budget:
            return 0
        total = len(self._contractions)
        guesses = {
            round(total * part / _ENOUGH_GUESSES) for part in range(1, _ENOUGH_GUESSES + 1)
        } - {0}
        too_few = 0
        for fits in sorted(guesses):
            if self._cut(fits).most <= budget:
                break
            too_few = fits
        else:
            return None
        while fits - too_few > 1:
            middle = (fits + too_few) // 2
            if self._cut(middle).most <= budget:
                fits = middle
            else:
                too_few = middle
        return fits

    def _worth_keeping(self, pytorchs: Cut) -> list[fx.Node]:
        """The tensors that PyTorch keeps and the plain cut recomputes, those first that save the
        most work for their bytes. Those of one op and size, which alike layers have, are tried
        together.
        """
        plain = self._cut(0)
        may = plain.cut.again & self._joint.computed
        groups: dict[tuple[str | None, int], list[fx.Node]] = {}
        for node in dict.fromkeys(
            base(n) for n in reversed(self._joint.nodes) if n in pytorchs.kept
        ):
            if node in may and has_tensor(node) and policy_of(node) is None:
                groups.setdefault((op_name(node), nbytes(node)), []).append(node)
        largest = sorted(groups.values(), key=lambda g: -len(g) * nbytes(g[0]))
        gains = []
        for group in largest[:_MOST_GROUPS]:
            kept = candidate("", self._joint, choose(self._joint, (), group), EXACT)
            if kept.work < plain.work:
                gains.append(((plain.work - kept.work) / max(kept.kept - plain.kept, 1), group))
        gains.sort(key=lambda gain: -gain[0])
        return [node for _, group in gains for node in group]

    def _in_parts(self, number: int) -> Iterator[Candidate]:
        for parts in {round(part * len(self._parts)) for part in _PARTS}:
            yield self._cut(number, parts)

    def _cut(self, number: int, parts: int = 0) -> Candidate:
        """The cut with so many contractions recomputed, and so many tensors of PyTorch's choice
        kept.
        """
        known = self._made.get((number, parts))
        if known is None:
            again = frozenset(self._contractions[:number])
            cut = choose(self._joint, again, frozenset(self._parts[:parts]))
            error = AGAIN if number else EXACT
            known = candidate("memopt's", self._joint, cut, error)
            self._made[number, parts] = known
        return known


def _contractions(joint: JointGraph) -> list[fx.Node]:
    return [
        node
        for node in joint.nodes
        if node in joint.computed and is_contraction(node) and policy_of(node) is None
    ]
