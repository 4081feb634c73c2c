"""The figures of the README and docs/, each from its results. report.py draws them anew.

A figure names the results that it was drawn from, in a field of the PNG. So one of other results is
found without drawing it again, which another version of matplotlib would do differently.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from benchmarks import checkpoint_depth, compile, hero, longest_sequence, models, plan, plot
from benchmarks.cli import OPS, RESULTS
from benchmarks.report_tables import result, result_file

FIELD = "Results"


ALL_OPS = tuple(f"cpu_{op}" for op in OPS)


def _ops(out: Path) -> None:
    plot.draw([result(name) for name in ALL_OPS], out)


def _depth(out: Path) -> None:
    cases = list(result(out.stem)["cases"].values())
    checkpoint_depth.draw(cases, cases[0]["device"], out)


def _plans(out: Path) -> None:
    plan.draw(result(out.stem)["cases"], out)


FIGURES: dict[str, Callable[[Path], None]] = {
    "cpu": _ops,
    "cpu_checkpoint_depth": _depth,
    "cpu_compile": lambda out: compile.draw(result(out.stem)["cases"]["curve"]["variants"], out),
    "cpu_hero": lambda out: hero.draw(result(out.stem)["cases"]["gpt"], out),
    "cpu_longest_sequence": lambda out: longest_sequence.draw(result(out.stem), out),
    "cpu_models": lambda out: models.draw(models.plain_cases(result(out.stem)["cases"]), out),
    "cpu_plan": _plans,
    "cuda_plan": _plans,
}
"""The figures that their results are enough for. The demo draws its own."""


def results_of(figure: str) -> tuple[str, ...]:
    """The results that it is drawn from: that of its name, but for the figure of all ops."""
    return ALL_OPS if figure == "cpu" else (figure,)


def _digest(figure: str) -> str:
    files = (result_file(name) for name in results_of(figure))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def draw(name: str) -> None:
    """Writes benchmarks/results/NAME.png, with the field that says what it was drawn from."""
    path = RESULTS / f"{name}.png"
    FIGURES[name](path)
    field = PngInfo()
    field.add_text(FIELD, _digest(name))
    with Image.open(path) as image:
        image.load()
        image.save(path, pnginfo=field, dpi=image.info["dpi"], optimize=True)


def is_of_its_results(name: str) -> bool:
    """Whether benchmarks/results/NAME.png was drawn from the results as they are now."""
    path = RESULTS / f"{name}.png"
    if not path.exists():
        return False
    with Image.open(path) as image:
        return bool(image.info.get(FIELD) == _digest(name))
