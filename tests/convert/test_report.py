"""Proves: the report names every module with its path and what became of it, counts bytes exactly
and without a trace in the model, and reads as a table, as rich's in a terminal, and as JSON.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt._call_hooks import others_hooks
from memopt._convert import Report, supported
from tests.convert import modules
from tests.convert.support import memopt_ops


def example() -> nn.Sequential:
    return nn.Sequential(
        nn.LayerNorm(8), nn.Tanh(), nn.Sequential(nn.LayerNorm(8), nn.Dropout(0.5))
    )


def test_paths_classes_and_order() -> None:
    report = memopt.convert(example(), checkpoint=nn.Sequential)
    assert report.model == "Sequential"
    assert report.swapped == (
        ("0", "LayerNorm", "memopt.nn.LayerNorm"),
        ("2.0", "LayerNorm", "memopt.nn.LayerNorm"),
        ("2.1", "Dropout", "memopt.nn.Dropout"),
    )
    assert report.left == (("1", "Tanh", "memopt has no op for it"),)
    assert report.checkpointed == ("2",)
    assert (report.bytes_before, report.bytes_after) == (None, None)


def test_a_model_that_is_one_module() -> None:
    report = memopt.convert(nn.LayerNorm(8))
    assert [e.path for e in report.swapped] == [""]
    assert "(the model)" in str(report)


def test_a_module_in_two_places_is_swapped_once() -> None:
    norm = nn.LayerNorm(8)
    assert [e.path for e in memopt.convert(nn.Sequential(norm, norm)).swapped] == ["0"]


CHANNEL_NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch_norm": lambda: nn.BatchNorm2d(4),
    "group_norm": lambda: nn.GroupNorm(2, 4),
    "instance_norm": lambda: nn.InstanceNorm2d(4),
}


@pytest.mark.parametrize("function", CHANNEL_NORMS)
def test_norms_over_channels_stay_and_their_function_is_memopts(function: str) -> None:
    """The report says so of the module exactly where a call runs memopt's op."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), CHANNEL_NORMS[function](), nn.Conv2d(4, 4, 3))
    before = type(model[1])
    report = memopt.convert(model)
    assert type(model[1]) is before
    assert report.by_function == (("1", before.__name__, f"memopt.functional.{function}"),)
    assert (report.swapped, report.left) == ((), ())
    assert f"its function is memopt.functional.{function}" in str(report)
    assert memopt_ops(lambda: model(torch.randn(2, 3, 8, 8)))


@pytest.mark.parametrize("settings", [{"recipes": False}, {"functional": False}])
@pytest.mark.parametrize("function", CHANNEL_NORMS)
def test_without_functions_norms_over_channels_are_left(function: str, settings: Any) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), CHANNEL_NORMS[function](), nn.Conv2d(4, 4, 3))
    report = memopt.convert(model, **settings)
    assert report.by_function == ()
    reason = f"its function, {function}, is memopt's with recipes and functional=True"
    assert [entry.reason for entry in report.left] == [reason]
    assert not memopt_ops(lambda: model(torch.randn(2, 3, 8, 8)))


def test_dictionary_is_json() -> None:
    report = memopt.convert(example(), torch.randn(2, 8))
    data = json.loads(json.dumps(report.to_dict()))
    assert data["swapped"][0] == {
        "path": "0",
        "from_class": "LayerNorm",
        "to": "memopt.nn.LayerNorm",
    }
    assert data["left"][0]["reason"] == "memopt has no op for it"
    assert data["recipes"] is True
    assert list(data) == [
        "model",
        "swapped",
        "left",
        "recipes",
        "checkpointed",
        "offloaded",
        "in_chunks",
        "bytes_before",
        "bytes_after",
        "notes",
        "by_function",
        "remaining",
        "idle",
        "heads",
    ]


def test_text_has_like_entries_in_one_row() -> None:
    text = str(memopt.convert(example()))
    first, *rows = text.splitlines()
    assert first == "convert(Sequential): 3 swapped, 1 left"
    assert rows[0].split() == ["2", "x", "LayerNorm", "memopt.nn.LayerNorm", "0,", "2.0"]
    assert "under torch.compile they step aside" in text


def test_nothing_to_report() -> None:
    report = memopt.convert(nn.Linear(2, 2), recipes=False)
    assert str(report) == "convert(Linear): 0 swapped, 0 left"
    assert report.to_dict()["swapped"] == []


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_rich_s_table(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    report = memopt.convert(example(), torch.randn(2, 8))
    monkeypatch.setattr(sys, "stdout", Terminal())
    text = str(report)
    assert "┃" in text
    assert "kept for backward" in text
    monkeypatch.setitem(sys.modules, "rich.console", None)  # as where rich is not installed
    assert "┃" not in str(report)


# Bytes that a LayerNorm saves of a (2, 8) float32 input: itself, and a mean and a reciprocal
# deviation a row. Weight and bias are parameters.
NORM = 2 * 8 * 4 + 2 * 2 * 4


def test_bytes_are_counted_exactly() -> None:
    x = torch.randn(2, 8)
    report = memopt.convert(nn.LayerNorm(8), x)
    assert (report.bytes_before, report.bytes_after) == (NORM, NORM)
    report = memopt.convert(nn.Sequential(nn.Linear(8, 8), nn.GELU()), x)
    assert report.bytes_before == report.bytes_after == 2 * 2 * 8 * 4  # each op's input


def test_a_mask_is_not_stored() -> None:
    """PyTorch's dropout on the CPU saves n floats for n, memopt's 16 bytes."""
    model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5))
    report = memopt.convert(model, torch.randn(2, 8))
    assert report.bytes_before is not None
    assert report.bytes_after is not None
    assert report.bytes_before - report.bytes_after == 2 * 64 * 4 - 16


@pytest.mark.parametrize(
    "sample",
    [
        (torch.randn(2, 8), torch.randn(2, 8)),
        [torch.randn(2, 8), torch.randn(2, 8)],
        {"a": torch.randn(2, 8), "b": torch.randn(2, 8)},
    ],
    ids=["tuple", "list", "mapping"],
)
def test_ways_to_give_a_sample(sample) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(8)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.norm(a) + self.norm(b)

    assert memopt.convert(Two(), sample).bytes_before == 2 * NORM


def test_measuring_leaves_no_trace() -> None:
    model = nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.5), modules.FeedForward())
    model[0].weight.grad = torch.ones(8)
    buffers = [b.clone() for b in model.buffers()]
    objects = list(model.buffers())
    generator = torch.get_rng_state()
    with torch.no_grad():
        report = memopt.convert(model, torch.randn(4, 8))
    assert report.bytes_before
    generator_now = torch.get_rng_state()
    assert not torch.equal(generator_now, generator)  # randn above, and nothing else
    torch.set_rng_state(generator)
    torch.randn(4, 8)
    assert torch.equal(torch.get_rng_state(), generator_now)
    assert all(a is b for a, b in zip(model.buffers(), objects, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), buffers, strict=True))
    assert torch.equal(model[0].weight.grad, torch.ones(8))
    assert model[2].w1.weight.grad is None


def test_the_model_s_own_mode_is_measured() -> None:
    model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5)).eval()
    report = memopt.convert(model, torch.randn(2, 8))
    assert report.bytes_before == report.bytes_after == 2 * 8 * 4
    assert not model.training


def test_a_device_without_kernels_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As CUDA is where memopt was built without it: the model runs there as before."""
    monkeypatch.setattr(supported, "_DEVICES", frozenset(("cuda",)))
    model = example()
    report = memopt.convert(model)
    assert report.notes[-1] == (
        "this build of memopt has no kernels for cpu: modules there stay PyTorch's"
    )
    assert memopt_ops(lambda: model(torch.randn(2, 8))) == []


def test_report_is_immutable() -> None:
    report = memopt.convert(example())
    assert isinstance(report, Report)
    with pytest.raises(AttributeError):
        report.swapped = ()


def test_the_sample_runs_the_model_twice_before_and_twice_after(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """First to see what it writes, which is put back: a list of the runs would be too."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.GELU()

        def forward(self, x: Tensor) -> Tensor:
            if self is model:  # and no stand-in of it
                print(type(self.act) is nn.GELU)
            return self.act(x)

    model = Net()
    report = memopt.convert(model, torch.randn(2, 8, requires_grad=True))
    assert capsys.readouterr().out.split() == ["True", "True", "False", "False"]
    assert sum(share.nbytes for share in report.remaining) == report.bytes_after


class Towers(nn.Module):
    """Its second tower is for other inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3))
        self.second = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3))

    def forward(self, x: Tensor, second: Tensor | None = None) -> Tensor:
        for block in self.first:
            x = block(x)
        for block in self.second if second is not None else ():
            x = x + block(second)
        return x


def test_regions_that_the_sample_never_calls_are_named() -> None:
    x, model = torch.randn(2, 8), Towers()
    report = memopt.convert(model, x, checkpoint=True)
    assert report.checkpointed == ("first.0",)
    note = "no regions, since the batch never calls them: second.0, ..., second.2"
    assert note in report.notes
    assert note in str(report)
    memopt.revert(model)
    report = memopt.convert(model, x, checkpoint=nn.Sequential)
    note = "3 of 6 regions save nothing here, since batch never calls them: second.0, ..., second.2"
    assert note in report.notes
    assert not any(others_hooks(module._forward_pre_hooks) for module in model.modules())
    called = memopt.convert(Towers(), (x, x), checkpoint=True)
    assert not any("never calls" in text for text in called.notes)
    assert not any("never calls" in text for text in memopt.convert(Towers(), x).notes)
