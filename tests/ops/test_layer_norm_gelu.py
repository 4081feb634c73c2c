"""Proves what is particular to layer_norm_gelu: it is gelu after layer_norm, in the same bits where
nothing is rounded between the two, and more accurate than the pair where something is.
"""

from __future__ import annotations

import pytest
import torch

import memopt
from tests.support.cases import NORM_CASES, Call, OpCase, evaluate
from tests.support.oracle import exact_results
from tests.support.shapes import BFLOAT16, FLOAT32, FLOAT64, Dtypes
from tests.support.tolerances import root_mean_square

CASES = NORM_CASES[1:]
every_case = pytest.mark.parametrize("case", CASES, ids=str)


def pair(case: OpCase):
    """gelu after layer_norm by memopt's two separate ops."""

    def function(call: Call) -> torch.Tensor:
        normalized = NORM_CASES[0].memopt(call)
        return memopt.functional.gelu(normalized, approximate=case.approximate)

    return function


@every_case
@pytest.mark.parametrize("dtypes", [FLOAT32, FLOAT64], ids=str)
@pytest.mark.parametrize("cols", [3, 129, 1000])
def test_output_has_the_bits_of_the_pair(
    case: OpCase, dtypes: Dtypes, cols: int, device: torch.device
) -> None:
    call = case.make_call((37, cols), dtypes, device)
    assert torch.equal(case.memopt(call), pair(case)(call))


@every_case
def test_gradients_are_those_of_the_pair_in_float64(case: OpCase, device: torch.device) -> None:
    call = case.make_call((37, 130), FLOAT64, device)
    fused, separate = evaluate(case.memopt, call), evaluate(pair(case), call)
    for name, expected in separate.items():
        torch.testing.assert_close(fused[name], expected, rtol=1e-12, atol=1e-12)


@every_case
@pytest.mark.parametrize("dtypes", [BFLOAT16, Dtypes(torch.float16, torch.float16)], ids=str)
def test_more_accurate_than_the_pair_in_16_bits(
    case: OpCase, dtypes: Dtypes, device: torch.device
) -> None:
    """The pair rounds the normalised tensor to 16 bits; here it never leaves float32."""
    call = case.make_call((64, 1000), dtypes, device)
    exact = exact_results(case, call)
    fused, separate = evaluate(case.memopt, call), evaluate(pair(case), call)
    for name in ("output", "grad_input"):
        ours = root_mean_square(getattr(fused, name).cpu() - getattr(exact, name))
        pairs = root_mean_square(getattr(separate, name).cpu() - getattr(exact, name))
        assert ours < 0.9 * pairs, name


@every_case
def test_zero_weight_gives_gelu_of_the_bias(case: OpCase, device: torch.device) -> None:
    call = case.make_call((5, 33), FLOAT32, device)
    call = call.replace(weight=torch.zeros_like(call.weight))
    expected = memopt.functional.gelu(call.bias.expand(5, 33), approximate=case.approximate)
    assert torch.equal(case.memopt(call), expected)
