"""What `make docs` adds to MkDocs, so that its pages work when they are opened from disk: the
search's index as a script, which a page may load where it may not fetch a file; and the colours of
code, which Pygments marks when the pages are built.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority
from pygments.formatters import HtmlFormatter


@event_priority(-100)  # behind the plugin that writes the index
def on_post_build(config: Any, **_: Any) -> None:
    site = Path(config.site_dir)
    search = site / "search"
    index = (search / "search_index.json").read_text()
    (search / "index.js").write_text(f"window.memoptSearchIndex = {index};\n")
    for file in ("search_index.json", "worker.js"):  # of MkDocs' own search
        (search / file).unlink()
    colours = HtmlFormatter(style="default").get_style_defs(".codehilite")
    (site / "css" / "code.css").write_text(f"{colours}\n")
