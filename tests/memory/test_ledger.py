"""Proves that the ledger counts what the CPU's allocator counts, in the right categories, and that
it names the moment of the peak and the line that made it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt.memory.allocator import LiveBytes
from memopt.memory.ledger import Ledger
from memopt.memory.pieces import CATEGORIES
from memopt.memory.step import Step, traced
from tests.anatomy.models import Mlp, tiny

BATCH = torch.randn(64, 32)


class Marks:
    """In place of a ledger: notes the moments for the allocator's events."""

    phase = ""

    def __init__(self, live: LiveBytes) -> None:
        self._live = live

    def end_of_forward(self, loss: Tensor) -> None:
        self._live.mark()

    def assign(self, category: str, named: object) -> None:
        pass

    def alike(self, key: object, run: Callable[[], object]) -> None:
        run()


def counted(ledger: Ledger) -> tuple[int, int, int]:
    """The most, that at the end of forward, and that at the end, beyond what was there before."""
    total, totals = 0, []
    for entry in ledger.log:
        if entry.instant:
            total += entry.sign * entry.piece.nbytes
        totals.append(total)
    return max(totals), totals[ledger.marks[-1].place - 1], totals[-1]


@pytest.mark.parametrize(
    "name",
    ["mlp", *(pytest.param(n, marks=pytest.mark.slow) for n in ("gpt2", "bert", "llama", "vit"))],
)
def test_it_agrees_with_the_allocator(name: str) -> None:
    """Up to the constants of a model's formulas, which no operator makes: less than 100 bytes."""
    model, batch = (Mlp(dropout=0.1), torch.randn(7, 32)) if name == "mlp" else tiny(name)
    step = Step(model, batch, torch.optim.AdamW(model.parameters()), who="a test")
    for _ in range(2):
        step.run()
    with LiveBytes() as live:
        step.run(Marks(live))  # type: ignore[arg-type]
    ledger = Ledger(model)
    traced(step, ledger)
    for said, found in zip(
        counted(ledger), (live.most, live.marks[0].nbytes, live.left), strict=True
    ):
        assert abs(said - found) < 100


def test_categories_sum_to_what_is_alive_at_every_instant() -> None:
    report = memopt.anatomy(Mlp(blocks=3, dropout=0.1), torch.randn(7, 32), measure=True)
    trace = report.trace
    assert trace.peak.total == sum(trace.peak.by_category.values())
    assert trace.peak.total == max(sum(point[1:]) for point in trace.timeline)
    assert trace.peak.total == sum(share.nbytes for share in trace.by_module)
    assert trace.peak.total == sum(share.nbytes for share in trace.by_op)
    assert all(nbytes >= 0 for point in trace.timeline for nbytes in point)
    assert tuple(trace.peak.by_category) == CATEGORIES


def test_the_end_of_forward_holds_what_saved_bytes_says() -> None:
    model, batch = Mlp(), torch.randn(7, 32)
    report = memopt.anatomy(model, batch, optimizer=None, measure=True)
    saved = memopt.saved_bytes(model, batch)
    of_inputs = sum(s.nbytes for s in saved.storages if s.is_input)
    assert report.moment_bytes("end of forward")["activations"] == saved - of_inputs


def test_the_peak_is_named() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Module()
            self.inner.small = nn.Linear(8, 8)
            self.wide = nn.Linear(8, 4096)

        def forward(self, x: Tensor) -> Tensor:
            return self.wide(self.inner.small(x)).tanh().sum()  # the line that is named

    report = memopt.anatomy(Wide(), torch.randn(512, 8), measure=True, optimizer=None)
    largest = report.trace.largest[0]
    assert largest.shape == (512, 4096)
    assert largest.line.startswith("test_ledger.py:")
    with open(__file__) as file:
        line = file.read().splitlines()[int(largest.line.partition(":")[2]) - 1]
    assert "the line that is named" in line
    assert report.peak.phase == "backward"
    of_weight = [large for large in report.trace.largest if large.category == "weights"]
    assert of_weight[0].module == "wide"


def test_backward_is_attributed_to_the_module_of_the_forward() -> None:
    report = memopt.anatomy(Mlp(blocks=3), torch.randn(64, 32), optimizer=None)
    backward = {row.module for row in report.trace.work if row.phase == "backward"}
    assert {"blocks.0.up", "blocks.1.down", "blocks.2.norm"} <= backward


def test_the_first_operator_of_backward_has_the_line_of_the_loss() -> None:
    """Before it PyTorch makes a gradient of ones, by an operator that is nobody's forward."""

    def loss(output: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(output, output.argmax(1).detach())

    line = loss.__code__.co_firstlineno + 1
    lives = memopt.anatomy(nn.Linear(64, 512), torch.randn(64, 64), loss=loss).trace.lives
    found = [life for life in lives if life.name == "aten.nll_loss_backward.default"]
    assert [life.line for life in found] == [f"test_ledger.py:{line}"]


def test_moments_come_in_order() -> None:
    report = memopt.anatomy(Mlp(blocks=2), torch.randn(7, 32))
    names = [moment.name for moment in report.trace.moments]
    assert names == ["end of forward", "first gradient", "most in backward", "most in optimizer"]
    assert report.moment_bytes("end of forward")["gradients"] == 0
    assert report.moment_bytes("first gradient")["gradients"] > 0
    assert [p.name for p in report.trace.phases] == ["before", "forward", "backward", "optimizer"]


def test_fates() -> None:
    def fates(**options: Any) -> dict[str, int]:
        report = memopt.anatomy(Mlp(), BATCH, optimizer=None, measure=True, **options)
        return report.trace.fates

    plain = fates()
    assert set(plain) == {"kept"}
    regions = fates(checkpoint="all")
    one = 4 * 64 * 32
    assert regions["region input"] == 8 * one
    assert regions["kept"] == one
    assert sum(regions.values()) == plain["kept"]
    assert fates(recipes=True)["recipe"] == 9 * (one + 4 * one)  # of each norm and activation


def test_autocast_copies_of_weights_are_no_activations() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    report = memopt.anatomy(
        model, torch.randn(4, 16), loss=torch.sum, autocast=torch.bfloat16, measure=True
    )
    second = 2 * 16 * 16  # backward reads it; the first one's input needs no gradient
    inputs = 4 * 4 * 16
    assert report.moment_bytes("end of forward")["functionality-specific"] == inputs + second


def test_operations_of_a_linear() -> None:
    model = nn.Linear(32, 64)
    report = memopt.anatomy(model, torch.randn(8, 32), loss=torch.sum, optimizer=None)
    forward = [row for row in report.trace.work if row.phase == "forward" and row.flops]
    assert [(row.kind, row.flops) for row in forward] == [("contraction", 2 * 8 * 32 * 64)]
    assert report.trace.flops("backward") == 2 * 8 * 32 * 64  # the input needs no gradient
    moved = 4 * (8 * 32 + 32 * 64 + 64 + 8 * 64)
    assert forward[0].nbytes == moved
    assert forward[0].intensity == pytest.approx(2 * 8 * 32 * 64 / moved)


@pytest.mark.slow
def test_six_n_d() -> None:
    """Attention's products come on top, which 6ND leaves out."""
    report = memopt.anatomy(*tiny("llama"))
    assert report.flops_6nd is not None
    assert 1 < report.trace.flops("forward", "backward") / report.flops_6nd < 1.3
