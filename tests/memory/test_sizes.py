"""Proves: memopt says sizes in one unit, MB of 10^6 bytes, wherever it says one; a budget that was
given as text as it was given besides; and bounds from below rounded up.
"""

from __future__ import annotations

import copy
import json
import pickle
import re
from pathlib import Path

import pytest

from memopt.memory.sizes import Size, as_bytes, as_text, at_least

MEMOPT = Path(__file__).parents[2] / "memopt"


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0.0 MB"),
        (1000, "1,000 B"),
        (49_999, "49,999 B"),
        (50_000, "0.1 MB"),
        (20_000_000, "20.0 MB"),
        (1 << 20, "1.0 MB"),
        (24 << 30, "25,769.8 MB"),
    ],
)
def test_a_size_in_mb(nbytes: int, text: str) -> None:
    assert as_text(nbytes) == text


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("20MB", "20MB (20.0 MB)"),
        (" 24GiB ", "24GiB (25,769.8 MB)"),
        ("1e9", "1e9 (1,000.0 MB)"),
        (5_000_000, "5.0 MB"),
    ],
)
def test_a_budget_is_said_as_it_was_given(given: object, text: str) -> None:
    budget = as_bytes("f: budget", given)
    assert as_text(budget) == text
    for other in (copy.deepcopy(budget), pickle.loads(pickle.dumps(budget))):
        assert (other, as_text(other)) == (budget, text)
    assert json.loads(json.dumps(budget)) == int(budget)
    assert as_text(budget + 0) == as_text(int(budget))  # computed: given by nobody


def test_a_bound_is_rounded_up() -> None:
    """So that what an error asks for is enough."""
    for nbytes in (50_001, 27_600_001, 27_649_999, 27_700_000, 10**10 + 1):
        said, _ = at_least(nbytes, 0)
        assert nbytes <= as_bytes("f: budget", said.replace(",", "")) < nbytes + 100_000, said
    assert at_least(1001, 1000) == ("1,001 B", "1,000 B")
    assert at_least(25_000_000, as_bytes("f: budget", "20MB")) == ("25.0 MB", "20MB (20.0 MB)")
    assert type(Size(3) + 1) is int


def test_a_bound_and_what_was_got_never_read_alike() -> None:
    assert at_least(1_286_001, 1_265_617) == ("1,286,001 B", "1,265,617 B")
    given = as_bytes("f: budget", "1.3MB")
    assert at_least(1_300_001, given) == ("1.4 MB", "1.3MB (1.3 MB)")
    assert at_least(1_299_999, Size(1_299_000, "1.299MB")) == (
        "1,299,999 B",
        "1.299MB (1,299,000 B)",
    )


def test_no_other_file_has_a_unit_of_its_own() -> None:
    """Binary units are for what users write: docstrings name them, no message does."""
    for file in sorted(MEMOPT.rglob("*.py")):
        text = re.sub(r'"""(?:.|\n)*?"""', "", file.read_text())
        for line in re.findall(r'.*f".*[^\d][KMGT]iB.*', text):
            raise AssertionError(f"{file.name}: {line.strip()}")
