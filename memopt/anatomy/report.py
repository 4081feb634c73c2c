"""What `memopt.anatomy` returns."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from memopt.anatomy.figure import write_figure
from memopt.anatomy.findings import Findings
from memopt.anatomy.page import page_of
from memopt.anatomy.table import text_of


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

    def to_html(self, path: str | Path | None = None) -> str:
        """As one page that needs no network; also written to `path`, if there is one."""
        text = page_of(self)
        if path is not None:
            Path(path).write_text(text)
        return text

    def to_png(self, path: str | Path) -> None:
        """The timeline, drawn. Needs matplotlib."""
        write_figure(Path(path), self)

    def table(self) -> str:
        """As text, by rich if it is installed."""
        return text_of(self)

    def __str__(self) -> str:
        return self.table()
