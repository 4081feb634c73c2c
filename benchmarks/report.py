"""The tables and figures of README, docs/ and NOTES.md, from benchmarks/results.

`python -m memopt bench --report` (or `python -m benchmarks.report`) writes every table between
`<!-- begin: NAME -->` and `<!-- end -->` anew, and cpu_summary.md, draws the figures that results
are enough for, and fails if something is not backed by a result: a table without one, a picture
without a JSON of its name, a sentence of CLAIMS with other figures than the results give, a result
that names no machine, versions or command. `--check` writes nothing, and fails as well where
something would change.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import summary
from benchmarks.cli import RESULTS
from benchmarks.report_claims import CLAIMS
from benchmarks.report_figures import ALL_OPS, FIGURES, draw, is_of_its_results, results_of
from benchmarks.report_tables import TABLES, Missing, result

ROOT = Path(__file__).parent.parent
PAGES = (
    ROOT / "README.md",
    ROOT / "benchmarks" / "NOTES.md",
    *sorted((ROOT / "docs").glob("*.md")),
)
BLOCK = re.compile(r"(<!-- begin: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)
PICTURE = re.compile(r"!\[[^\]]*\]\(([^)]+)\)")
DRAWN_BY_PAGES = ROOT / "docs" / "pictures"
"""The pictures that blocks of the pages draw (tests/docs/outputs.py)."""
NAMED_BY_ALL = ("machine", "versions")


def problems() -> list[str]:
    """Lists what the pages show without a result behind it, in words."""
    found = []
    for page in PAGES:
        text = page.read_text()
        for picture in PICTURE.findall(text):
            path = (page.parent / picture).resolve()
            if path.parent == DRAWN_BY_PAGES and path.exists():
                continue
            backed = (RESULTS / f"{name}.json" for name in results_of(path.stem))
            if not all(file.exists() for file in (path, *backed)):
                found.append(f"{page.name}: {picture} has no result behind it")
        for name in (match[2] for match in BLOCK.finditer(text)):
            if name not in TABLES:
                found.append(f"{page.name}: nothing makes the table {name!r}")
        for claim in CLAIMS.get(page.name, ()):
            try:
                sentence = claim()
            except Missing as missing:
                found.append(f"{page.name}: {missing}")
                continue
            if sentence not in text.replace("**", ""):
                found.append(f"{page.name}: the results say {sentence!r}")
    for path in sorted(RESULTS.glob("*.json")):
        run = json.loads(path.read_text())
        unnamed = [name for name in NAMED_BY_ALL if not run.get(name)]
        if not (run.get("commands") or run.get("command")):
            unnamed.append("command")
        found += [f"{path.name}: names no {name}" for name in unnamed]
    return found


def redrawn(text: str) -> str:
    """A page with its tables made anew."""
    return BLOCK.sub(
        lambda match: match[1] + TABLES[match[2]]() + match[3] if match[2] in TABLES else match[0],
        text,
    )


def summary_of_ops() -> str:
    """The tables of all cases of the ops, as `python -m benchmarks.cpu` writes them."""
    return summary.report([result(name) for name in ALL_OPS])


def _written(path: Path, make: Callable[[], str], check: bool) -> list[str]:
    """Writes the text, or says that it would."""
    try:
        new = make()
    except Missing as missing:
        return [f"{path.name}: {missing}"]
    if path.exists() and new == path.read_text():
        return []
    if check:
        return [f"{path.name}: its tables are not those of the results"]
    path.write_text(new)
    print(f"written: {path.name}")
    return []


def _drawn(name: str, check: bool) -> list[str]:
    """Draws the figure, or says that it would."""
    try:
        if is_of_its_results(name):
            return []
        if check:
            return [f"{name}.png: was drawn from other results"]
        draw(name)
    except Missing as missing:
        return [f"{name}.png: {missing}"]
    print(f"drawn: {name}.png")
    return []


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m memopt bench --report", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args(argv).check
    found = problems()
    for page in PAGES:
        found += _written(page, functools.partial(redrawn, page.read_text()), check)
    found += _written(RESULTS / "cpu_summary.md", summary_of_ops, check)
    for name in FIGURES:
        found += _drawn(name, check)
    for problem in found:
        print(problem, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
