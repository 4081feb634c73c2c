"""Additions of `make docs` to MkDocs: pages work when they are opened from disk, since the search's
index is a script, which a page may load where it may not fetch a file, and Pygments colours code
when the pages are built; cells of wide tables know their heading, which css/memopt.css shows on a
telephone; the page of examples has their code, and those of the API all names; and pages show the
version, and link to the repository where pyproject.toml has its address.
"""

from __future__ import annotations

import ast
import html
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

_ROOT = Path(__file__).parent.parent
_EXAMPLES = _ROOT / "examples"
_API = _ROOT / "docs" / "api"
_MOST_BESIDE = 3
"""A telephone shows so many columns side by side."""
_BREAKS = re.compile(r"([_.(,=/])(?=\w)")
"""Behind these a name in a table may be broken."""


def on_config(config: Any, **_: Any) -> Any:
    """Say the version and the repository."""
    version = re.search(r'__version__ = "(.+?)"', (_ROOT / "memopt" / "_version.py").read_text())
    assert version is not None
    config.extra["version"] = version[1]
    found = address_in((_ROOT / "pyproject.toml").read_text())
    if found:
        config.repo_url, config.repo_name, config.edit_uri = found, "GitHub", "edit/main/docs/"
    return config


def address_in(project: str) -> str:
    """The repository's address in the text of pyproject.toml; empty where none is filled in."""
    found = re.search(r'^urls = \{ Repository = "(.+?)/?" \}$', project, re.MULTILINE)
    return found[1] if found else ""


def on_page_markdown(markdown: str, config: Any, **_: Any) -> str:
    """Put the code of all examples, the entries of a package, and all names of the API, where a
    page asks for them.
    """
    code = "\n".join(
        f"## {file.name}\n\n```python\n{file.read_text()}```\n"
        for file in sorted(_EXAMPLES.glob("*.py"))
    )
    markdown = markdown.replace("<!-- examples -->", code)
    return _with_entries(markdown).replace("<!-- names -->", _names(config.nav))


def _names(nav: list[Any]) -> str:
    """List the names of each page of the API, in the order of the navigation, with links."""
    lists = []
    pages = next(part["API"] for part in nav if "API" in part)
    for page in (_API.parent / path for entry in pages for path in entry.values()):
        text = _with_entries(page.read_text())
        title = text.partition("\n")[0].removeprefix("# ")
        entries = re.findall(r"^::: (\S+)\n(?: +.*\n)*? +heading: (\S+)", text, re.MULTILINE)
        names = "".join(f"- [`{name}`][{path}]\n" for path, name in entries)
        if page.name != "index.md":
            lists.append(f"## [{title}]({page.name})\n\n{names}")
    return "\n".join(lists)


def _with_entries(text: str) -> str:
    """Put an entry for each public name of a package where a page asks for them. (mkdocstrings
    leaves out a function that its own file is named like.)
    """

    def entries(package: re.Match[str]) -> str:
        found = sorted(_public(package[1]), key=lambda one: one[1].lower())
        parts = (f"::: {p}\n    options:\n      heading: {package[1]}.{n}\n" for p, n in found)
        return "\n".join(parts)

    return re.sub(r"<!-- entries: (\S+) -->", entries, text)


def _public(module: str) -> Iterator[tuple[str, str]]:
    """Yields where each name of a package is defined, and the name; imports nothing."""
    for node in _tree(_ROOT.joinpath(*module.split("."), "__init__.py")).body:
        if not isinstance(node, ast.ImportFrom):
            continue
        file = _tree(_ROOT.joinpath(*str(node.module).split(".")).with_suffix(".py"))
        named = {alias.name for alias in node.names}
        public = _all_of(file) if "*" in named else named
        for one in file.body:
            if isinstance(one, (ast.FunctionDef, ast.ClassDef)) and one.name in public:
                yield f"{node.module}.{one.name}", one.name


def _all_of(file: ast.Module) -> list[str]:
    """The names in a file's `__all__`."""
    values = (n.value for n in file.body if isinstance(n, ast.Assign) and _is_all(n.targets[0]))
    return list(ast.literal_eval(next(values)))


def _is_all(target: ast.expr) -> bool:
    return isinstance(target, ast.Name) and target.id == "__all__"


def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def on_page_content(text: str, page: Any, **_: Any) -> str:
    """Mark what css/memopt.css treats apart: output, which has no colours, and wide tables. Code
    without a language is Python in the API, where docstrings have it, and output elsewhere.
    """
    plain = r'<div class="codehilite">(<pre><span></span><code>([^<]*)</code>)'
    if page.file.src_uri.startswith("api/"):
        text = re.sub(plain, _coloured, text)
    else:
        text = re.sub(plain, r'<div class="codehilite plain">\1', text)
    return re.sub(r"<table>.*?</table>", _for_narrow_screens, text, flags=re.DOTALL)


def _coloured(code: re.Match[str]) -> str:
    python = highlight(html.unescape(code[2]), PythonLexer(), HtmlFormatter(nowrap=True))
    return f'<div class="codehilite"><pre><span></span><code>{python}</code>'


def _for_narrow_screens(table: re.Match[str]) -> str:
    """Let names break at their signs, and name the heading in each cell of a wide table."""

    def breakable(code: re.Match[str]) -> str:
        return "<code>" + _BREAKS.sub(r"\1<wbr>", code[1]) + "</code>"

    return _named_cells(re.sub(r"<code>([^<]*)</code>", breakable, table[0]))


def _named_cells(text: str) -> str:
    """Name the heading in each cell of a table with many columns."""
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
