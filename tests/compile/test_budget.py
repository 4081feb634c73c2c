"""Proves: the peak of a compiled step is within the budget and is what was counted in its code; a
budget that is too small names the least that will do, and that will.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters
from torch._inductor import metrics

import memopt
from memopt._compile import _inductor, _inductor_code
from memopt._compile._inductor_code import CountedPeak
from tests.compile.support import blocks, no_kernels, sample, step_bytes

pytestmark = pytest.mark.slow  # Inductor generates code


class Gated(nn.Module):
    """RMSNorm and SwiGLU in a residual branch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate, self.up = nn.Linear(width, 3 * width), nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Dropped(nn.Module):
    """LayerNorm and a GELU between linears, with dropout, in a residual branch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(self.dropout(F.gelu(self.up(self.norm(x))))))


class Pixels(nn.Module):
    """A residual branch of convolutions, on channels of an image."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, channels)
        self.conv1 = nn.Conv2d(channels, 2 * channels, 3, padding=1)
        self.conv2 = nn.Conv2d(2 * channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(F.relu(self.conv1(self.norm(x))))


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "dropout": lambda: (nn.Sequential(Dropped(64), Dropped(64)), sample(4, 64)),
    "gated": lambda: (nn.Sequential(Gated(64), Gated(64)), sample(4, 64)),
    "pixels": lambda: (nn.Sequential(Pixels(8), Pixels(8)), torch.randn(2, 8, 24, 24)),
}


class Step:
    """A compiled step within a budget: its peak, and what was logged when it was compiled."""

    def __init__(
        self, name: str, budget: int | float | None, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.clear()
        model, x = MODELS[name]()
        with no_kernels(), caplog.at_level(logging.INFO, "memopt.compile"):
            compiled = memopt.compile(lambda x: model(x).square().mean(), budget=budget)
            self.most = step_bytes(lambda: compiled(x), model).most
        (record,) = (r for r in caplog.records if r.name == "memopt.compile")
        assert isinstance(record.args, tuple)
        self.kept, self.counted = (int(str(n)) for n in record.args[1:3])
        self.run_again, self.whose = int(str(record.args[4])), str(record.args[5])
        assert self.most <= self.counted <= 1.02 * self.most


@pytest.fixture
def each_way_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same halves have the same peak, whatever the budget for which they are looked at."""
    count, seen = _inductor_code.peak_of_code, {}

    def once(forward: fx.GraphModule, backward: fx.GraphModule, *about: Any) -> CountedPeak:
        halves = forward.code, backward.code
        if halves not in seen:
            seen[halves] = count(forward, backward, *about)
        return seen[halves]

    monkeypatch.setattr(_inductor_code, "peak_of_code", once)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.usefixtures("each_way_counted_once")
def test_the_peak_is_within_the_budget(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Without a budget, with one that is too small, with the least, and with one that is missed by
    one byte without it. With the least products are run again.
    """
    free = Step(name, None, caplog)
    assert free.run_again == 0
    with pytest.raises(Exception, match="compile: budget must be at least") as error:
        Step(name, free.counted // 4, caplog)
    (floor,) = re.findall(r"at least ([\d,]+) bytes", str(error.value))
    least = int(floor.replace(",", ""))
    assert least < free.counted
    for budget in (least, free.counted - 1):
        step = Step(name, budget, caplog)
        assert step.counted <= budget
        assert budget != least or step.run_again > 0


def test_a_share_is_of_the_peak_of_torch_compile(caplog: pytest.LogCaptureFixture) -> None:
    model, x = MODELS["gated"]()
    with no_kernels():
        plain = torch.compile(lambda x: model(x).square().mean())
        most = step_bytes(lambda: plain(x), model).most
    for share in (1.0, 0.9):
        assert Step("gated", share, caplog).most <= share * most


def test_inductor_s_statistics_are_those_of_what_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And not of code that was generated for its bytes alone."""
    found = []
    for count in (_inductor._Ways.count, lambda _, way: way):
        monkeypatch.setattr(_inductor._Ways, "count", count)
        model, x = MODELS["gated"]()
        counters.clear()
        before = metrics.generated_kernel_count
        with no_kernels():
            compiled = memopt.compile(lambda x, m=model: m(x).square().mean(), budget=10**9)
            compiled(x).backward()
        found.append((metrics.generated_kernel_count - before, counters["inductor"]))
    assert found[0] == found[1]
    assert found[0][0] > 0


def test_an_output_counts_until_backward_begins(caplog: pytest.LogCaptureFixture) -> None:
    """The loss is not in the graph: when backward begins, the output is gone and its gradient is
    there. One of the two at the peak, that is 5 % of it.
    """
    model, x, factor = nn.Sequential(blocks(1), nn.Linear(64, 64)), sample(4, 64), sample(4, 64)
    with no_kernels(), caplog.at_level(logging.INFO, "memopt.compile"):
        compiled = memopt.compile(model)
        most = step_bytes(lambda: (compiled(x) * factor).sum(), model).most
    (record,) = (r for r in caplog.records if r.name == "memopt.compile")
    assert isinstance(record.args, tuple)
    outside = 2 * 4  # the loss and its gradient
    assert most - outside <= int(str(record.args[2])) <= 1.02 * most
