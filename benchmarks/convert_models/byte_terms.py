"""Terms of the bytes that a part of a model keeps for backward: multiples of its sizes.

    Term("the input", h=2)                              2 h bytes a token
    Term("a norm's mean and rstd", count=2, one=4)      two tensors of 4 bytes a token

A term's bytes a token are a sum of multiples of symbols, whose values are given later; `one` is 1,
and "heads T" the product of two. A term with per_call, a number or such a sum, is kept once for a
call and not for each token.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence


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
