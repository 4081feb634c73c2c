"""What the tutorial prints and draws: `python -m tests.docs.outputs` runs its blocks and writes the
page anew, with the output of each block below it, the picture, and the page as a notebook.

Lines of a block are counted from its own beginning, so that outputs which name them do not change
with the text above. Times are estimates there (`measure=False`), so that outputs are the same on
every machine with the versions that the page names.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).parents[2]
TUTORIAL = ROOT / "docs" / "tutorial.md"
NOTEBOOK = ROOT / "examples" / "tutorial.ipynb"
PICTURES = ROOT / "docs" / "pictures"
DRAWN = {"curve.png": "tutorial-curve.png"}
"""The file that a block writes, and its name among the pictures."""
WIDTH = 100
_MOST_LINES = 22
_MORE = "... {} more lines"
_BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.M | re.S)
_VERSIONS = re.compile(r"^<!-- printed with (.*?) -->\n", re.M)


class Printed(NamedTuple):
    """A block of the page, and what it printed."""

    code: str
    output: str

    @property
    def shown(self) -> str:
        """The output as the page has it: its first lines, where it has many."""
        lines = self.output.splitlines()
        if len(lines) > _MOST_LINES:
            lines[_MOST_LINES - 2 :] = [_MORE.format(len(lines) - _MOST_LINES + 2)]
        return "".join(f"{line}\n" for line in lines)


def versions() -> str:
    import transformers

    return f"torch {torch.__version__}, transformers {transformers.__version__}"


def versions_of(text: str) -> str:
    """The versions that the page was printed with."""
    found = _VERSIONS.search(text)
    return found[1] if found else ""


def shown_in(text: str) -> list[str]:
    """The output below each block, as the page has it."""
    return [match[2] or "" for match in _BLOCK.finditer(text)]


def printed(text: str) -> Iterator[Printed]:
    """Run the blocks of a page, one after another, in the current folder."""
    scope: dict[str, Any] = {"__name__": "page"}
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(WIDTH)
    try:
        for match in _BLOCK.finditer(text):
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                exec(compile(match[1], "tutorial.py", "exec"), scope)
            yield Printed(match[1], output.getvalue())
    finally:
        os.environ.pop("COLUMNS")
        if before is not None:
            os.environ["COLUMNS"] = before


def with_outputs(text: str, blocks: list[Printed]) -> str:
    """The page, with the output of each block below it."""
    rest = iter(blocks)

    def block(match: re.Match[str]) -> str:
        shown = next(rest).shown
        code = f"```python\n{match[1]}```\n"
        return f"{code}\n```text\n{shown}```\n" if shown else code

    text = _BLOCK.sub(block, _VERSIONS.sub("", text))
    title, _, below = text.partition("\n")
    return f"{title}\n<!-- printed with {versions()} -->\n{below}"


def notebook_of(text: str) -> str:
    """The page as a notebook: its text, its blocks, and the outputs that it shows."""
    cells: list[dict[str, Any]] = []
    text = _VERSIONS.sub("", text)
    end = 0
    for match in _BLOCK.finditer(text):
        _add_text(cells, text[end : match.start()])
        outputs = [_stream(match[2])] if match[2] else []
        outputs += [_picture(file) for name, file in DRAWN.items() if name in match[1]]
        cells.append(
            {
                "cell_type": "code",
                "execution_count": None,
                "id": f"cell-{len(cells)}",
                "metadata": {},
                "outputs": outputs,
                "source": match[1].rstrip("\n").splitlines(keepends=True),
            }
        )
        end = match.end()
    _add_text(cells, text[end:])
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    book = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(book, indent=1) + "\n"


def _add_text(cells: list[dict[str, Any]], text: str) -> None:
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)\n*", "", text).strip("\n")  # pictures are outputs there
    text = re.sub(r"\]\((?!http)([^)]+\.md)", r"](../docs/\1", text)
    if text:
        cells.append(
            {
                "cell_type": "markdown",
                "id": f"cell-{len(cells)}",
                "metadata": {},
                "source": text.splitlines(keepends=True),
            }
        )


def _stream(text: str) -> dict[str, Any]:
    return {"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)}


def _picture(file: str) -> dict[str, Any]:
    data = base64.b64encode((PICTURES / file).read_bytes()).decode()
    return {"data": {"image/png": data}, "metadata": {}, "output_type": "display_data"}


def main() -> None:
    text = TUTORIAL.read_text()
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            blocks = list(printed(text))
            PICTURES.mkdir(exist_ok=True)
            for name, file in DRAWN.items():
                shutil.copyfile(name, PICTURES / file)
        finally:
            os.chdir(before)
    TUTORIAL.write_text(with_outputs(text, blocks))
    NOTEBOOK.write_text(notebook_of(TUTORIAL.read_text()))


if __name__ == "__main__":
    main()
