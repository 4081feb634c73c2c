"""Proves: docstrings of memopt, and texts below fields, begin with a subject or a verb, so that
they can be read without the line above them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "memopt").rglob("*.py"))

HEADLESS = """
As At Before Beside But By For In Its Not Of On One's So That Those To What Where Which With Within
Without
"""
"""First words of a sentence that lacks its head: "Of each block." for "The bytes of each block.",
"What it costs." for "The cost."."""


def texts(source: str) -> Iterator[tuple[int, str]]:
    """The texts that stand alone as statements, docstrings and those below fields, with lines."""
    for node in ast.walk(ast.parse(source)):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield value.lineno, value.value.strip()


def headless(source: str) -> list[str]:
    """The texts that begin so, as "line: first line"."""
    found = []
    for line, text in texts(source):
        first = text.partition("\n")[0]
        if first.split(" ")[0] in HEADLESS.split() or first.startswith("The same"):
            found.append(f"{line}: {first}")
    return found


@pytest.mark.parametrize("file", FILES, ids=[str(f.relative_to(ROOT)) for f in FILES])
def test_docstrings_begin_with_a_subject_or_a_verb(file: Path) -> None:
    assert headless(file.read_text()) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('"""Of a step."""', ["1: Of a step."]),
        ('class A:\n    a: int\n    """What it costs,\n    in bytes."""', ["3: What it costs,"]),
        ('def f():\n    """The same of backward."""', ["2: The same of backward."]),
        ('"""Whatever it is."""\n"""Offloaded bytes."""\nx = "What is no docstring"', []),
    ],
)
def test_a_headless_text_is_found(source: str, found: list[str]) -> None:
    assert headless(source) == found
