"""Proves: memopt.nn.GELU takes torch.nn.GELU's place: same constructor, repr, (empty) state,
results; and runs memopt's op.
"""

from __future__ import annotations

import pytest
import torch

import memopt
from tests.support.modules import assert_copies, assert_same_state, constructor_parameters
from tests.support.record_ops import RecordOps

every_form = pytest.mark.parametrize("approximate", ["none", "tanh"])


def test_constructor_and_repr() -> None:
    assert constructor_parameters(memopt.nn.GELU) == constructor_parameters(torch.nn.GELU)
    assert repr(memopt.nn.GELU()) == repr(torch.nn.GELU())
    assert repr(memopt.nn.GELU("tanh")) == repr(torch.nn.GELU("tanh"))
    assert isinstance(memopt.nn.GELU(), torch.nn.GELU)


@every_form
def test_runs_the_op(approximate: str, device: torch.device) -> None:
    module = memopt.nn.GELU(approximate)
    x = torch.randn(3, 7, device=device)
    with RecordOps() as ops:
        output = module(x)
    assert ops.ops == [torch.ops.memopt.gelu.default]
    assert torch.equal(output, memopt.functional.gelu(x, approximate=approximate))


@every_form
def test_state_and_copies(approximate: str, device: torch.device) -> None:
    module, twin = memopt.nn.GELU(approximate), torch.nn.GELU(approximate)
    x = torch.randn(3, 7, device=device)
    assert_same_state(module, twin, x)
    assert_copies(module, x)


def test_bad_approximate_is_named() -> None:
    with pytest.raises(RuntimeError, match="gelu: approximate must be 'none' or 'tanh', got 'erf'"):
        memopt.nn.GELU("erf")(torch.zeros(1))
