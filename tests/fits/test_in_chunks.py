"""Proves: where a step does not fit, `memopt.fits` proposes MLPs and the head in chunks of rows, as
calls of `convert` and as the plan that needs least; with each of them the allocator counts what was
predicted, in every byte; and they are not proposed to steps that have them, nor of models without.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt._fits.report import Way
from memopt.memory.peak import bytes_here
from memopt.memory.step import Step
from tests.plan.support import allocated_above
from tests.plan.test_in_chunks import WORDS, ids, language

MLPS, HEAD = "MLPs", "the head"
IN_CHUNKS = "memopt.convert(model, batch, chunks=8)"
CONVERTED, CHECKPOINTED = "memopt.convert(model)", "memopt.convert(model, checkpoint=True)"
PLANNED = "memopt.plan(model, batch, budget), at its floor"
APPLIED: dict[str, Callable[[nn.Module, Tensor, int], object]] = {
    CONVERTED: lambda model, batch, peak: memopt.convert(model),
    CHECKPOINTED: lambda model, batch, peak: memopt.convert(model, checkpoint=True),
    IN_CHUNKS: lambda model, batch, peak: memopt.convert(model, batch, chunks=8),
    PLANNED: lambda model, batch, peak: memopt.plan(
        model, batch, peak, optimizer=None, measure=False
    ).apply(),
}


@cache
def ways(words: int, share: float) -> dict[str, Way]:
    """What is proposed on a device that has a share of the plain step's peak, by the calls."""
    model, batch = language(words), ids(words=words)
    plain = memopt.fits(model, batch, "1GB", optimizer=None).peak
    found = memopt.fits(model, batch, int(share * plain), optimizer=None)
    assert not found
    assert all(way.fits for way in found.ways)
    return {way.how.partition(" (")[0]: way for way in found.ways}


@pytest.mark.parametrize(
    ("words", "share", "expected"),
    [
        (20, 0.5, {IN_CHUNKS: (MLPS,), PLANNED: (MLPS,)}),
        (WORDS, 0.6, {CONVERTED: (HEAD,), IN_CHUNKS: (MLPS, HEAD)}),
        (WORDS, 0.4, {IN_CHUNKS: (MLPS, HEAD), CHECKPOINTED: (HEAD,), PLANNED: (MLPS, HEAD)}),
    ],
    ids=["MLPs are the most", "the head is", "both are too much"],
)
def test_what_is_proposed_takes_what_was_said(
    words: int, share: float, expected: dict[str, tuple[str, ...]]
) -> None:
    found = ways(words, share)
    for call, parts in expected.items():
        said = found[call].how.partition(" (")[2]
        assert all(part in said for part in (*parts, "in chunks)"))
        model, batch = language(words), ids(words=words)
        before = bytes_here(Step(model, batch, None, who="test"))
        APPLIED[call](model, batch, found[call].peak)
        peak = before + allocated_above(model, batch)
        assert peak == found[call].peak


def test_what_a_step_has_is_not_proposed() -> None:
    model, batch = language(), ids()
    options = {"recipes": True, "chunks": 8, "optimizer": None}
    peak = memopt.fits(model, batch, "1GB", **options).peak
    found = memopt.fits(model, batch, peak - 1, **options)
    assert found.ways
    for way in found.ways:
        assert not way.how.startswith("memopt.convert(model, batch, chunks=")
        assert "(the head in chunks)" not in way.how


def test_models_without_mlps_and_heads_have_no_chunks() -> None:
    class Sums(nn.Module):
        """Mixes its rows, and holds more inside than it returns."""

        def forward(self, x: Tensor) -> Tensor:
            return (x.exp().sin() * x.cos()).cumsum(0)

    model = nn.Sequential(nn.Linear(8, 8), *(Sums() for _ in range(4)))
    batch = torch.empty(64, 8, device="meta")
    found = memopt.fits(
        model.to("meta"), batch, 8000, loss=Tensor.sum, device="cpu", optimizer=None
    )
    assert not found
    assert found.ways
    assert all("chunks" not in way.how for way in found.ways)


def test_a_model_without_values_is_enough() -> None:
    found = ways(WORDS, 0.4)
    with torch.device("meta"):
        model, batch = type(language())(), torch.empty(2, ids().shape[1], dtype=torch.long)
    room = max(way.peak for way in found.values())
    hollow = memopt.fits(model, batch, room, optimizer=None, device="cpu")
    assert {way.how: way.peak for way in hollow.ways} == {w.how: w.peak for w in found.values()}
