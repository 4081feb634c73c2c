"""Which tests belong into tests/slow.txt: `python -m pytest -p tests.support.processor_time -n 0`.

A test's processor time is that of this process and of the children that it waited for, with the
fixtures that are made for it: on a busy machine it is steadier than the time by the clock.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.clocks import processor_seconds

LIMIT = 0.4
"""Seconds, on a machine that runs other things as well; idle, a third of a second."""

seconds: dict[str, float] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    began = processor_seconds()
    result = yield
    name = f"{item.path.name}::{item.nodeid.partition('[')[0].rpartition('::')[2]}"
    seconds[name] = max(seconds.get(name, 0.0), processor_seconds() - began)
    return result


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section(f"more than {LIMIT} s of processor time")
    for name, longest in sorted(seconds.items()):
        if longest >= LIMIT:
            terminalreporter.write_line(f"{name}  {longest:.1f}")
