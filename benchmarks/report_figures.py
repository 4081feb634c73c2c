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

from benchmarks import checkpoint_depth, compile, hero, models, plan, plot
from benchmarks.cli import OPS, RESULTS
from benchmarks.report_tables import Missing, result

FIELD = "Results"


def _ops(out: Path) -> None:
    plot.draw([result(f"cpu_{op}") for op in OPS], out)


def _depth(out: Path) -> None:
    cases = list(result(out.stem)["cases"].values())
    checkpoint_depth.draw(cases, cases[0]["device"], out)


FIGURES: dict[str, Callable[[Path], None]] = {
    "cpu": _ops,
    "cpu_checkpoint_depth": _depth,
    "cpu_compile": lambda out: compile.draw(result(out.stem)["cases"]["curve"]["variants"], out),
    "cpu_hero": lambda out: hero.draw(result(out.stem)["cases"]["gpt"], out),
    "cpu_models": lambda out: models.draw(models.plain_cases(result(out.stem)["cases"]), out),
    "cpu_plan": lambda out: plan.draw(result(out.stem)["cases"], out),
    "cuda_plan": lambda out: plan.draw(result(out.stem)["cases"], out),
}
"""Those that their results are enough for. The demo draws its own."""


def results_of(name: str) -> list[Path]:
    """What the figure is drawn from: the result of its name, but for that of all ops."""
    names = [f"cpu_{op}" for op in OPS] if name == "cpu" else [name]
    return [RESULTS / f"{name}.json" for name in names]


def _digest(name: str) -> str:
    """Of the figure's results.

    Raises:
        Missing: one of them is not there.
    """
    digest = hashlib.sha256()
    for path in results_of(name):
        if not path.exists():
            raise Missing(f"no result {path.name}")
        digest.update(path.read_bytes())
    return digest.hexdigest()


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
