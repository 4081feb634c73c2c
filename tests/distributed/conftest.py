"""The pair of processes, the three and the four, one of each for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.processes import Pair, World


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = Pair(tmp_path_factory.mktemp("pair"))
    yield pair
    pair.close()


@pytest.fixture(scope="session")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    three = World(tmp_path_factory.mktemp("three"), size=3)
    yield three
    three.close()


@pytest.fixture(scope="session")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    four = World(tmp_path_factory.mktemp("four"), size=4)
    yield four
    four.close()
