"""The activations' CUDA kernels, with dropout behind them and without, run by the interpreter.

They are accurate for every type and length, wherever the tensors lie, in every order of threads;
backward re-emits forward's bits, and writes over grad_output if asked. With dropout they drop what
the CPU kernels drop; the state that forward leaves is the one it was given, and one that it is
given it reads.
"""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.bits import assert_same_bits
from tests.support.cases import ACTIVATION_CASES, FURTHER_ACTIVATION_CASES, OpCase, Results
from tests.support.cases.activation import THROUGHOUT, VALUES_ONLY
from tests.support.cases.dropout import ActivationDropoutCase, drawn_state, keep_scales
from tests.support.selection import every_op_with
from tests.support.shapes import FLOAT32, Dtypes, random_normal

from . import kernels
from .agreement import assert_accurate, path, run, run_in_every_order
from .device import Device
from .drivers import activation_dropout
from .drivers.run import DENSE, Run
from .kernels import Layout

CPU = torch.device("cpu")
DROPOUT_CASES, FURTHER_DROPOUT_CASES = (
    [ActivationDropoutCase("activation_dropout", activation=name) for name in names]
    for names in (THROUGHOUT, VALUES_ONLY)
)
DTYPES = tuple(
    Dtypes(dtype, dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64)
)

# The elements that a block takes at a time: 256 threads with 16 each, 4 in float64.
TILE = {torch.float32: 4096, torch.float16: 4096, torch.bfloat16: 4096, torch.float64: 1024}

every_case = pytest.mark.parametrize("case", ACTIVATION_CASES, ids=str)
with_dropout_too = pytest.mark.parametrize("case", [*ACTIVATION_CASES, *DROPOUT_CASES], ids=str)
every_dtype = pytest.mark.parametrize("dtypes", DTYPES, ids=str)


@every_case
@every_dtype
@pytest.mark.parametrize("size", [1, 3, 127, 128, 129, 769, 1000, 4099])
def test_accurate_for_every_length(simt: Device, case: OpCase, dtypes: Dtypes, size: int) -> None:
    call = case.make_call((1, size), dtypes, CPU)
    assert_accurate(case, call, run_in_every_order(simt, case, call))


@every_op_with(FURTHER_ACTIVATION_CASES, dtypes=DTYPES, size=[3, 769])
def test_accurate_for_further_functions(
    simt: Device, case: OpCase, dtypes: Dtypes, size: int
) -> None:
    call = case.make_call((1, size), dtypes, CPU)
    assert_accurate(case, call, run_in_every_order(simt, case, call))


@with_dropout_too
@every_dtype
@pytest.mark.parametrize("beyond", [-1, 0, 1])
def test_one_block_for_each_tile(simt: Device, case: OpCase, dtypes: Dtypes, beyond: int) -> None:
    call = case.make_call((1, 2 * TILE[dtypes.tensor] + beyond), dtypes, CPU)
    assert_accurate(case, call, run(simt, case, call))
    assert path(simt) == ["activation_forward_kernel", "activation_backward_kernel"]
    blocks = 3 if beyond > 0 else 2
    for launch in simt.launches():
        assert launch.grid == (blocks, 1, 1)
        assert launch.block == (256, 1, 1)
        assert launch.shared_bytes == 0
        assert launch.stream == kernels.STREAM


@with_dropout_too
@every_dtype
@pytest.mark.parametrize("offset", [1, 2, 3])
def test_same_bits_wherever_the_tensors_lie(
    simt: Device, case: OpCase, dtypes: Dtypes, offset: int
) -> None:
    call = case.make_call((1, TILE[dtypes.tensor] + 133), dtypes, CPU)
    assert_same_bits(
        run_in_every_order(simt, case, call, layout=Layout(offset=offset)),
        run(simt, case, call),
        f"offset {offset}",
    )


@with_dropout_too
@every_dtype
@pytest.mark.parametrize("recompute_output", [False, True])
def test_in_place_backward_has_the_same_bits(
    simt: Device, case: OpCase, dtypes: Dtypes, recompute_output: bool
) -> None:
    call = case.make_call((1, 1003), dtypes, CPU)
    apart = run(simt, case, call)
    in_place = kernels.in_every_order(
        simt,
        lambda: kernels.backward(
            simt, case, call, apart.saved, recompute_output=recompute_output, in_place=True
        ),
    )
    output = apart.output if recompute_output else None
    expected = Results(output=output, grad_input=apart.grad_input)
    assert_same_bits(in_place, expected, "in place")


@every_case
def test_nothing_is_launched_for_an_empty_tensor(simt: Device, case: OpCase) -> None:
    outcome = run(simt, case, case.make_call((0, 5), FLOAT32, CPU))
    assert outcome.output.shape == (0, 5)
    assert simt.launches() == []


@pytest.mark.parametrize("case", [*ACTIVATION_CASES, *FURTHER_ACTIVATION_CASES], ids=str)
@every_dtype
def test_extreme_values(simt: Device, case: OpCase, dtypes: Dtypes) -> None:
    """The limits at both ends; NaN and the infinities as PyTorch has them."""
    largest = torch.finfo(dtypes.tensor).max / 2
    if case.family == "relu_squared":
        largest = math.sqrt(largest)  # beyond that the square is infinite
    values = [0.0, -0.0, 1e-30, -1e-30, 6.0, -6.0, 40.0, -40.0, largest, -largest]
    special = [math.inf, -math.inf, math.nan]
    x = torch.tensor([values], dtype=torch.float64)
    call = case.make_call((1, len(values)), dtypes, CPU, values=x)
    assert_accurate(case, call, run_in_every_order(simt, case, call))

    x = torch.tensor([special]).double()
    call = case.make_call((1, len(special)), dtypes, CPU, values=x)
    output = run_in_every_order(simt, case, call).output
    expected = case.memopt(call)
    torch.testing.assert_close(output, expected, rtol=0, atol=0, equal_nan=True)


@every_case
@every_dtype
def test_neighbours_do_not_matter(simt: Device, case: OpCase, dtypes: Dtypes) -> None:
    """An element's bits depend on nothing but its value, in a tail as in a vector."""
    values = random_normal(1, 300)
    whole = run(simt, case, case.make_call((1, 300), dtypes, CPU, values=values))
    part = run(simt, case, case.make_call((1, 111), dtypes, CPU, values=values[:, 100:211]))
    assert_same_bits([part.output], [whole.output[:, 100:211]], "elements 100 to 210")


@pytest.mark.parametrize("case", DROPOUT_CASES, ids=str)
@every_dtype
@pytest.mark.parametrize("size", [1, 3, 127, 128, 769, 4099])
def test_accurate_with_dropout_for_every_length(
    simt: Device, case: ActivationDropoutCase, dtypes: Dtypes, size: int
) -> None:
    call = case.make_call((1, size), dtypes, CPU)
    outcome = run_in_every_order(simt, case, call)
    assert_accurate(case, call, outcome)
    assert torch.equal(outcome.saved["rng_state"], drawn_state("cpu"))


@every_op_with(FURTHER_DROPOUT_CASES, dtypes=DTYPES[:3], size=[769])
def test_accurate_with_dropout_for_further_functions(
    simt: Device, case: ActivationDropoutCase, dtypes: Dtypes, size: int
) -> None:
    call = case.make_call((1, size), dtypes, CPU)
    assert_accurate(case, call, run_in_every_order(simt, case, call))


@every_dtype
@pytest.mark.parametrize("p", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("offset", [0, 1])
def test_drops_exactly_what_the_cpu_drops(
    simt: Device, dtypes: Dtypes, p: float, offset: int
) -> None:
    case = DROPOUT_CASES[0]
    values = 1 + random_normal(1, TILE[dtypes.tensor] + 133).abs()
    call = case.make_call(tuple(values.shape), dtypes, CPU, values=values).replace(p=p)
    outcome = run(simt, case, call, layout=Layout(offset=offset))
    cpu, _ = case.forward(call)
    kept = keep_scales(call, torch.float32) != 0
    for output in (outcome.output, outcome.grad_input, cpu["output"]):
        assert torch.equal(output != 0, kept & (call.grad_output != 0))


@every_dtype
def test_forward_reads_a_state_that_it_is_given(simt: Device, dtypes: Dtypes) -> None:
    call = DROPOUT_CASES[0].make_call((1, 1003), dtypes, CPU)
    drawn, saved = kernels.forward(simt, DROPOUT_CASES[0], call)
    given = activation_dropout.forward_with_state(
        Run(simt, DENSE), DROPOUT_CASES[0], call, saved["rng_state"]
    )
    assert_same_bits([given], [drawn["output"]], "a given state")


def test_an_empty_tensor_leaves_its_state_and_nothing_is_launched_in_backward(
    simt: Device,
) -> None:
    case = DROPOUT_CASES[0]
    call = case.make_call((0, 5), FLOAT32, CPU)
    outcome = run(simt, case, call)
    assert outcome.output.shape == (0, 5)
    assert torch.equal(outcome.saved["rng_state"], drawn_state("cpu"))
    assert path(simt) == ["activation_forward_kernel"]
    kernels.forward(simt, case, call, statistics=False)
    assert len(simt.launches()) == 1
