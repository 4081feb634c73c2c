"""Proves: forward and all gradients of every op agree with a float64 oracle, for each dtype
combination, odd size and extreme statistic, with an error of at most PyTorch's own or of what the
arithmetic itself costs (support/tolerances.py).
"""

from __future__ import annotations

import pytest
import torch

from tests.support.cases import (
    NORM_CASES,
    NORMALIZING_CASES,
    OP_CASES,
    RMS_NORM_CASES,
    VALUE_CASES,
    OpCase,
    evaluate,
)
from tests.support.oracle import assert_accurate, exact_results, magnitudes
from tests.support.selection import every_op_with
from tests.support.shapes import (
    BFLOAT16,
    COLS,
    DTYPES,
    FLOAT32,
    FLOAT64,
    ROWS,
    STATISTICS,
    Dtypes,
    awkward_gamma,
    random_normal,
)
from tests.support.tolerances import (
    AVERAGE_ERROR_RATIO,
    STATISTICS_ROUNDINGS,
    largest_error,
    root_mean_square,
    roundoff,
    sums_dtype,
    worst_error,
)

every_op = pytest.mark.parametrize("case", OP_CASES, ids=str)
every_norm = pytest.mark.parametrize("case", NORMALIZING_CASES, ids=str)
every_layer_norm = pytest.mark.parametrize("case", NORM_CASES, ids=str)
every_dtype = pytest.mark.parametrize("dtypes", DTYPES, ids=str)


@every_op_with(VALUE_CASES, cols=COLS, dtypes=DTYPES, rows=ROWS)
def test_odd_sizes(
    case: OpCase, dtypes: Dtypes, rows: int, cols: int, device: torch.device
) -> None:
    assert_accurate(case, case.make_call((rows, cols), dtypes, device))


@every_op_with(VALUE_CASES, statistics=list(STATISTICS), dtypes=DTYPES)
def test_extreme_statistics(
    case: OpCase, dtypes: Dtypes, statistics: str, device: torch.device
) -> None:
    for cols in (3, 769):
        values = STATISTICS[statistics](9, cols)
        assert_accurate(case, case.make_call((9, cols), dtypes, device, values=values))


@every_norm
@every_dtype
def test_zero_tiny_and_negative_gamma(case: OpCase, dtypes: Dtypes, device: torch.device) -> None:
    call = case.make_call((9, 769), dtypes, device, gamma=awkward_gamma(769))
    assert_accurate(case, call)


@every_norm
@every_dtype
@pytest.mark.parametrize(
    ("weight", "bias"), [(True, True), (True, False), (False, True), (False, False)]
)
def test_optional_weight_and_bias(
    case: OpCase, dtypes: Dtypes, weight: bool, bias: bool, device: torch.device
) -> None:
    assert_accurate(case, case.make_call((9, 130), dtypes, device, weight=weight, bias=bias))


@every_op
@pytest.mark.parametrize("dtypes", [FLOAT32, BFLOAT16], ids=str)
@pytest.mark.parametrize(
    ("size", "normalized_dims"),
    [
        ((7,), 1),
        ((5, 7), 2),
        ((2, 3, 5, 7), 1),
        ((2, 3, 5, 7), 3),
        ((2, 3, 5, 7), 4),
        ((2, 1, 3, 1), 2),
        ((0, 3, 5), 2),
        ((3, 0, 5), 1),
    ],
)
def test_any_number_of_dimensions(
    case: OpCase,
    dtypes: Dtypes,
    size: tuple[int, ...],
    normalized_dims: int,
    device: torch.device,
) -> None:
    assert_accurate(case, case.make_call(size, dtypes, device, normalized_dims=normalized_dims))


@every_norm
@pytest.mark.parametrize("dtypes", [FLOAT32, BFLOAT16], ids=str)
@pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-2, 1.0])
def test_eps(case: OpCase, dtypes: Dtypes, eps: float, device: torch.device) -> None:
    call = case.make_call((9, 130), dtypes, device)
    assert_accurate(case, call.replace(eps=eps))


@every_norm
@every_dtype
@pytest.mark.parametrize("rows", [1, 31, 32, 33, 1000, 5000])
def test_weight_gradients_of_any_number_of_rows(
    case: OpCase, dtypes: Dtypes, rows: int, device: torch.device
) -> None:
    """Around the smallest part of the sum over rows, and where parts have more rows than that."""
    assert_accurate(case, case.make_call((rows, 5), dtypes, device))


@every_norm
def test_weight_gradients_are_summed_in_float32(case: OpCase, device: torch.device) -> None:
    """A bfloat16 sum of this many ones would stop at 256."""
    call = case.make_call((20000, 3), BFLOAT16, device)
    call = call.replace(grad_output=torch.ones_like(call.grad_output))
    assert_accurate(case, call)


@pytest.mark.parametrize("dtypes", [FLOAT32, FLOAT64], ids=str)
@pytest.mark.parametrize("statistics", ["mean 1e4 std 1", "constant rows", "one outlier"])
def test_long_rows(dtypes: Dtypes, statistics: str, device: torch.device) -> None:
    """A sum in one chain per vector lane would lose digits with the length of the row."""
    cols = 1_000_003
    values = STATISTICS[statistics](1, cols)
    for case in (NORM_CASES[0], RMS_NORM_CASES[0]):
        assert_accurate(case, case.make_call((1, cols), dtypes, device, values=values))


@every_norm
@every_dtype
@pytest.mark.parametrize("statistics", ["mean 100 std 1", "mean 1e4 std 1", "one outlier"])
def test_mean_and_rstd(case: OpCase, dtypes: Dtypes, statistics: str, device: torch.device) -> None:
    call = case.make_call((9, 769), dtypes, device, values=STATISTICS[statistics](9, 769))
    _, saved = case.forward(call)
    rounding = STATISTICS_ROUNDINGS * roundoff(sums_dtype(dtypes.tensor))
    statistics_of_rows = case.statistics(call)
    assert list(statistics_of_rows) == list(case.saved)
    for name, (exact, magnitude) in statistics_of_rows.items():
        value = saved[name]
        assert value.dtype == sums_dtype(dtypes.tensor)
        assert value.shape == exact.shape
        error = worst_error(value, exact, rounding * magnitude)
        assert error <= largest_error(dtypes.tensor)


@every_layer_norm
@every_dtype
@pytest.mark.parametrize("cols", COLS)
def test_constant_rows_normalize_to_exactly_zero(
    case: OpCase, dtypes: Dtypes, cols: int, device: torch.device
) -> None:
    """Their output is the bias, activated, in all its bits."""
    values = (random_normal(5, 1) * 1e3 + 1e4).repeat(1, cols)
    call = case.make_call((5, cols), dtypes, device, values=values)
    zero = call.replace(input=torch.zeros_like(call.input))
    assert torch.equal(case.memopt(call), case.memopt(zero))
    if case.approximate is None:
        assert call.bias is not None
        assert torch.equal(case.memopt(call), call.bias.to(dtypes.tensor).expand(5, cols))


@every_op
@pytest.mark.parametrize("dtypes", DTYPES[:3], ids=str)
def test_average_error_is_at_most_pytorchs(
    case: OpCase, dtypes: Dtypes, device: torch.device
) -> None:
    """Root mean square over many elements, where the luck of a single rounding does not count."""
    call = case.make_call((64, 1000), dtypes, device)
    exact, magnitude = exact_results(case, call), magnitudes(case, call)
    ours, torchs = evaluate(case.memopt, call), evaluate(case.torch, call)
    for name, reference in exact.items():
        if reference is not None:
            error = root_mean_square(ours[name].cpu() - reference)
            torchs_error = root_mean_square(torchs[name].cpu() - reference)
            rounding = roundoff(torch.float32) * root_mean_square(magnitude[name])
            assert error <= max(AVERAGE_ERROR_RATIO * torchs_error, rounding), name
