"""The CUDA kernels of group norm, instance norm and batch norm, run by the interpreter.

They are accurate for every type, size and order in memory, in every order of threads, with one set
of bits wherever the tensors lie and whatever is asked for; the output is written again in forward's
bits; with an activation behind they have the bits of its kernels behind the norm's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from tests.support.bits import assert_same_bits
from tests.support.cases import CHANNEL_NORM_CASES, Call
from tests.support.cases.activation import TORCH, ActivationCase
from tests.support.cases.channel_norm import ChannelNormCase
from tests.support.shapes import (
    BFLOAT16,
    DTYPES,
    FLOAT32,
    STATISTICS,
    Dtypes,
    channels_last,
)

from . import kernels
from .agreement import assert_accurate, run, run_in_every_order
from .device import Attribute, Device
from .drivers import channel_norm
from .drivers.run import Run
from .kernels import DENSE, Layout

CPU = torch.device("cpu")

every_case = pytest.mark.parametrize("case", CHANNEL_NORM_CASES, ids=str)
every_dtype = pytest.mark.parametrize("dtypes", DTYPES, ids=str)
a_wide_and_a_narrow_dtype = pytest.mark.parametrize("dtypes", [FLOAT32, BFLOAT16], ids=str)


in_both_orders = pytest.mark.parametrize("order", [torch.clone, channels_last])


def call_of(
    case: ChannelNormCase, size: tuple[int, ...], dtypes: Dtypes, order: Callable, **choices: object
) -> Call:
    call = case.make_call(size, dtypes, CPU, **choices)
    return call.map(lambda t: order(t))


@every_case
@every_dtype
@in_both_orders
@pytest.mark.parametrize("size", [(2, 6, 5, 7), (3, 8, 4, 8), (1, 130, 1, 2)], ids=str)
def test_accurate(
    simt: Device, case: ChannelNormCase, dtypes: Dtypes, order: Callable, size: tuple[int, ...]
) -> None:
    call = call_of(case, size, dtypes, order)
    assert_accurate(case, call, run_in_every_order(simt, case, call))


@every_case
@a_wide_and_a_narrow_dtype
@in_both_orders
def test_sets_of_many_parts(
    simt: Device, case: ChannelNormCase, dtypes: Dtypes, order: Callable
) -> None:
    """On a device that takes several turns. (A float64 result of so many numbers is off by fewer
    digits than the oracle's.)
    """
    simt.set_attribute(Attribute.MULTIPROCESSORS, 1)
    size = (2, 2, 100, 83) if order is torch.clone else (3, 6, 30, 81)
    call = call_of(case, size, dtypes, order)
    assert_accurate(case, call, run(simt, case, call))


@every_case
@a_wide_and_a_narrow_dtype
@in_both_orders
@pytest.mark.parametrize("name", ["mean 1e4 std 1", "constant rows", "one outlier"])
def test_extreme_statistics(
    simt: Device, case: ChannelNormCase, dtypes: Dtypes, order: Callable, name: str
) -> None:
    values = STATISTICS[name](1, 2 * 4 * 9 * 10)
    call = call_of(case, (2, 4, 9, 10), dtypes, order, values=values)
    assert_accurate(case, call, run_in_every_order(simt, case, call))


@every_case
@in_both_orders
@pytest.mark.parametrize(("weight", "bias"), [(True, False), (False, True), (False, False)])
def test_parameters_may_be_missing(
    simt: Device, case: ChannelNormCase, order: Callable, weight: bool, bias: bool
) -> None:
    call = call_of(case, (2, 6, 3, 5), FLOAT32, order, weight=weight, bias=bias)
    assert_accurate(case, call, run_in_every_order(simt, case, call))


@every_case
@every_dtype
@in_both_orders
@pytest.mark.parametrize("size", [(2, 8, 4, 8), (2, 6, 3, 5)], ids=str)
def test_same_bits_wherever_the_tensors_lie(
    simt: Device, case: ChannelNormCase, dtypes: Dtypes, order: Callable, size: tuple[int, ...]
) -> None:
    call = call_of(case, size, dtypes, order)
    expected = run(simt, case, call)
    for layout in (Layout(offset=1), Layout(offset=1, only="x"), Layout(offset=1, only="dy")):
        assert_same_bits(run(simt, case, call, layout=layout), expected, str(layout))


@every_case
@in_both_orders
def test_any_subset_of_gradients(simt: Device, case: ChannelNormCase, order: Callable) -> None:
    call = call_of(case, (2, 6, 3, 5), FLOAT32, order)
    everything = run(simt, case, call)
    for mask in ((True, False, False), (False, True, False), (False, False, True)):
        some = kernels.backward(simt, case, call, everything.saved, mask)
        for name, wanted in zip(case.masked, mask, strict=True):
            expected = everything[f"grad_{name}"] if wanted else None
            assert_same_bits([some[f"grad_{name}"]], [expected], f"{name}, mask {mask}")


@every_case
@every_dtype
@in_both_orders
def test_the_output_is_written_again_in_the_same_bits(
    simt: Device, case: ChannelNormCase, dtypes: Dtypes, order: Callable
) -> None:
    call = call_of(case, (2, 6, 5, 7), dtypes, order)
    outputs, saved = kernels.forward(simt, case, call)
    again = channel_norm.again(Run(simt, DENSE), case, call, saved)
    assert_same_bits([again], [outputs["output"]])


@every_case
@pytest.mark.parametrize("activation", [name for name in TORCH if name != "gelu_tanh"])
@in_both_orders
@a_wide_and_a_narrow_dtype
def test_an_activation_behind_has_the_bits_of_two_kernels(
    simt: Device, case: ChannelNormCase, activation: str, order: Callable, dtypes: Dtypes
) -> None:
    size = (2, 6, 3, 5)
    call = call_of(case, size, dtypes, order)
    normed = run(simt, case, call)
    alone = ActivationCase(activation, "none" if activation == "gelu" else None)
    behind = alone.make_call((12, 15), dtypes, CPU)
    rows = {"input": normed.output, "grad_output": call.grad_output}
    behind = behind.replace(**{name: t.reshape(12, 15) for name, t in rows.items()})
    activated = run(simt, alone, behind)
    grad_output = order(activated.grad_input.reshape(size))
    expected = run(simt, case, call.replace(grad_output=grad_output))
    fused = run(simt, dataclasses.replace(case, activation=activation), call)
    assert_same_bits([fused.output], [activated.output.reshape(size)])
    for name in ("grad_input", "grad_weight", "grad_bias"):
        assert_same_bits([fused[name]], [expected[name]], name)
    through = channel_norm.gradient_of_output(
        Run(simt, DENSE), dataclasses.replace(case, activation=activation), call, normed.saved
    )
    assert_same_bits([through], [grad_output])
