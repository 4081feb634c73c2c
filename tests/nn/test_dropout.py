"""Proves: memopt.nn.Dropout takes torch.nn.Dropout's place: same constructor, repr, (empty) state;
it runs memopt's op in training and is the identity in eval.
"""

from __future__ import annotations

import pytest
import torch

import memopt
from tests.support.modules import assert_copies, assert_same_state, constructor_parameters
from tests.support.record_ops import RecordOps


def test_constructor_and_repr() -> None:
    assert constructor_parameters(memopt.nn.Dropout) == constructor_parameters(torch.nn.Dropout)
    assert repr(memopt.nn.Dropout(0.3)) == repr(torch.nn.Dropout(0.3))
    assert isinstance(memopt.nn.Dropout(), torch.nn.Dropout)
    assert memopt.nn.Dropout().p == torch.nn.Dropout().p


def test_runs_the_op_in_training_and_nothing_in_eval(device: torch.device) -> None:
    module = memopt.nn.Dropout(0.3)
    x = torch.randn(3, 7, device=device)
    with RecordOps() as ops:
        module(x)
        assert module.eval()(x) is x
    assert ops.ops == [torch.ops.memopt._dropout_forward.default]
    torch.manual_seed(0)
    expected = memopt.functional.dropout(x, 0.3)
    torch.manual_seed(0)
    assert torch.equal(module.train()(x), expected)


def test_state_and_copies(device: torch.device) -> None:
    module, twin = memopt.nn.Dropout(0.3).eval(), torch.nn.Dropout(0.3).eval()
    x = torch.randn(3, 7, device=device)
    assert_same_state(module, twin, x)
    assert_copies(module, x)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="Dropout: inplace must be False, got True"):
        memopt.nn.Dropout(0.5, inplace=True)
    with pytest.raises(ValueError, match="has to be between 0 and 1, but got 2"):
        memopt.nn.Dropout(2)
