"""The map of the tests: `python -m tests.support.map` writes tests/README.md.

A line for each file, of what it says first that it proves.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent.parent
README = TESTS / "README.md"
HEAD = """# The map of the tests

What each file proves, from its first lines; `python -m tests.support.map` writes this page.
Folders mirror memopt's. What several share is in `support/`: the ops' cases in `support/cases/`,
from which an op gets most of its tests. `simt/` runs the CUDA kernels without a GPU, `accelerator/`
has a device of its own, `offload/cpp` and `plan/cpp` are programs in C++. `make test` leaves out
what is slow (`conftest.py`, `slow.txt`), `make test-full` some combinations of what takes longest
(`thorough.txt`).
"""


def proves(file: Path) -> str:
    """The first statement of a file's docstring, without "Proves" in front."""
    said = " ".join((ast.get_docstring(ast.parse(file.read_text())) or "").split())
    said = re.sub(r"^Proves(:| that)? ?", "", said)
    return re.split(r"[.;](?: |$)", said, maxsplit=1)[0]


def page() -> str:
    folders: dict[Path, list[Path]] = {}
    for file in sorted(TESTS.rglob("test_*.py")):
        folders.setdefault(file.parent.relative_to(TESTS), []).append(file)
    parts = [HEAD]
    for folder, files in sorted(folders.items()):
        lines = [f"- `{file.name}`: {proves(file)}" for file in files]
        parts.append("\n".join([f"## {folder if folder.name else 'tests'}", "", *lines]) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    README.write_text(page())
