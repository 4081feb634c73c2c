"""Proves: memopt.nn.SyncBatchNorm takes torch.nn.SyncBatchNorm's place, in models whose batch norms
are converted too; on one rank it and memopt.functional.sync_batch_norm are batch_norm, in every
bit, and memopt's ops are well-formed. (Across ranks: tests/distributed/test_sync_batch_norm.py.)
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import memopt
from tests.support.bits import assert_same_bits
from tests.support.cases import Call
from tests.support.cases.channel_norm import ChannelNormCase
from tests.support.modules import assert_copies, assert_same_state, constructor_parameters
from tests.support.opchecks import opcheck
from tests.support.shapes import FLOAT32, Dtypes, channels_last
from tests.support.tolerances import sums_dtype

CASE = ChannelNormCase("batch_norm")
ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"eps": 1e-3, "momentum": None},
    {"affine": False},
    {"bias": False},
    {"track_running_stats": False},
]
every_argument = pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)


def images() -> torch.Tensor:
    return torch.randn(3, 6, 4, 5)


def test_constructor_takes_torchs_arguments_in_torchs_order() -> None:
    theirs = constructor_parameters(nn.SyncBatchNorm)
    assert constructor_parameters(memopt.nn.SyncBatchNorm) == theirs


@every_argument
def test_same_state_and_copies(arguments: dict[str, Any]) -> None:
    ours, theirs = memopt.nn.SyncBatchNorm(6, **arguments), nn.SyncBatchNorm(6, **arguments)
    assert_same_state(ours, theirs, images())
    assert repr(ours) == repr(theirs)
    assert_copies(ours, images())


@every_argument
def test_on_one_rank_it_is_batch_norm(arguments: dict[str, Any]) -> None:
    ours, theirs = memopt.nn.SyncBatchNorm(6, **arguments), nn.SyncBatchNorm(6, **arguments)
    for _ in range(2):
        x = images()
        with memopt.convert.functions():
            expected = theirs(x)
        assert_same_bits([ours(x), *ours.buffers()], [expected, *theirs.buffers()])
    with memopt.convert.functions():
        assert_same_bits([ours.eval()(x)], [theirs.eval()(x)])


def test_input_of_too_few_dimensions_is_refused_by_name() -> None:
    with pytest.raises(RuntimeError, match="batch_norm: input must have at least 2 dimensions"):
        memopt.nn.SyncBatchNorm(6)(torch.zeros(6))


def test_batch_norms_of_a_model_become_this_class() -> None:
    model = nn.Sequential(nn.Conv2d(6, 6, 1), nn.Sequential(nn.BatchNorm2d(6), nn.ReLU()))
    weight, mean = model[1][0].weight, model[1][0].running_mean
    converted = memopt.nn.SyncBatchNorm.convert_sync_batchnorm(model, process_group="a group")
    assert converted is model
    norm = model[1][0]
    assert type(norm) is memopt.nn.SyncBatchNorm
    assert norm.process_group == "a group"
    assert norm.weight is weight
    assert norm.running_mean is mean
    alone = memopt.nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(4, affine=False))
    assert type(alone) is memopt.nn.SyncBatchNorm


def call_of(size: tuple[int, ...], dtypes: Dtypes = FLOAT32, last: bool = False) -> Call:
    call = CASE.make_call(size, dtypes, torch.device("cpu"))
    return call.map_activations(channels_last) if last else call


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtypes", [FLOAT32, Dtypes(torch.bfloat16, torch.float32)], ids=str)
def test_opcheck(dtypes: Dtypes, last: bool) -> None:
    call = call_of((2, 4, 3, 5), dtypes, last)
    op, x = torch.ops.memopt, call.leaves()
    tensors = (x.input, x.running_mean, x.running_var, x.weight, x.bias)
    one_rank = {"group_size": 1, "group_name": ""}
    opcheck(op.sync_batch_norm.default, tensors, one_rank, random=False)
    _, saved = CASE.forward(call)
    given = (call.grad_output, call.input, *saved.values())
    means = torch.zeros(4, 2, dtype=sums_dtype(call.input.dtype))
    for private, arguments in (
        (op._sync_batch_norm_moments, (call.input,)),
        (op._sync_batch_norm_sums, given),
        (op._sync_batch_norm_input_gradient, (*given, call.weight, means)),
    ):
        torch.library.opcheck(private.default, arguments)


@pytest.mark.parametrize("last", [False, True])
def test_steps_of_one_rank_are_batch_norm_s(last: bool) -> None:
    """What is exchanged left out: the mean of all is the rank's."""
    call, op = call_of((3, 4, 5, 7), last=last), torch.ops.memopt
    _, saved = CASE.forward(call)
    expected = CASE.backward(call, saved)
    mean, shift, variance = op._sync_batch_norm_moments(call.input)
    assert_same_bits([mean], [saved["mean"]])
    assert shift.abs().max() <= mean.abs().max() * 2**-23
    torch.testing.assert_close((variance + call.eps).rsqrt(), saved["rstd"])
    given = (call.grad_output, call.input, *saved.values())
    sums, products = op._sync_batch_norm_sums(*given)
    assert_same_bits([sums, products], [expected["grad_bias"], expected["grad_weight"]])
    means = torch.stack((sums, products), 1) * call.weight[:, None] / (3 * 5 * 7)
    dx = op._sync_batch_norm_input_gradient(*given, call.weight, means)
    torch.testing.assert_close(dx, expected["grad_input"])
    assert dx.stride() == expected["grad_input"].stride()


def test_bad_input_of_the_private_ops() -> None:
    call = call_of((2, 6, 5))
    _, saved = CASE.forward(call)
    given = (call.grad_output, call.input, *saved.values(), call.weight)
    op = torch.ops.memopt._sync_batch_norm_input_gradient
    with pytest.raises(RuntimeError, match="sync_batch_norm backward: means must be"):
        op(*given, torch.zeros(6))
    with pytest.raises(RuntimeError, match="sync_batch_norm: group_size must be positive, got 0"):
        torch.ops.memopt.sync_batch_norm(call.input, None, None, group_size=0, group_name="")
