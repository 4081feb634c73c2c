"""The pair of processes, one for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.processes import Pair


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = Pair(tmp_path_factory.mktemp("pair"))
    yield pair
    pair.close()
