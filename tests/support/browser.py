"""A headless browser, where there is one: what a page is after its scripts ran, and what they say
of its boxes.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def _command(profile: Path, width: int) -> list[str]:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"no browser here: none of {', '.join(BROWSERS)}")
    command = [found, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command.append("--allow-file-access-from-files")  # a page may look into frames of its folder
    return [*command, f"--user-data-dir={profile}", f"--window-size={width},900"]


def dom_of(page: Path, profile: Path, width: int = 1100, query: str = "") -> str:
    """The page opened from disk, as HTML, when its scripts have run.

    Args:
        profile: a folder for the browser's own files.
        query: behind the address: "?q=words".
    """
    command = [*_command(profile, width), "--virtual-time-budget=10000", "--dump-dom"]
    command.append(page.as_uri() + query)
    run = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    return run.stdout


def picture_of(page: Path, profile: Path) -> Path:
    """The page drawn, as a PNG beside it."""
    picture = page.with_suffix(".png")
    command = [*_command(profile, 1100), f"--screenshot={picture}", page.as_uri()]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return picture


def said_by(page: Path, profile: Path, expression: str, width: int = 1100) -> Any:
    """The value of an expression of JavaScript in the page, as JSON has it. A copy of the page is
    opened, beside it.
    """
    text = page.read_text().replace(
        "</body>",
        f"<script>window.addEventListener('load', () => {{ const said = {expression};"
        "document.documentElement.dataset.said = JSON.stringify(said); });</script></body>",
    )
    copy = page.with_name(f"{page.stem}-asked.html")
    copy.write_text(text)
    shown = dom_of(copy, profile, width)
    copy.unlink()
    found = re.search(r'data-said="(.*?)"', shown)
    assert found is not None, "the page's scripts did not run to their end"
    return json.loads(html.unescape(found[1]))
