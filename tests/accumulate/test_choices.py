"""Proves that a micro-batch is chosen for the step that runs: for its loss, its optimizer and its
model as they are, beside the whole batch; and that rows are cut rightly, or refused by name.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import memopt
from memopt._accumulate import loop
from memopt.memory.storages import storages
from tests.support.allocator import allocated_by

LENGTHS = (2, 5, 3, 4)


@pytest.fixture
def choices(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An entry for each time that rows are chosen anew."""
    found: list[int] = []
    monkeypatch.setattr(loop, "largest_micro_batch", lambda *_: found.append(2) or 2)
    return found


def test_a_choice_is_for_its_kind_of_step(choices: list[int]) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 4)), torch.randn(6, 8)
    options: dict[str, Any] = {"budget": 1 << 20, "loss": lambda y: y.square().mean()}

    def runs_anew(**changed: Any) -> bool:
        before = len(choices)
        model.zero_grad()
        memopt.accumulate(model, x, **{**options, **changed})
        return len(choices) > before

    assert runs_anew()
    assert not runs_anew()
    for _ in range(2):  # a lambda that is written in a loop is the same loss
        anew = runs_anew(loss=lambda y: y.abs().mean())
    assert not anew
    assert runs_anew(optimizer=torch.optim.AdamW(model.parameters()))
    assert runs_anew(optimizer=torch.optim.SGD(model.parameters(), momentum=0.9))
    model[0].requires_grad_(False)
    assert runs_anew()
    model[1].p = 0.5
    assert runs_anew()
    model.eval()
    assert runs_anew()
    model.append(nn.Linear(4, 4))
    assert runs_anew()
    assert not runs_anew()


def test_a_counter_makes_no_other_kind(choices: list[int]) -> None:
    class Counting(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x).mean()

    model = Counting(8, 4)
    for _ in range(4):
        memopt.accumulate(model, torch.randn(6, 8), budget=1 << 20)
        model.zero_grad()
    assert len(choices) <= 2  # the first call has made the attribute


@pytest.mark.parametrize("share", [0.95, 0.75, 0.6])
def test_a_budget_below_the_whole_step(share: float) -> None:
    """Its micro-batches are half of the rows, and no larger ones that are two as well."""
    model, x = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)), torch.randn(500, 16)
    options: dict[str, Any] = {"loss": lambda y: y.square().mean()}
    budget = int(share * memopt.anatomy(model, x, optimizer=None, **options).peak.total)

    def step() -> None:
        memopt.accumulate(model, x, budget=budget, **options)
        model.zero_grad()

    before = sum(storages([*model.parameters(), x]).values())
    assert before + allocated_by(step) <= budget


@pytest.mark.parametrize("rows", [900, 6000])
def test_the_whole_batch_is_in_the_budget(rows: int) -> None:
    """Below a megabyte, and above it."""
    model = nn.Sequential(nn.Linear(256, 64), nn.GELU(), nn.Linear(64, 8))
    batch = torch.randn(rows, 256)
    held = sum(storages([*model.parameters(), batch]).values())
    budget = held + 2 * 4 * 20_000 + batch.nbytes // 4

    def step() -> None:
        memopt.accumulate(model, batch, budget=budget, loss=lambda y: y.square().mean())
        model.zero_grad()

    assert held + allocated_by(step) <= budget
    assert (
        memopt.accumulate(
            model, batch, budget=budget, loss=lambda y: y.square().mean()
        ).micro_batches
        > 1
    )


class Last(nn.Module):
    """Of sequences, from the last state of each."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(8, 16, batch_first=True).double()

    def forward(self, x: PackedSequence) -> Tensor:
        return self.gru(x)[1].square().mean()


@pytest.mark.parametrize("is_sorted", [False, True])
@pytest.mark.parametrize("micro_batch", [1, 3])
def test_packed_sequences_are_cut_by_row(micro_batch: int, is_sorted: bool) -> None:
    lengths = sorted(LENGTHS, reverse=True) if is_sorted else LENGTHS
    batch = pack_sequence(
        [torch.randn(n, 8, dtype=torch.float64) for n in lengths], enforce_sorted=is_sorted
    )
    model = Last()
    reference = copy.deepcopy(model)
    reference(batch).backward()
    result = memopt.accumulate(model, {"x": batch}, micro_batch=micro_batch)
    assert result.micro_batches == -(-4 // micro_batch)
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad, rtol=1e-12)


def test_nested_tensors_are_cut_by_row() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 4).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).values().square().sum()

    rows = [torch.randn(n, 8, dtype=torch.float64) for n in LENGTHS]
    batch = torch.nested.nested_tensor(rows, layout=torch.jagged)
    model = Words()
    reference = copy.deepcopy(model)
    reference(batch).backward()
    assert memopt.accumulate(model, batch, micro_batch=3, weight="sum").micro_batches == 2
    assert torch.allclose(model.linear.weight.grad, reference.linear.weight.grad, rtol=1e-12)
    with pytest.raises(ValueError, match=r"batch must be a function .*NestedTensor"):
        memopt.largest_batch(model, batch, 1 << 20)


def test_labels_of_one_dimension() -> None:
    class Classes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 4).double()

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return nn.functional.cross_entropy(self.linear(x), labels)

    labels = torch.tensor([0, 1, -100, 2, 3, -100])
    batch = {"x": torch.randn(6, 8, dtype=torch.float64), "labels": labels}
    model = Classes()
    reference = copy.deepcopy(model)
    reference(**batch).backward()
    memopt.accumulate(model, batch, micro_batch=4, weight="tokens")
    assert torch.allclose(model.linear.weight.grad, reference.linear.weight.grad, rtol=1e-12)
    with pytest.raises(ValueError, match='"next tokens" must have labels of rows and tokens'):
        memopt.accumulate(model, batch, micro_batch=4, weight="next tokens")


def test_a_step_that_looks_at_values_is_measured() -> None:
    """Gradients of an embedding that are sparse have no size before they are there."""

    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(50, 8, sparse=True), nn.Linear(8, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.words(x)).square().mean()

    model, x = Sparse(), torch.randint(0, 50, (40, 5))
    assert memopt.anatomy(model, x, optimizer=None).measured is not None
    held = sum(storages([*model.parameters(), x]).values())
    result = memopt.accumulate(model, x, budget=held + 60_000)
    assert 1 < result.micro_batches < 40


@pytest.mark.parametrize("kind", [torch.optim.LBFGS])
def test_an_optimizer_that_runs_the_step_itself_is_refused(kind: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    x = torch.randn(6, 8)
    for call in (memopt.anatomy, memopt.plan, memopt.largest_batch):
        arguments = (model, x) if call is memopt.anatomy else (model, x, 1 << 20)
        with pytest.raises(
            ValueError, match=f"{call.__name__}: optimizer must step without a closure"
        ):
            call(*arguments, optimizer=kind, loss=torch.mean)  # type: ignore[operator]
    with pytest.raises(ValueError, match="accumulate: optimizer must step without a closure"):
        memopt.accumulate(
            model, x, budget=1 << 20, loss=torch.mean, optimizer=kind(model.parameters())
        )
    assert all(p.grad is None for p in model.parameters())


class Scaled:
    """A function that is compared by value, and so has no hash."""

    def __init__(self, by: float) -> None:
        self.by = by

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Scaled) and other.by == self.by

    __hash__ = None  # type: ignore[assignment]

    def __call__(self, y: Tensor) -> Tensor:
        return self.by * y.square().mean()


def test_functions_without_a_hash(choices: list[int]) -> None:
    """Of the user's, and a region's own, which a plan puts on modules."""
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), torch.randn(6, 8)
    memopt.checkpoint_wrapper(model[0])
    for loss, anew in ((once := Scaled(2.0), 1), (once, 1), (Scaled(2.0), 2)):
        memopt.accumulate(model, x, budget=1 << 20, loss=loss)
        model.zero_grad()
        assert len(choices) == anew
    memopt.unwrap(model)
    memopt.accumulate(model, x, budget=1 << 20, loss=once)
    assert len(choices) == 3
