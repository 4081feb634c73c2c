"""Proves: the documentation that `make docs` builds works when its pages are opened from disk, with
no network: every page asks for files of its own alone, the search finds, code is coloured, tables
and code are not cut; the last pages have a heading of their own; and pages have the version, and
link to the repository where its address is known. What needs a browser runs where there is one.
"""

from __future__ import annotations

import html
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import memopt
from tests.support.browser import dom_of, said_by

ROOT = Path(__file__).parents[2]

if importlib.util.find_spec("mkdocstrings") is None:
    pytest.skip("mkdocstrings is not installed", allow_module_level=True)

from mkdocs.config import load_config  # noqa: E402
from mkdocs.structure.files import File  # noqa: E402
from mkdocs.structure.pages import Page  # noqa: E402

pytestmark = pytest.mark.slow

# How far the page goes beyond the window; what goes beyond its column; what scrolls in it.
CUT = """[...document.querySelectorAll("iframe")].map(iframe => {
  const root = iframe.contentDocument.documentElement, column = root.querySelector(".rst-content");
  const all = [...column.querySelectorAll("pre, table, img")];
  const right = column.getBoundingClientRect().right;
  const named = found => found.map(e => e.textContent.trim().slice(0, 60));
  const isOutput = e => root.clientWidth < 600 && e.closest(".plain");
  return [iframe.title, root.scrollWidth - root.clientWidth,
    named(all.filter(e => e.getBoundingClientRect().right > right + 1)),
    named(all.filter(e => e.scrollWidth > e.clientWidth + 1 && !isOutput(e)))];
})"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return folder


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profile")


def pages(site: Path) -> list[Path]:
    """All but the error's, and the frames in which a browser has looked at them (browser.py)."""
    found = sorted(site.rglob("*.html"))
    return [p for p in found if p.stem != "404" and not p.stem.startswith("harness")]


def test_pages_ask_for_nothing_from_a_network(site: Path) -> None:
    """Links that a reader follows may lead there; scripts, styles and pictures may not."""
    for page in pages(site):
        for tag in re.findall(r"<(?:script|link|img|iframe|source)\b[^>]*>", page.read_text()):
            found = re.search(r'(?:src|href)="([^"#]+)', tag)
            if found is None or 'rel="canonical"' in tag:
                continue
            assert not re.match(r"(?:\w+:)?//", found[1]), (page.name, tag)
            assert (page.parent / found[1].partition("?")[0]).exists(), (page.name, tag)
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(?:https?:)?//", style.read_text()), style.name


@pytest.mark.parametrize(
    ("words", "page"),
    [
        (
            "apply_activation_checkpointing",
            "api/checkpoint.html#memopt._checkpoint.apply.apply_activation_checkpointing",
        ),
        ("offload+disk", "offload.html"),
        ("gradient+accum", "anatomy.html#gradient-accumulation"),  # the beginning of a word
    ],
)
def test_the_search_finds_from_disk(site: Path, profile: Path, words: str, page: str) -> None:
    shown = dom_of(site / "search.html", profile, query=f"?q={words}")
    results = re.findall(r'<article><h3><a href="([^"]+)"', shown)
    assert results
    assert any(result.removeprefix("./").startswith(page) for result in results[:5]), results
    assert all((site / result.partition("#")[0]).exists() for result in results)


def test_the_search_says_where_nothing_is_found(site: Path, profile: Path) -> None:
    shown = dom_of(site / "search.html", profile, query="?q=zzzz")
    assert "No results found" in shown.rpartition('id="mkdocs-search-results"')[2][:200]
    assert "Searching..." not in shown


def test_code_is_coloured_when_pages_are_built(site: Path) -> None:
    text = (site / "plan.html").read_text()
    assert re.search(r'<span class="kn">import</span>', text)
    colours = (site / "css" / "code.css").read_text()
    assert ".codehilite .kn {" in colours
    assert "highlight.js" not in "".join(page.read_text() for page in pages(site))


def test_signatures_have_a_line_for_each_argument(site: Path) -> None:
    text = re.sub(r"<[^>]+>", "", (site / "api" / "plan.html").read_text())
    assert re.search(r"^plan\(\n    model: Module,\n    batch: Any,\n", text, re.MULTILINE)


def test_a_browser_colours_code(site: Path, profile: Path) -> None:
    expression = 'getComputedStyle(document.querySelector(".codehilite .kn")).color'
    assert said_by(site / "plan.html", profile, expression) == "rgb(0, 128, 0)"


@pytest.mark.parametrize("width", [1280, 420])
def test_tables_and_code_are_not_cut(site: Path, profile: Path, width: int) -> None:
    """Nothing leaves its column, and nothing scrolls in it but what programs print, on a telephone:
    cells of wide tables stand there behind their headings. All pages are in one window.
    """
    frames = "".join(
        f'<iframe src="{name}" title="{name}" width="{width}" height="900"></iframe>'
        for name in (page.relative_to(site).as_posix() for page in pages(site))
    )
    harness = site / "harness.html"
    harness.write_text(f"<!doctype html><body>{frames}</body>")
    found = said_by(harness, profile, CUT, 1400)
    harness.unlink()
    assert len(found) == len(pages(site))
    for name, beyond, cut, scrolling in found:
        assert (beyond, cut) == (0, []), name
        assert scrolling == [], name


def test_the_page_of_examples_has_all_of_them(site: Path) -> None:
    text = re.sub(r"<[^>]+>", "", (site / "examples.html").read_text())
    for example in (ROOT / "examples").glob("*.py"):
        assert f"python examples/{example.name}" in text or example.name in text
        assert example.read_text().splitlines()[0].strip('"') in html.unescape(text), example.name


def test_no_page_stands_under_another_s_heading(site: Path) -> None:
    """In the navigation each list of pages behind the first has a caption right before it."""
    text = (site / "index.html").read_text()
    navigation = text.partition('aria-label="Navigation menu"')[2].partition("</nav>")[0]
    parts = re.findall(r'<p class="caption">|<ul[ >](?=[^<]*<li class="toctree-l1)', navigation)
    first = parts.index('<p class="caption">')
    captions = [part.startswith("<p") for part in parts[first:]]
    assert captions == [True, False] * (len(captions) // 2)
    assert navigation.index("Reference") < navigation.index("Benchmarks")


def test_the_api_lists_every_name(site: Path) -> None:
    """Each with a link to its entry, on a page for each part."""
    text = (site / "api" / "index.html").read_text()
    links = dict(re.findall(r'<a [^>]*?href="([^"]+)"[^>]*><code>([^<]+)</code>', text))
    pages_of = {name: link.partition("#") for link, name in links.items()}
    wanted = {"memopt.convert", "memopt.types.Fitted", "memopt.convert.rule"}
    wanted |= {f"memopt.nn.{name}" for name in memopt.nn.__all__}
    functions = (n for n in memopt.functional.__all__ if callable(getattr(memopt.functional, n)))
    wanted |= {f"memopt.functional.{name}" for name in functions}
    assert wanted <= pages_of.keys()
    for name, (page, _, anchor) in pages_of.items():
        assert f'id="{anchor}"' in (site / "api" / page).read_text(), name
    assert {pages_of[name][0] for name in ("memopt.nn.GELU", "memopt.convert")} == {
        "nn.html",
        "convert.html",
    }


def test_pages_say_the_version(site: Path) -> None:
    for page in pages(site):
        assert re.search(rf'class="version">\s*{re.escape(memopt.__version__)}', page.read_text())


def test_the_repository_s_address_is_one_line_to_fill_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pyproject.toml: as it stands there, without its comment sign, it is TOML that installers
    read and that pages link to; and nothing else in the repository names the address.
    """
    project = (ROOT / "pyproject.toml").read_text()
    lines = re.findall(r"^(?:# )?urls = .*", project, re.MULTILINE)
    assert len(lines) == 1
    line = lines[0].removeprefix("# ")
    filled = project.replace(lines[0], line)
    config = load_config(str(ROOT / "mkdocs.yml"))
    hooks = config.hooks["docs_theme/hooks.py"]
    address = hooks.address_in(filled)
    assert address.startswith("https://")
    assert f'urls = {{ Repository = "{address}" }}' == line
    assert hooks.address_in(project) == ("" if lines[0].startswith("# ") else address)

    (tmp_path / "memopt").mkdir()
    (tmp_path / "memopt" / "_version.py").write_text('__version__ = "1.2.3"\n')
    (tmp_path / "pyproject.toml").write_text(filled)
    monkeypatch.setattr(hooks, "_ROOT", tmp_path)
    config = hooks.on_config(config)
    file = File("plan.md", config.docs_dir, config.site_dir, use_directory_urls=False)
    assert Page(None, file, config).edit_url == f"{address}/edit/main/docs/plan.md"

    tracked = ["git", "grep", "-l", "--fixed-strings", address.partition("//")[2]]
    found = subprocess.run(tracked, cwd=ROOT, capture_output=True, text=True).stdout.split()
    assert set(found) <= {"pyproject.toml"}
