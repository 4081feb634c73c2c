"""Proves: the benchmarks run where the tests are not, since they import nothing from them."""

from __future__ import annotations

import ast
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def imported(file: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return names


def test_benchmarks_import_nothing_from_the_tests() -> None:
    files = sorted(BENCHMARKS.rglob("*.py"))
    assert len(files) > 10
    found = {file.name: name for file in files for name in imported(file) if is_of_tests(name)}
    assert found == {}


def is_of_tests(module: str) -> bool:
    return module.split(".")[0] == "tests"
