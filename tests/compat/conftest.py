"""Each test of DeepSpeed's face has a state of its own; many run with each set of options."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from memopt.compat.deepspeed import checkpointing
from tests.checkpoint.support import (
    taken_for_an_accelerator,
)

CHECKPOINTS = (checkpointing.checkpoint, checkpointing.non_reentrant_checkpoint)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"contiguous_checkpointing": True},
    {"checkpoint_in_cpu": True},
    {"partition_activations": True, "contiguous_checkpointing": True, "num_checkpoints": 1},
    {"checkpoint_in_cpu": True, "contiguous_checkpointing": True, "profile": True},
    {"synchronize": True, "profile": True},
]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(checkpointing, "_state", checkpointing._Checkpointing())
    with taken_for_an_accelerator("cpu"):
        yield


@pytest.fixture(params=OPTIONS, ids=lambda options: "-".join(options) or "none")
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    checkpointing.configure(None, **request.param)
    return dict(request.param)


@pytest.fixture(params=CHECKPOINTS, ids=lambda function: function.__name__)
def checkpoint(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return request.param  # type: ignore[no-any-return]
