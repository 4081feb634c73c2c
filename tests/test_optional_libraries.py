"""Proves: tests import what need not be installed (transformers, accelerate, Lightning, PEFT and
their like) by pytest.importorskip, so that the suite skips them where a library is missing.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
OPTIONAL = {
    "accelerate", "bitsandbytes", "datasets", "diffusers", "lightning", "peft",
    "pytorch_lightning", "timm", "tokenizers", "torchtune", "transformers", "trl",
}  # fmt: skip
BEHIND = {
    "support/tiny_by_hand.py": "support/tiny_transformers.py",
    "support/tiny_configs.py": "support/tiny_transformers.py",
    "convert/checkpointed.py": "convert/test_gradient_checkpointing.py",
    "docs/outputs.py": "docs/test_outputs.py",
}
"""Files that are used behind an importorskip of another one."""


def imported(tree: ast.AST) -> Iterator[str]:
    """The optional libraries that import statements name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        else:
            continue
        yield from OPTIONAL.intersection(name.partition(".")[0] for name in names)


def asks(text: str) -> bool:
    return "importorskip(" in text


def test_what_need_not_be_installed_is_asked_for() -> None:
    found = []
    for file in sorted(TESTS.rglob("*.py")):
        name, text = file.relative_to(TESTS).as_posix(), file.read_text()
        if set(imported(ast.parse(text))) and not asks(text):
            found.append(name)
    assert set(found) == BEHIND.keys()
    for name in BEHIND.values():
        assert asks((TESTS / name).read_text()), name
