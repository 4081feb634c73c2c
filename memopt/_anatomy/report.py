"""The report that `memopt.anatomy` returns."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from memopt._anatomy.figure import draw_timeline
from memopt._anatomy.findings import Findings
from memopt._anatomy.page import anatomy_page, step_parts
from memopt._anatomy.table import anatomy_tables
from memopt._arguments import as_path
from memopt._snapshot.write import write_snapshot
from memopt.show.figure import write_figure
from memopt.show.sections import Section, Tables, text_of
from memopt.show.shown import Shown


@dataclass(frozen=True)
class Anatomy(Shown, Findings):
    """The memory of one training step. `print` it, or see `table`, `to_json`, `to_html`, `to_png`.

    Bytes everywhere; 1 MB is 10^6.
    """

    def to_json(self, path: str | Path | None = None) -> str:
        """Return JSON; also written to `path`, if there is one."""
        text = json.dumps(self.to_dict(), indent=1, allow_nan=False)
        if path is not None:
            as_path("Anatomy.to_json", path).write_text(text + "\n")
        return text

    def to_html(self, path: str | Path | None = None, *, formula: bool = False) -> str:
        """Return one page that needs no network; also written to `path`, if there is one.
        `formula`: as of `table`.
        """
        text = anatomy_page(self, formula)
        if path is not None:
            as_path("Anatomy.to_html", path).write_text(text)
        return text

    def to_snapshot(self, path: str | Path) -> None:
        """Write the step as a snapshot that PyTorch's viewer (https://pytorch.org/memory_viz)
        opens, and that `memopt.anatomy.read_snapshot` reads. Addresses are invented, times are the
        numbers of operators.
        """
        write_snapshot(as_path("Anatomy.to_snapshot", path), self.pieces)

    def parts_of_page(self) -> Iterator[str | Section]:
        """Return the page below the timeline, as a part of another report's."""
        return step_parts(self)

    def to_png(self, path: str | Path) -> None:
        """The timeline, drawn. Needs matplotlib."""
        file = as_path("Anatomy.to_png", path)
        write_figure(file, (11, 5), lambda figure: draw_timeline(figure, self))

    def tables(self) -> Tables:
        return anatomy_tables(self)

    def table(self, *, formula: bool = False) -> str:
        """Return text, as wide as the terminal. `formula`: whether closed formulas of transformers
        are shown next to the prediction, each with its error.
        """
        return text_of(anatomy_tables(self, formula))
