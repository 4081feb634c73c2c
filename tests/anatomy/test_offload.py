"""Proves that what is predicted of offloading is what is left when activations are on disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memopt
from tests.anatomy.models import Mlp, tiny

COPIES_IN_FLIGHT = 2


@pytest.fixture(autouse=True)
def _to_disk(tmp_path: Path) -> Iterator[None]:
    memopt.offload.configure(directory=tmp_path, copies_in_flight=COPIES_IN_FLIGHT)
    yield
    memopt.offload.configure()


def model_of(name: str) -> tuple[nn.Module, Any]:
    return (Mlp(), torch.randn(1024, 32)) if name == "mlp" else tiny(name, rows=16, length=64)


@pytest.mark.parametrize("checkpoint", [None, "all"])
@pytest.mark.parametrize(
    "name", ["mlp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "llama"))]
)
def test_what_is_left_is_what_was_predicted(name: str, checkpoint: Any) -> None:
    """At the end of forward to the byte; at the peak but for the copies that are under way."""
    model, batch = model_of(name)
    plain = memopt.anatomy(model, batch, checkpoint=checkpoint, optimizer=None)
    report = memopt.anatomy(
        model, batch, offload="disk", measure=True, checkpoint=checkpoint, optimizer=None
    )
    predicted, measured = report.predicted, report.measured
    assert predicted is not None
    assert measured is not None
    moments = [trace.moment("end of forward") for trace in (predicted, measured, plain.trace)]
    of_activations = [moment.by_category["activations"] for moment in moments]
    assert of_activations[0] == of_activations[1] < of_activations[2]
    # Measured is what backward read: of a region's inputs that may be fewer.
    assert 0 < measured.fates["offloaded"] <= predicted.fates["offloaded"]
    under_way = COPIES_IN_FLIGHT * max(large.nbytes for large in predicted.largest)
    assert abs(measured.peak.total - predicted.peak.total) <= under_way


def test_a_real_step_offloads_and_a_plain_one_does_not() -> None:
    model, batch = model_of("mlp")
    memopt.offload.stats(reset=True, wait=True)
    memopt.anatomy(model, batch, measure=True)
    assert memopt.offload.stats(wait=True).bytes_out == 0
    memopt.anatomy(model, batch, measure=True, offload="disk")
    assert memopt.offload.stats(wait=True).bytes_out > 0
