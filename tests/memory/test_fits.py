"""Proves: one search finds the largest size that fits for any peak, and stops for what depends on
values alone; a size may be given as text wherever memopt takes one, and means the same bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt.memory.predicted.fits import largest, largest_part
from memopt.memory.predicted.outcome import DependsOnValues
from memopt.memory.step import Step

ROWS, WIDTH = 40, 8


def step() -> Step:
    return Step(nn.Linear(WIDTH, 1), torch.ones(ROWS, WIDTH), None, who="a test")


def rows(step: Step) -> int:
    return len(step.batch)


@pytest.mark.parametrize("most", [0, 1, 13, 31, 32])
def test_the_largest_size_is_the_last_that_fits(most: int) -> None:
    assert largest(step(), lambda size: torch.ones(size, WIDTH), most, 32, rows) == most


@pytest.mark.parametrize(("most", "found"), [(2, 0), (4, 0), (5, 5), (13, 13), (99, 32)])
def test_sizes_that_the_model_is_too_large_for_are_below_those_that_fit(
    most: int, found: int
) -> None:
    """A convolution takes no sequence that is shorter than its kernel."""
    assert largest(step(), torch.ones, most, 32, from_five) == found


def from_five(step: Step) -> int:
    if rows(step) < 5:
        raise RuntimeError(f"{rows(step)} for a test")
    return rows(step)


def test_a_model_that_takes_no_size_says_so_itself() -> None:
    with pytest.raises(RuntimeError, match="1 for a test"):
        largest(step(), torch.ones, 99, 3, from_five)


def test_a_batch_norm_takes_no_single_row() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    assert memopt.largest_batch(model, BATCH, 1 << 16, loss=torch.sum) > 100


@pytest.mark.parametrize("most", [0, 3, 7, 19])
def test_a_part_counts_twice_where_other_parts_follow(most: int) -> None:
    """It is predicted as two micro-batches of so many rows."""
    assert largest_part(step(), 2 * most, rows) == most


@pytest.mark.parametrize(("most", "found"), [(19, 19), (20, 20), (33, 20), (39, 20), (40, 40)])
def test_a_part_is_at_most_half_where_the_whole_does_not_fit(most: int, found: int) -> None:
    """Larger parts would be two as well; a step in two parts does not show what they take."""

    def of_one_part(step: Step) -> int:
        return -(-rows(step) // step.micro_batches)

    assert largest_part(step(), most, of_one_part) == found


def test_the_whole_batch_is_one_step() -> None:
    assert largest_part(step(), ROWS, lambda whole: rows(whole) * whole.micro_batches) == ROWS


@pytest.mark.parametrize(("error", "stops"), [(RuntimeError, False), (DependsOnValues, True)])
def test_a_model_that_takes_no_other_number_of_rows(error: type[Exception], stops: bool) -> None:
    def peak(part: Step) -> int:
        if part.micro_batches > 1:
            raise error("for a test")
        return 100

    if stops:
        with pytest.raises(error, match="for a test"):
            largest_part(step(), 99, peak)
    else:
        assert largest_part(step(), 99, peak) == 0
        assert largest_part(step(), 100, peak) == ROWS


MODEL, BATCH = nn.Linear(WIDTH, 1), torch.ones(ROWS, WIDTH)


def micro_batch(budget: Any) -> int:
    try:
        return memopt.accumulate(MODEL, BATCH, loss=torch.mean, budget=budget).micro_batch
    except memopt.BudgetTooSmall:
        return 0


def largest_batch(budget: Any) -> int:
    return memopt.largest_batch(MODEL, BATCH, budget, loss=torch.mean)


def measured(budget: Any) -> int:
    return memopt.largest_batch(lambda size: torch.ones(size, 100), budget)


def longest(budget: Any) -> int:
    batch = torch.ones(2, 4, WIDTH)
    return memopt.longest_sequence(MODEL, batch, budget, loss=torch.mean)


CALLS: list[Callable[[Any], object]] = [micro_batch, largest_batch, measured, longest]


@pytest.mark.parametrize("call", CALLS)
def test_a_budget_as_text_is_its_number(call: Callable[[Any], object]) -> None:
    found = call("2KiB")
    assert found == call(2048) == call("2048")
    assert found != call("1 KiB")


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("budget", ["lots", "12 eggs", True])
def test_what_is_no_size_is_refused_by_name(call: Callable[[Any], object], budget: Any) -> None:
    who = r"^(accumulate|largest_batch|longest_sequence): budget must be bytes or a string such as"
    with pytest.raises((TypeError, ValueError), match=who):
        call(budget)


@pytest.mark.parametrize("name", ["min_bytes", "max_bytes"])
def test_limits_of_offloading_are_sizes(name: str) -> None:
    options: dict[str, Any] = {name: "64KiB"}
    with memopt.offload(**options):
        pass
    with pytest.raises(ValueError, match=rf"^offload: {name} must be bytes or a string"):
        memopt.offload(**{name: "lots"})


def test_the_limit_of_the_pool_is_a_size() -> None:
    memopt.offload.configure(max_host_bytes="40GiB")
    memopt.offload.configure()
    with pytest.raises(ValueError, match=r"^offload.configure: max_host_bytes must be bytes"):
        memopt.offload.configure(max_host_bytes="lots")


def test_a_budget_of_compile_is_a_size() -> None:
    """A float is a share."""
    options = memopt.compile.options("2 KiB")
    partitioner = options["custom_partitioner_fn"]
    assert partitioner.uuid() == memopt.compile.options(2048)["custom_partitioner_fn"].uuid()


@pytest.mark.parametrize(
    ("function", "resized", "left", "takes"),
    [
        (
            memopt.largest_batch,
            r"first dimension is 8: \['ids'\] \[8, 8\] to \[16, 8\], \['places'\] \[8\] to \[16\]",
            "none",
            "the number of rows",
        ),
        (
            memopt.longest_sequence,
            r"second dimension is 8: \['ids'\] \[8, 8\] to \[8, 16\]",
            r"\['places'\] \[8\]",
            "the length",
        ),
    ],
)
def test_an_error_says_which_tensors_were_resized(
    function: Any, resized: str, left: str, takes: str
) -> None:
    """As many rows as tokens: a tensor of one number for each token may be taken for one of rows,
    and has no second dimension. A function that makes the batch helps."""

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places = nn.Embedding(50, WIDTH), nn.Embedding(4096, WIDTH)

        def forward(self, ids: Tensor, places: Tensor) -> Tensor:
            return (self.words(ids) + self.places(places)).square().mean()

    batch = {"ids": torch.ones(8, 8, dtype=torch.long), "places": torch.arange(8)}
    with pytest.raises(memopt.DependsOnValues) as caught:
        function(Words(), batch, "4MB", optimizer=None)
    (note,) = caught.value.__notes__
    assert re.search(f"resized the tensors whose {resized}; and left as they are: {left}", note)
    assert f"takes as batch a function of {takes}" in note

    def made(size: int) -> dict[str, Tensor]:
        rows, length = (size, 8) if takes == "the number of rows" else (8, size)
        ids = torch.ones(rows, length, dtype=torch.long, device="meta")
        return {"ids": ids, "places": torch.arange(length, device="meta")}

    assert function(Words(), made, "4MB", optimizer=None) > 0
