"""Proves: what the tutorial shows below its blocks is what they print, and its notebook has the
same cells: both run here. `python -m tests.docs.outputs` writes them anew.

The cells run as they are: nbclient and a kernel would be eight packages for the same exec.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.docs import outputs


@pytest.mark.slow
def test_the_tutorial_shows_what_its_blocks_print(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the versions that it names, to the letter; with others the blocks run, and print."""
    pytest.importorskip("transformers")
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    text = outputs.TUTORIAL.read_text()
    found = [block.shown for block in outputs.printed(text)]
    said = outputs.shown_in(text)
    assert [bool(one) for one in found] == [bool(one) for one in said]
    if outputs.versions() == outputs.versions_of(text):
        assert found == said
    for name in outputs.DRAWN:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_the_notebook_is_the_tutorial() -> None:
    """Its code is the page's, which the test above runs."""
    text = outputs.TUTORIAL.read_text()
    assert outputs.NOTEBOOK.read_text() == outputs.notebook_of(text)
    book = json.loads(outputs.NOTEBOOK.read_text())
    code = ["".join(c["source"]) + "\n" for c in book["cells"] if c["cell_type"] == "code"]
    assert code == [match[1] for match in outputs._BLOCK.finditer(text)]
    assert any(
        "image/png" in o.get("data", {}) for c in book["cells"] for o in c.get("outputs", ())
    )


def test_a_page_is_written_with_its_outputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it has old ones; long ones end with how many lines follow."""
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    page = "# T\n\n```python\nx = 1\n```\n\n```python\nfor i in range(99):\n    print(i + x)\n```\n"
    once = outputs.with_outputs(page, list(outputs.printed(page)))
    assert "```text\n1\n2\n" in once
    assert "\n20\n... 79 more lines\n```\n" in once
    assert outputs.versions_of(once) == outputs.versions()
    stale = once.replace("\n20\n", "\nof last year\n")
    assert outputs.with_outputs(stale, list(outputs.printed(stale))) == once
