"""What `make docs` adds to MkDocs: pages work when they are opened from disk, since the search's
index is a script, which a page may load where it may not fetch a file, and Pygments colours code
when the pages are built; cells of wide tables know their heading, which css/memopt.css shows on a
telephone; and the page of examples has their code.
"""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority
from pygments.formatters import HtmlFormatter

_EXAMPLES = Path(__file__).parent.parent / "examples"
_MOST_BESIDE = 3
"""A telephone shows so many columns side by side."""


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the code of all examples where a page asks for it."""
    code = "\n".join(
        f"## {file.name}\n\n```python\n{file.read_text()}```\n"
        for file in sorted(_EXAMPLES.glob("*.py"))
    )
    return markdown.replace("<!-- examples -->", code)


def on_page_content(text: str, **_: Any) -> str:
    """Mark what css/memopt.css treats apart: output, which has no colours, and wide tables."""
    plain = r'<div class="codehilite">(<pre><span></span><code>[^<]*</code>)'
    text = re.sub(plain, r'<div class="codehilite plain">\1', text)
    return re.sub(r"<table>.*?</table>", _named_cells, text, flags=re.DOTALL)


def _named_cells(table: re.Match[str]) -> str:
    """Name the heading in each cell of a table with many columns."""
    text = table[0]
    headings = [
        html.escape(html.unescape(re.sub(r"<[^>]+>", "", heading)))
        for heading in re.findall(r"<th\b[^>]*>(.*?)</th>", text, re.DOTALL)
    ]
    if len(headings) <= _MOST_BESIDE:
        return text
    number = -1

    def cell(match: re.Match[str]) -> str:
        nonlocal number
        number += 1
        return f'<td data-of="{headings[number % len(headings)]}"{match[1]}>'

    text = re.sub(r"<td\b([^>]*)>", cell, text)
    return text.replace("<table>", '<table class="many">', 1)


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
