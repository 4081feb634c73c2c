"""What a block should keep for backward, term by term, compared with the storages that it keeps.

    terms = [Term("the input", h=2), Term("a norm's mean and rstd", count=2, one=4)]
    assert_kept(terms, saved, tokens=128, h=768)

compares storage by storage, so that two mistakes cannot cancel; a failure shows the whole table. A
term's bytes a token are a sum of multiples of symbols, whose values are given; `one` is 1, and
"heads T" the product of two. A term with per_call, a number or such a sum, is kept once for a call
and not for each token.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from memopt.measure import SavedTensors


class Term:
    """One tensor that is kept, or `count` of a kind."""

    def __init__(
        self,
        what: str,
        *,
        count: int = 1,
        per_call: int | Mapping[str, int] = 0,
        **per_token: int,
    ) -> None:
        self.what = what
        self.count = count
        self.per_call = {"one": per_call} if isinstance(per_call, int) else dict(per_call)
        self.per_token = per_token

    def bytes_of_one(self, tokens: int, symbols: Mapping[str, int]) -> int:
        def value(coefficients: Mapping[str, int]) -> int:
            return sum(c * _product(name, symbols) for name, c in coefficients.items())

        return value(self.per_call) + tokens * value(self.per_token)

    def formula(self) -> str:
        per_call = {name: c for name, c in self.per_call.items() if c}
        return f"{format_sum(per_call)} a call" if per_call else format_sum(self.per_token)


def _product(names: str, symbols: Mapping[str, int]) -> int:
    return math.prod(1 if name == "one" else symbols[name] for name in names.split())


def format_sum(coefficients: Mapping[str, int]) -> str:
    """{"one": 8, "h": 2} as `2 h + 8`."""
    terms = [f"{c} {name}" for name, c in coefficients.items() if name != "one"]
    terms += [str(coefficients["one"])] if "one" in coefficients else []
    return " + ".join(terms)


def sum_per_token(terms: Sequence[Term]) -> dict[str, int]:
    """Coefficients of the sum of all terms."""
    total: Counter[str] = Counter()
    for term in terms:
        for name, coefficient in term.per_token.items():
            total[name] += term.count * coefficient
    return dict(total)


def assert_kept(terms: Sequence[Term], saved: SavedTensors, *, tokens: int, **symbols: int) -> None:
    """The storages that were saved are those of the terms, one for one. Prints the table."""
    left = Counter(saved.storage_bytes)
    rows = []
    for term in terms:
        size = term.bytes_of_one(tokens, symbols)
        found = min(left[size], term.count)
        left[size] -= found
        rows.append((term.what, term.formula(), term.count, size * term.count, size * found))
    rows += [("NOT PREDICTED", "", number, 0, size * number) for size, number in left.items()]
    rows = [row for row in rows if row[2]]
    predicted = sum(row[3] for row in rows)
    total = format_sum(sum_per_token(terms))
    given = ", ".join(f"{name} = {value}" for name, value in symbols.items())
    lines = [
        f"{'kept for backward':38}{'bytes a token':>34}{'count':>7}{'predicted':>11}{'counted':>10}"
    ]
    lines += [f"{what:38}{formula:>34}{n:>7}{p:>11}{c:>10}" for what, formula, n, p, c in rows]
    lines.append(f"{'all':38}{total:>34}{'':>7}{predicted:>11}{saved.bytes:>10}")
    text = "\n".join([f"{tokens} tokens, {given}", *lines])
    print(text)
    assert all(p == c for *_, p, c in rows), f"\n{text}"
    assert predicted == saved.bytes
