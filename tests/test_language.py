"""Proves: docstrings, texts below fields and headings of the documentation begin with a subject or
a verb, so that they can be read without the line above them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("benchmarks", "docs_theme", "examples", "memopt")
FILES = [
    ROOT / "setup.py",
    *sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")),
]
PAGES = sorted(
    page
    for pattern in ("*.md", "*/*.md", "docs/api/*.md", "tests/*/README.md")
    for page in ROOT.glob(pattern)
)

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


def headless_headings(page: str) -> list[str]:
    """The headings that begin so; lines of code blocks are none."""
    prose = re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", prose, flags=re.MULTILINE)
    return [text for text in headings if re.match(r"(Of|What|The same|So)\b", text)]


@pytest.mark.parametrize("page", PAGES, ids=[str(f.relative_to(ROOT)) for f in PAGES])
def test_headings_begin_with_a_subject_or_a_verb(page: Path) -> None:
    assert headless_headings(page.read_text()) == []


def test_a_headless_heading_is_found() -> None:
    page = "# A page\n\n## What it costs\n\n```python\n# What is code\n```\n\n## Costs\n"
    assert headless_headings(page) == ["What it costs"]


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
