"""Proves that steps of random depth are looked at where they are deepest, that what was there
before is not taken for kept, and that odd configurations and views in place break no report.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import memopt

DRAWS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.rand([]),
    "torch, one": lambda: torch.rand(1).item(),
    "python": lambda: random.random(),
    "uniform": lambda: random.uniform(0, 1),
    "whole": lambda: random.randint(0, 1),
    "chance": lambda: torch.bernoulli(torch.tensor(0.7)),
    "chance, one": lambda: torch.bernoulli(torch.tensor([0.3])).item(),
}


class Deep(nn.Module):
    """Leaves each of its layers out by a number that is drawn."""

    def __init__(self, draw: Callable[[], Any] | None, keeps_below: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(4)
        )
        self.draw, self.keeps_below = draw, keeps_below

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.draw is None or bool(self.draw() < 0.5) is self.keeps_below:
                x = x + layer(x)
        return x.square().mean()


@pytest.mark.parametrize("keeps_below", [False, True])
@pytest.mark.parametrize("draw", DRAWS)
def test_a_step_of_random_depth_is_looked_at_where_it_is_deepest(
    draw: str, keeps_below: bool
) -> None:
    x = torch.randn(6, 8)
    whole = memopt.anatomy(Deep(None), x).peak.total
    model = Deep(DRAWS[draw], keeps_below)
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    assert abs(memopt.anatomy(model, x).peak.total - whole) <= 64  # the numbers themselves
    assert random.getstate() == python_state
    assert torch.equal(torch.get_rng_state(), torch_state)
    plan = memopt.plan(model, x, "1MB", steps=1)
    assert len(plan.blocks) == 4
    plan.apply().undo()


@pytest.mark.parametrize("kind", ["attribute", "list", "dict"])
def test_what_a_module_held_before_is_not_kept_by_its_step(kind: str) -> None:
    class Rotated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, table = nn.Linear(8, 8), torch.randn(400, 8)
            self.tables: Any = {"attribute": table, "list": [table], "dict": {"a": [table]}}[kind]

        def forward(self, x: Tensor) -> Tensor:
            table = self.tables
            while not isinstance(table, Tensor):
                table = table["a"] if isinstance(table, dict) else table[0]
            return (self.linear(x) * table[: len(x)]).square().mean()

    model, x = Rotated(), torch.randn(6, 8)
    saved = memopt.saved_bytes(model, x)
    assert 400 * 8 * 4 not in [storage.nbytes for storage in saved.storages]
    report = memopt.anatomy(model, x, optimizer=None)
    assert report.moment_bytes("end of forward")["activations"] < 400 * 8 * 4
    assert report.moment_bytes("end of forward")["functionality-specific"] >= 400 * 8 * 4


class Raises:
    hidden_size = 8
    num_attention_heads = 2

    @property
    def num_hidden_layers(self) -> int:
        raise ValueError("for a test")


@pytest.mark.parametrize(
    "config",
    [
        SimpleNamespace(num_hidden_layers=2, hidden_size=[8, 16], num_attention_heads=[2, 4]),
        SimpleNamespace(num_layers=2, hidden_size=8, num_heads=2, num_key_value_heads=[1, 2]),
        SimpleNamespace(n_layer=2, n_embd=8, n_head=0, patch_size=(4, 4)),
        SimpleNamespace(num_layers="2", d_model=8.0, num_heads=None),
        Raises(),
    ],
)
def test_a_config_of_another_kind_breaks_no_report(config: Any) -> None:
    model = Deep(None)
    model.config = config
    report = memopt.anatomy(model, torch.randn(6, 8))
    assert report.formula is None
    assert "peak" in str(report)


@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN, nn.LSTM])
def test_rows_first_in_a_recurrent_layer(kind: Any) -> None:
    """It turns its result in place."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = kind(8, 16, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)[0].square().mean()

    report = memopt.anatomy(Recurrent(), torch.randn(6, 11, 8), measure=True)
    assert report.predicted is not None
    assert report.measured is not None
    assert report.predicted.peak.total == report.measured.peak.total


def test_while_pytorch_looks_for_nan_in_gradients() -> None:
    """There are no values to look at, and nothing is predicted otherwise."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.GELU()), torch.randn(2, 4)
    peaks = []
    for looks in (False, True):
        with torch.autograd.set_detect_anomaly(looks):
            peaks.append(memopt.anatomy(model, x, loss=torch.sum, measure=False).peak)
            assert torch.is_anomaly_check_nan_enabled()
    assert peaks[0] == peaks[1]


def test_a_measured_step_has_a_batch_of_its_own() -> None:
    """An input's gradient from a run before is no part of it: 128 KB of 461."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1))
    x = torch.randn(512, 64, requires_grad=True)
    found = memopt.anatomy(model, x, loss=torch.mean, measure=True)
    assert found.measured is not None
    assert found.predicted is not None
    assert found.measured.peak.total == found.predicted.peak.total
    assert x.grad is None


class Ragged(nn.Module):
    def __init__(self, makes: bool) -> None:
        super().__init__()
        self.a, self.makes = nn.Linear(16, 16), makes

    def forward(self, rows: Any) -> Tensor:
        nested = torch.nested.nested_tensor(list(rows)) if self.makes else rows
        return torch.nested.to_padded_tensor(nn.functional.gelu(self.a(nested)), 0.0).sum()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("makes", [False, True])
def test_nested_tensors_without_sizes_are_measured(makes: bool) -> None:
    """PyTorch's first kind of nested tensors (layout=torch.strided) refuses to tell a shape."""
    rows = [torch.randn(300, 16), torch.randn(500, 16)]
    model, batch = Ragged(makes), (rows,) if makes else torch.nested.nested_tensor(rows)
    found = memopt.anatomy(model, batch)
    assert found.predicted is None
    assert found.measured is not None
    assert found.measured.peak.total > 3 * 4 * 800 * 16  # input, the layer's output, GELU's
    assert "nested" in found.notes[0]
    assert memopt.plan(model, batch, "1MiB", blocks=["a"]).blocks[0].path == "a"
    assert memopt.saved_bytes(model, *((rows,) if makes else (batch,))) > 0
    with pytest.raises(memopt.DependsOnValues) as error:
        memopt.anatomy(model, batch, measure=False)
    assert "nested" in str(error.value)
    if makes:
        memopt.convert(model, batch, checkpoint=True)


class Wrapping(nn.Module):
    """Computes on tensors that hold others, which it makes: variable lengths, or two in one."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.b, self.kind = nn.Linear(16, 16), nn.Linear(16, 16), kind

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if self.kind == "two":
            return self.b((TwoTensor(h, h * 2) * 2).a).sum()
        offsets = torch.tensor([0, 3, len(x)])
        nested = torch.nested.nested_tensor_from_jagged(h, offsets)
        if self.kind == "values":
            return self.b(nested.values()).sum()
        return self.b(torch.nested.to_padded_tensor(nested, 0.0)).sum()


@pytest.mark.parametrize("kind", ["two", "values", "padded"])
def test_steps_that_make_tensors_of_tensors_are_measured(kind: str) -> None:
    """PyTorch asked for the sizes of such a tensor where an exception ended the process; of others
    a prediction made ordinary tensors.
    """
    model, x = Wrapping(kind), torch.randn(8, 16)
    found = memopt.anatomy(model, x)
    assert found.predicted is None
    assert found.measured is not None
    assert "holds other tensors" in found.notes[0]
    assert memopt.plan(model, x, "1MiB", blocks=["a"]).blocks[0].path == "a"
    assert memopt.check(model, x).peak > 0
    memopt.convert(model, x, checkpoint=True)
    for ask in (memopt.fits, memopt.largest_batch):
        with pytest.raises(memopt.DependsOnValues, match=f"{ask.__name__}: .* holds other tensors"):
            ask(model, x, "1GiB")


class Metric(nn.Module):
    """Hashes and compares by what it has seen, as metrics of torchmetrics do."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return x

    def __hash__(self) -> int:
        return hash((id(self), self.seen))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Metric) and self.seen == other.seen


class Gelu(nn.GELU):
    """Hashes by a number that somebody else changes."""

    number = 0

    def __hash__(self) -> int:
        return hash((id(self), Gelu.number))


def _with_metrics() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(8, 8), Metric(), Gelu(), nn.Linear(8, 8)) for _ in range(3))
    )


@pytest.mark.parametrize(
    "look",
    [
        lambda model, x: memopt.saved_bytes(model, x),
        lambda model, x: memopt.anatomy(model, x, loss=torch.sum, measure=False),
        lambda model, x: memopt.anatomy(model, x, loss=torch.sum, measure=True),
        lambda model, x: memopt.plan(model, x, "1MiB", loss=torch.sum),
        lambda model, x: memopt.check(model, x, loss=torch.sum),
        lambda model, x: memopt.fits(model, x, "1GiB", loss=torch.sum),
        lambda model, x: memopt.convert(model, x, checkpoint=True),
        lambda model, x: memopt.apply_activation_checkpointing(model, batch=x),
        lambda model, x: memopt.accumulate(model, x, micro_batch=2, loss=torch.sum),
    ],
)
def test_modules_whose_hash_changes_in_forward(look: Callable[[nn.Module, Tensor], Any]) -> None:
    look(_with_metrics(), torch.randn(4, 8))


def test_revert_of_a_module_whose_hash_has_changed() -> None:
    model = _with_metrics()
    before = list(map(id, model.modules()))
    memopt.convert(model)
    Gelu.number += 1
    memopt.revert(model)
    assert list(map(id, model.modules())) == before


class Irreps(tuple[str, ...]):
    """e3nn's say how many representations they hold, and not how many entries."""

    __slots__ = ()

    def __len__(self) -> int:
        raise NotImplementedError


class Equivariant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.irreps = Irreps(("0e", "1o"))
        self.a, self.b = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor, irreps: Irreps | None = None) -> Tensor:
        return x + self.b(self.a(x).tanh())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Equivariant() for _ in range(3))

    def forward(self, x: Tensor, irreps: Irreps) -> Tensor:
        for block in self.blocks:
            x = block(x, irreps)
        return x.square().mean()


def test_a_tuple_of_a_class_that_refuses_to_say_its_length() -> None:
    """As an attribute and in the batch; plans, checks, samples and regions raised its error."""
    model, batch = Net(), {"x": torch.randn(4, 8), "irreps": Irreps(("0e",))}
    assert memopt.anatomy(model, batch, measure=True).measured is not None
    memopt.plan(model, batch, 1 << 20, optimizer=None, steps=1).apply().undo()
    assert memopt.apply_activation_checkpointing(model, batch=batch)
    assert memopt.check(model, batch).ok
    memopt.unwrap(model)
    assert memopt.convert(model, batch, checkpoint=True).checkpointed
    model(**batch).backward()
