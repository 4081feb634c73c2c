"""What a block should keep for backward, term by term, compared with the storages that it keeps.

    terms = [Term("the input", h=2), Term("a norm's mean and rstd", count=2, one=4)]
    assert_kept(terms, saved, tokens=128, h=768)

compares storage by storage, so that two mistakes cannot cancel; a failure shows the whole table.
benchmarks/convert_models/byte_terms.py says what a term is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from benchmarks.convert_models.byte_terms import Term, format_sum, sum_per_token
from memopt.memory.saved import SavedTensors


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
