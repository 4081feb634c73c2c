"""Proves what is particular to the gated units: the named ones are gated with their activation, the
packed forms have the bits of the others without copies, halves of a tensor are not copied, only
what the wanted gradients need is saved, and gates and ups that do not fit raise an error.
"""

from __future__ import annotations

import re

import pytest
import torch

import memopt
from memopt.memory.saved import SavedTensors
from tests.support.cases import (
    FURTHER_ACTIVATION_CASES,
    GATED_CASES,
    PACKED_CASES,
    OpCase,
    evaluate,
)
from tests.support.cases.activation import ACTIVATION_CASES, named
from tests.support.record_ops import RecordOps
from tests.support.shapes import BFLOAT16, FLOAT32, FLOAT64, Dtypes

gated = memopt.functional.gated
every_case = pytest.mark.parametrize("case", GATED_CASES, ids=str)
every_packed = pytest.mark.parametrize("case", PACKED_CASES, ids=str)
ACTIVATIONS = [case.activation for case in ACTIVATION_CASES]


@pytest.mark.parametrize("dtypes", [FLOAT32, FLOAT64], ids=str)
@pytest.mark.parametrize("case", [*ACTIVATION_CASES, *FURTHER_ACTIVATION_CASES], ids=str)
def test_output_has_the_bits_of_the_activation_times_up(
    case: OpCase, dtypes: Dtypes, device: torch.device
) -> None:
    call = GATED_CASES[0].make_call((5, 133), dtypes, device)
    value = case.memopt(case.make_call((5, 133), dtypes, device).replace(input=call.gate))
    assert torch.equal(gated(call.gate, call.up, **named(case.activation)), value * call.up)


@every_case
def test_named_ones_are_gated_with_their_activation(case: OpCase, device: torch.device) -> None:
    call = case.make_call((5, 133), BFLOAT16, device)
    assert torch.equal(case.memopt(call), gated(call.gate, call.up, **named(case.activation)))


@every_packed
@pytest.mark.parametrize("dtypes", [FLOAT32, BFLOAT16, FLOAT64], ids=str)
@pytest.mark.parametrize("cols", [1, 3, 64, 133])
def test_packed_has_the_bits_of_two_tensors(
    case: OpCase, dtypes: Dtypes, cols: int, device: torch.device
) -> None:
    call = case.make_call((5, cols), dtypes, device)
    packed = evaluate(case.memopt, call)
    apart_case = GATED_CASES[-1].__class__("gated", case.activation)
    apart_call = apart_case.make_call((5, cols), dtypes, device)
    gate, up = case.gate_and_up(call)
    apart = evaluate(apart_case.memopt, apart_call.replace(gate=gate, up=up))
    assert torch.equal(packed.output, apart.output)
    halves = case.gate_and_up(call.replace(input=packed.grad_input))
    assert torch.equal(halves[0], apart.grad_gate)
    assert torch.equal(halves[1], apart.grad_up)


@every_packed
def test_nothing_is_copied(case: OpCase, device: torch.device) -> None:
    """Neither for packed tensors with gaps between their rows nor for halves given as two."""
    wide = torch.randn(6, 70, device=device)
    halves = wide[:, :32], wide[:, 32:64]
    call = case.make_call((6, 32), FLOAT32, device).replace(input=wide[:, :64])
    with RecordOps() as ops:
        case.memopt(call)
        gated(*halves, **named(case.activation))
    assert ops.ops == [case.forward_op, torch.ops.memopt._gated_forward.default]


@every_case
def test_only_what_the_wanted_gradients_need_is_saved(case: OpCase, device: torch.device) -> None:
    """The gradient of up needs gate alone."""
    call = case.make_call((6, 130), BFLOAT16, device)
    for name, matrices in (("gate", 2), ("up", 1)):
        leaves = call.replace(**{name: getattr(call, name).clone().requires_grad_()})
        with SavedTensors() as saved:
            case.memopt(leaves)
        assert saved.bytes == matrices * call.gate.nbytes, name


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_pytorch_keeps_more(name: str) -> None:
    """f(gate) beside gate and up, 6 bytes an element against 4; relu, whose output is saved in
    place of its input, and sigmoid keep two matrices less.
    """
    case = GATED_CASES[0].__class__("gated", name)
    leaves = case.make_call((6, 130), BFLOAT16, torch.device("cpu")).leaves()
    counted = []
    for function in (case.memopt, case.torch):
        with SavedTensors() as saved:
            function(leaves)
        counted.append(saved.bytes)
    matrix = leaves.gate.nbytes
    assert counted[0] == 2 * matrix
    if name in ("relu", "sigmoid"):
        assert counted[1] == 2 * matrix
    else:
        assert counted[1] >= 3 * matrix


@every_case
@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda t: t[:, :7], "up must have gate's shape [4, 8], got [4, 7]"),
        (lambda t: t[0], "up must have gate's shape [4, 8], got [8]"),
        (lambda t: t.bfloat16(), "up must have gate's dtype Float, got BFloat16"),
        (lambda t: t.to("meta"), "up must be on gate's device {device}, got meta"),
        (lambda t: None, "up must be a tensor, got None"),
    ],
    ids=["cols", "dimensions", "dtype", "device", "none"],
)
def test_up_that_does_not_fit(case: OpCase, change, rule: str, device: torch.device) -> None:
    call = case.make_call((4, 8), FLOAT32, device)
    rule = re.escape(f"{case.family}: {rule.format(device=call.gate.device)}")
    arguments, keywords = case.public_arguments(call.replace(up=change(call.up)))
    with pytest.raises(RuntimeError, match=rule):
        case.public_op(*arguments, **keywords)


@every_packed
def test_packed_tensors_that_cannot_be_halved(case: OpCase, device: torch.device) -> None:
    call = case.make_call((4, 8), FLOAT32, device)
    rule = "input's last dimension holds gate and up and must be even, got 7"
    with pytest.raises(RuntimeError, match=f"{case.family}: {rule}"):
        case.memopt(call.replace(input=torch.zeros(4, 7, device=device)))
    rule = "input must have a last dimension that holds gate and up, got a scalar"
    with pytest.raises(RuntimeError, match=f"{case.family}: {rule}"):
        case.memopt(call.replace(input=torch.zeros((), device=device)))


@pytest.mark.parametrize("name", ["", "swish", "GELU"])
def test_unknown_activation(name: str, device: torch.device) -> None:
    x = torch.zeros(2, 4, device=device)
    message = f"gated: activation must be one of 'gelu', .*'sigmoid', .*got '{name}'"
    with pytest.raises(RuntimeError, match=message):
        gated(x, x, name)
    with pytest.raises(RuntimeError, match=message.replace("gated", "gated_packed")):
        memopt.functional.gated_packed(x, name)


def test_any_shape(device: torch.device) -> None:
    """From no dimension to four, and empty."""
    for size in [(), (1,), (0,), (3, 0, 2), (0, 4), (2, 3, 4, 5)]:
        gate, up = torch.randn(size, device=device), torch.randn(size, device=device)
        output = memopt.functional.swiglu(gate, up)
        assert output.shape == size
        torch.testing.assert_close(output, torch.nn.functional.silu(gate) * up)
