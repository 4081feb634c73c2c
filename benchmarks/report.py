"""The tables and figures of the README and docs/, from benchmarks/results.

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
import math
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import models, summary
from benchmarks.cli import OPS, RESULTS
from benchmarks.report_figures import FIGURES, draw, is_of_its_results, results_of
from benchmarks.report_tables import TABLES, Missing, gpu_cases, result
from benchmarks.summary import geometric_mean, measured

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
BLOCK = re.compile(r"(<!-- begin: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)
PICTURE = re.compile(r"!\[[^\]]*\]\(([^)]+)\)")
NAMED_BY_ALL = ("machine", "versions")


def _span(values: Sequence[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


def claim_of_compiled() -> str:
    cases = [c["variants"] for n, c in result("cpu_compile")["cases"].items() if n != "curve"]
    held, times = [], []
    for ways in cases:
        held.append(ways["memopt.compile"]["held_bytes"] / ways["torch.compile"]["held_bytes"])
        times.append(ways["memopt.compile"]["over_torch"]["median"])
    return (
        f"{_span(held)} of the bytes that `torch.compile` holds, at {geometric_mean(times):.2f} of "
        "its time"
    )


def claim_of_bytes() -> str:
    cases = result("cpu_convert_bytes")["cases"]
    share = {n: f"{c['after_bytes'] / c['before_bytes']:.2f}x" for n, c in cases.items()}
    others = ", ".join(f"{name} {share[name]}" for name in ("GPT-2", "BERT", "ViT", "T5"))
    return f"Llama: {share['Llama']} of the saved bytes, at {times_of('convert_llama')}; {others}"


def times_of(op: str) -> str:
    cases = [c for c in measured(result("cpu_convert")) if c["op"] == op]
    times = [1 / case["variants"]["memopt"]["ratio"]["median"] for case in cases]
    return f"{_span(times)} of eager's time"


def claim_of_plans() -> str:
    def times(case: str) -> tuple[str, str]:
        ways = result("cpu_plan")["cases"][case]["variants"]
        names = ("plan at checkpoint every block", "checkpoint every block")
        ours, uniform = (f"{ways[name]['over_plain']['median']:.2f}" for name in names)
        return ours, uniform

    (alike, uniform), (unlike, uniform_too) = times("chain"), times("encoder-decoder")
    return (
        f"takes {alike} of eager's time instead of {uniform}, with the unlike blocks of an "
        f"encoder-decoder {unlike} instead of {uniform_too}"
    )


def claim_of_dropout() -> str:
    ways = result("cpu_models")["cases"]["GPT-2, dropout"]["variants"]
    eager = ways[models.EAGER]["peak_bytes"]

    def of(name: str) -> tuple[str, str]:
        way = ways[name]
        return f"{way['over_eager']['median']:.2f}", f"{way['peak_bytes'] / eager:.2f}x"

    recipes, both, torch_s = map(
        of, ("memopt.convert", "convert and regions", "torch.utils.checkpoint")
    )
    return (
        f"recipes take {recipes[0]} of eager's time at {recipes[1]} of its peak, with regions as "
        f"well {both[0]} at {both[1]}, where `torch.utils.checkpoint` takes {torch_s[0]} at "
        f"{torch_s[1]}"
    )


def claim_of_gpu() -> str:
    said = []
    for name, op in (("layer_norm", "layer_norm"), ("rms_norm", "rms_norm"), ("gated", "swiglu")):
        cases = gpu_cases(result(f"cuda_{name}"), op, "forward+backward")
        ratios = [case["memopt"]["ratio"]["median"] for case in cases]
        said.append(f"{op} {geometric_mean(ratios):.2f}x")
    return f"{', '.join(said)} PyTorch's speed"


def claim_of_build() -> str:
    found = result("cpu_build")["cases"]["wheel"]["variants"]["memopt"]
    return f"{math.ceil(found['processor_seconds'] / 60)} minutes of processor time"


CLAIMS: dict[str, tuple[Callable[[], str], ...]] = {
    "README.md": (
        claim_of_bytes,
        claim_of_plans,
        claim_of_dropout,
        claim_of_compiled,
        claim_of_gpu,
        claim_of_build,
    ),
}
"""Sentences with figures, made from the results; each must stand in its page, bold or not."""


def problems() -> list[str]:
    """What the pages show without a result behind it, in words."""
    found = []
    for page in PAGES:
        text = page.read_text()
        for picture in PICTURE.findall(text):
            path = (page.parent / picture).resolve()
            if not all(file.exists() for file in (path, *results_of(path.stem))):
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
    return summary.report([result(f"cpu_{op}") for op in OPS])


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
