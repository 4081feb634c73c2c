"""Proves: every Python block of the README and of docs/ runs as it stands, the blocks of a page one
after another; each public name has an entry with an example in docs/api; and the documentation
builds without a warning.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import memopt
from memopt._convert.register import registered_rules

ROOT = Path(__file__).parents[2]
APART = ("tutorial.md",)
"""test_outputs.py runs its blocks."""
PAGES = [
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.name not in APART),
]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SLOW = ("plan.md", "anatomy.md", "api/plan.md", "api/anatomy.md", "api/check.md")
"""Pages whose blocks predict and measure training steps."""
THOROUGH = ("api/plan.md", "index.md")
"""Pages whose blocks are much like those of other pages: the longest."""
OF_MODELS = ("transformers", "matplotlib", "rich")
"""What the pages use beside PyTorch."""


def _name(page: Path) -> str:
    """Its path in docs/, or in the repository."""
    docs = ROOT / "docs"
    return page.relative_to(docs if page.is_relative_to(docs) else ROOT).as_posix()


def _marks(name: str) -> list[pytest.MarkDecorator]:
    slow = [pytest.mark.slow] * (name in SLOW + THOROUGH)
    return slow + [pytest.mark.thorough] * (name in THOROUGH)


def names() -> dict[str, Any]:
    """What docs/index.md says that the blocks of a page may use."""
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=3, n_embd=32, n_head=2, n_positions=32, vocab_size=64)
    model = transformers.GPT2LMHeadModel(config)
    ids = torch.randint(64, (4, 32))
    optimizer = torch.optim.AdamW(model.parameters())
    return {
        "__name__": "page",
        "model": model,
        "batch": {"input_ids": ids, "labels": ids.clone()},
        "optimizer": optimizer,
    }


@pytest.fixture
def _as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Files go to a folder of their own, and what a page sets for the process ends with it."""
    monkeypatch.chdir(tmp_path)
    rules = set(registered_rules())
    yield
    memopt._convert.register._registered.clear()  # type: ignore[attr-defined]
    assert set(registered_rules()) <= rules
    memopt.offload.configure()


@pytest.mark.usefixtures("_as_before")
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=_marks(_name(page)), id=_name(page)) for page in PAGES],
)
def test_the_blocks_of_a_page_run(page: Path) -> None:
    text = page.read_text()
    blocks = list(BLOCK.finditer(text))
    if not blocks:
        return  # it has none
    for module in OF_MODELS:
        pytest.importorskip(module)
    scope = names()
    for block in blocks:
        line = text.count("\n", 0, block.start(1))
        exec(compile("\n" * line + block[1], str(page), "exec"), scope)


def test_every_public_name_has_an_example() -> None:
    text = "".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    entries = re.split(r"^::: ", text, flags=re.MULTILINE)[1:]
    examples = {}
    for entry in entries:
        heading = re.search(r"^ +heading: (\S+)", entry, re.MULTILINE)
        name = heading[1] if heading else entry.split()[0]
        examples[name] = "```python" in entry
    apart = {"memopt.functional", "memopt.nn", "memopt.__version__"}
    public = {f"memopt.{name}" for name in memopt.__all__}
    public |= {f"memopt.types.{n}" for n in memopt.types.__all__ if not hasattr(memopt, n)}
    missing = public - apart - set(examples)
    assert not missing
    assert {name for name, has in examples.items() if not has} <= apart


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("mkdocstrings") is None, reason="mkdocstrings is not installed"
)
def test_the_documentation_builds(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "api" / "convert.html").exists()
