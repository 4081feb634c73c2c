"""Proves, of group_norm, instance_norm and batch_norm: results agree with a float64 oracle with an
error of at most PyTorch's or what the arithmetic costs, in both orders in memory and at odd sizes;
bits do not depend on threads, on the other samples or on alignment; the output is written again in
forward's bits; input and statistics are all that is kept, to the byte. (How they are called, and
what is refused: test_channel_norm_calls.py.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import memopt
from memopt.functional.activation import FORMULAS
from memopt.memory.saved import SavedTensors
from tests.recipes.support import scope
from tests.support.bits import assert_same_bits
from tests.support.cases import (
    BATCH_NORM_CASES,
    CHANNEL_NORM_ACTIVATION_CASES,
    CHANNEL_NORM_CASES,
    GROUP_NORM_CASES,
    evaluate,
)
from tests.support.cases.channel_norm import ChannelNormCase
from tests.support.oracle import assert_accurate
from tests.support.shapes import (
    BFLOAT16,
    DTYPES,
    FLOAT32,
    STATISTICS,
    Dtypes,
    awkward_gamma,
    channels_last,
    misaligned,
    random_normal,
)
from tests.support.tolerances import (
    STATISTICS_ROUNDINGS,
    largest_error,
    roundoff,
    sums_dtype,
    worst_error,
)

every_case = pytest.mark.parametrize("case", CHANNEL_NORM_CASES, ids=str)
with_an_activation_too = pytest.mark.parametrize(
    "case", [*CHANNEL_NORM_CASES, *CHANNEL_NORM_ACTIVATION_CASES], ids=str
)
every_dtype = pytest.mark.parametrize("dtypes", DTYPES, ids=str)
# A float64 result is off by no more digits than the oracle.
every_narrower_dtype = pytest.mark.parametrize("dtypes", DTYPES[:-1], ids=str)
float32_and_bfloat16 = pytest.mark.parametrize("dtypes", [FLOAT32, BFLOAT16], ids=str)

# Of one plane and of many, no multiple of a vector, shorter than one, of several parts.
SIZES = [
    (2, 6, 5, 7),
    (3, 4, 1, 1),
    (1, 4, 129),
    (2, 2, 20000),
    (2, 6, 2, 3, 5),
    (35, 12, 9),
    (3, 130, 7, 7),
    (0, 4, 3),
]


def takes(case: ChannelNormCase, size: tuple[int, ...]) -> bool:
    """Instance norm wants more than one value to a channel of each sample; PyTorch's, a sample."""
    return case.family != "instance_norm" or (size[2:] != (1, 1) and size[0] > 0)


@every_case
@pytest.mark.parametrize("activation", FORMULAS)
@float32_and_bfloat16
@pytest.mark.parametrize("layout", [torch.clone, channels_last])
def test_an_activation_behind_has_the_bits_of_the_two_ops(
    case: ChannelNormCase, activation: str, dtypes: Dtypes, layout: Callable, device: torch.device
) -> None:
    """Of small planes and large ones, of sets of one part and of many; all gradients, and those of
    weight and bias alone, where there is no gradient of the input to write to on the way.
    """
    case = dataclasses.replace(case, activation=activation)
    for size in ((3, 6, 5, 7), (2, 4, 70, 61), (2, 4, 8, 16)):
        call = case.make_call(size, dtypes, device).map_activations(layout)
        expected = evaluate(case.two_ops, call)
        assert_same_bits(evaluate(case.memopt, call), expected)
        leaves = call.leaves()
        frozen = leaves.replace(input=call.input)
        weights = torch.autograd.grad(
            case.memopt(frozen), [frozen.weight, frozen.bias], call.grad_output
        )
        assert_same_bits(list(weights), [expected["grad_weight"], expected["grad_bias"]])


@every_case
@pytest.mark.parametrize("activation", FORMULAS)
@float32_and_bfloat16
@pytest.mark.parametrize("layout", [torch.clone, channels_last])
def test_the_gradient_through_an_activation_has_the_activation_s_bits(
    case: ChannelNormCase, activation: str, dtypes: Dtypes, layout: Callable, device: torch.device
) -> None:
    """From the norm's input, without its output; of planes that are whole steps and that are not,
    in registers and through the cache.
    """
    fused = dataclasses.replace(case, activation=activation)
    for size in ((3, 6, 5, 7), (2, 4, 70, 61), (2, 4, 8, 16)):
        call = case.make_call(size, dtypes, device).map_activations(layout)
        outputs, saved = case.forward(call)
        expected, _ = torch.ops.memopt._activation_backward(
            call.grad_output, outputs["output"], **fused.behind
        )
        arguments, keywords = fused.gradient_arguments(call, saved)
        through = fused.gradient_op(*arguments, **keywords)
        assert_same_bits([through], [expected])
        assert through.stride() == outputs["output"].stride()


@every_case
@every_dtype
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_accurate(
    case: ChannelNormCase, dtypes: Dtypes, size: tuple[int, ...], device: torch.device
) -> None:
    if takes(case, size):
        call = case.make_call(size, dtypes, device)
        assert_accurate(case, call)
        if len(size) > 3:
            assert_accurate(case, call.map_activations(channels_last))


@pytest.mark.parametrize("case", BATCH_NORM_CASES, ids=str)
@every_dtype
@pytest.mark.parametrize("size", [(2, 1), (35, 12), (70, 130)], ids=str)
def test_batch_norm_of_rows(
    case: ChannelNormCase, dtypes: Dtypes, size: tuple[int, ...], device: torch.device
) -> None:
    assert_accurate(case, case.make_call(size, dtypes, device))


@every_case
@every_narrower_dtype
@pytest.mark.parametrize("statistics", list(STATISTICS))
def test_extreme_statistics(
    case: ChannelNormCase, dtypes: Dtypes, statistics: str, device: torch.device
) -> None:
    size = (3, 4, 70, 9)
    values = STATISTICS[statistics](
        1 if case.over_batch else 3 * 2, 7560 // (1, 6)[not case.over_batch]
    )
    call = case.make_call(size, dtypes, device, values=values, gamma=awkward_gamma(4))
    assert_accurate(case, call)
    assert_accurate(case, call.map_activations(channels_last))


@pytest.mark.parametrize("case", [*GROUP_NORM_CASES, BATCH_NORM_CASES[0]], ids=str)
@every_narrower_dtype
@pytest.mark.parametrize("layout", [torch.clone, channels_last])
def test_mean_and_rstd(
    case: ChannelNormCase, dtypes: Dtypes, layout: Callable, device: torch.device
) -> None:
    values = random_normal(2, 6, 70, 130) + 1e4
    call = case.make_call((2, 6, 70, 130), dtypes, device, values=values).map_activations(layout)
    _, saved = case.forward(call)
    rounding = STATISTICS_ROUNDINGS * roundoff(sums_dtype(dtypes.tensor))
    for name, (exact, magnitude) in case.statistics(call).items():
        assert saved[name].shape == exact.shape
        assert worst_error(saved[name], exact, rounding * magnitude) <= largest_error(dtypes.tensor)


@every_case
@float32_and_bfloat16
@pytest.mark.parametrize(("weight", "bias"), [(True, False), (False, True), (False, False)])
def test_without_weight_or_bias(
    case: ChannelNormCase, dtypes: Dtypes, weight: bool, bias: bool, device: torch.device
) -> None:
    call = case.make_call((3, 6, 4, 5), dtypes, device, weight=weight, bias=bias)
    assert_accurate(case, call)
    assert_accurate(case, call.map_activations(channels_last))


@pytest.mark.parametrize("groups", [1, 3, 6])
def test_any_number_of_groups(groups: int, device: torch.device) -> None:
    case = GROUP_NORM_CASES[0]
    call = case.make_call((3, 6, 4, 5), FLOAT32, device, groups=groups)
    assert_accurate(case, call)
    assert_accurate(case, call.map_activations(channels_last))


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "channels last": channels_last,
    "heads": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "sliced": lambda t: t.repeat_interleave(2, 1)[:, ::2],
    "sliced channels last": lambda t: channels_last(t.repeat_interleave(2, 1))[:, ::2],
    "misaligned": misaligned,
}


@every_case
@float32_and_bfloat16
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_change_no_value_and_results_have_pytorchs_strides(
    case: ChannelNormCase, dtypes: Dtypes, layout: str, device: torch.device
) -> None:
    """The order in memory decides about that of sums alone."""
    call = case.make_call((3, 6, 5, 7), dtypes, device)
    laid = call.map_activations(lambda t: LAYOUTS[layout](t) if t.dim() == 4 else t)
    ours, theirs = evaluate(case.memopt, laid), evaluate(case.torch, laid)
    if "last" in layout and case.family != "instance_norm":
        assert_accurate(case, laid)
    else:
        assert_same_bits(ours, evaluate(case.memopt, call))
    if device.type == "cpu":
        for name in ("output", "grad_input"):
            assert ours[name].stride() == theirs[name].stride(), name


@with_an_activation_too
@float32_and_bfloat16
@pytest.mark.parametrize("layout", [torch.clone, channels_last])
@pytest.mark.parametrize("size", [(1, 4, 300, 50), (8, 32, 20, 20)], ids=str)
def test_bits_do_not_depend_on_the_number_of_threads(
    case: ChannelNormCase,
    dtypes: Dtypes,
    layout: Callable,
    size: tuple[int, ...],
    restore_num_threads: None,
) -> None:
    """Few sets, computed stage by stage with threads, and many."""
    call = case.make_call(size, dtypes, torch.device("cpu")).map_activations(layout)
    torch.set_num_threads(1)
    expected = evaluate(case.memopt, call)
    for threads in (2, 3):
        torch.set_num_threads(threads)
        assert_same_bits(evaluate(case.memopt, call), expected)


@pytest.mark.parametrize("case", GROUP_NORM_CASES, ids=str)
@float32_and_bfloat16
@pytest.mark.parametrize("layout", [torch.clone, channels_last])
def test_a_sample_is_the_sample_alone(
    case: ChannelNormCase, dtypes: Dtypes, layout: Callable, device: torch.device
) -> None:
    call = case.make_call((5, 6, 40, 33), dtypes, device).map_activations(layout)
    whole = evaluate(case.memopt, call)
    alone = evaluate(case.memopt, call.map_activations(lambda t: layout(t[3:4])))
    for name in ("output", "grad_input"):
        assert torch.equal(alone[name], whole[name][3:4]), name


@with_an_activation_too
@every_dtype
@pytest.mark.parametrize("layout", [torch.clone, channels_last])
def test_the_output_is_written_again_in_the_same_bits(
    case: ChannelNormCase, dtypes: Dtypes, layout: Callable, device: torch.device
) -> None:
    for size in ((3, 6, 5, 7), (2, 4, 100, 90)):
        call = case.make_call(size, dtypes, device).map_activations(layout)
        outputs, saved = case.forward(call)
        again = case.output_again(call, saved)
        assert torch.equal(again, outputs["output"])
        assert again.stride() == outputs["output"].stride()


@with_an_activation_too
@every_dtype
def test_input_and_statistics_are_all_that_is_kept(
    case: ChannelNormCase, dtypes: Dtypes, device: torch.device
) -> None:
    call = case.make_call((3, 6, 5, 7), dtypes, device)
    leaves = call.leaves()
    with SavedTensors(exclude=leaves.weights.values()) as saved:
        output = case.memopt(leaves)
    output.backward(call.grad_output)
    assert saved.bytes == call.input.nbytes + case.statistics_bytes(call)


@with_an_activation_too
@pytest.mark.parametrize("layout", [torch.clone, channels_last])
def test_what_reads_the_output_keeps_nothing_inside_recipes(
    case: ChannelNormCase, layout: Callable, device: torch.device
) -> None:
    """norm -> SiLU -> convolution: the norm's input alone, and gradients in the same bits."""
    call = case.make_call((3, 6, 5, 7), FLOAT32, device).map_activations(layout)
    kernel = random_normal(4, 6, 3, 3, seed=9).to(device, torch.float32).requires_grad_()

    def gradients(recipes: bool) -> tuple[tuple[Tensor, ...], int]:
        leaves = call.leaves()
        wanted = [*leaves.differentiable.values(), kernel]
        with SavedTensors(exclude=[*leaves.weights.values(), kernel]) as saved, scope(recipes):
            loss = F.conv2d(memopt.functional.silu(case.memopt(leaves)), kernel).square().mean()
        return torch.autograd.grad(loss, wanted), saved.bytes

    (expected, without), (actual, kept) = gradients(False), gradients(True)
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)
    assert without - kept == 2 * call.input.nbytes
