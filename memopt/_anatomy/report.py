"""What `memopt.anatomy` returns."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from memopt._anatomy.figure import write_figure
from memopt._anatomy.findings import Findings
from memopt._anatomy.page import page_of, tables_of
from memopt._anatomy.table import advice_of, lines_of, sections_of, text_of, title_of
from memopt.show.page import fragment


@dataclass(frozen=True)
class Anatomy(Findings):
    """The memory of one training step. `print` it, or see `table`, `to_json`, `to_html`, `to_png`.

    Bytes everywhere; 1 MB is 10^6.
    """

    def to_json(self, path: str | Path | None = None) -> str:
        """As JSON; also written to `path`, if there is one."""
        text = json.dumps(self.to_dict(), indent=1, allow_nan=False)
        if path is not None:
            Path(path).write_text(text + "\n")
        return text

    def to_html(self, path: str | Path | None = None, *, formula: bool = False) -> str:
        """As one page that needs no network; also written to `path`, if there is one. `formula`: as
        of `table`.
        """
        text = page_of(self, formula=formula)
        if path is not None:
            Path(path).write_text(text)
        return text

    def html_tables(self) -> str:
        """The tables of its page alone, as a part of another report's."""
        return tables_of(self)

    def to_png(self, path: str | Path) -> None:
        """The timeline, drawn. Needs matplotlib."""
        write_figure(Path(path), self)

    def table(self, *, formula: bool = False) -> str:
        """As text, as wide as the terminal. `formula`: whether closed formulas of transformers
        stand beside what was predicted, each with its error.
        """
        return text_of(self, formula)

    def __str__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        """As notebooks show it: the tables, what would help first."""
        tables = (*advice_of(self), *sections_of(self))
        return fragment(title_of(self), tables, lines_of(self))
