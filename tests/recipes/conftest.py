"""What the tests of host copies share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.checkpoint.support import Watch, taken_for_an_accelerator


@pytest.fixture
def watch() -> Iterator[Watch]:
    with taken_for_an_accelerator("cpu"):
        yield Watch()
