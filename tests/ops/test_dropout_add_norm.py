"""Proves what is particular to dropout_add_layer_norm and dropout_add_rms_norm: the sum is that of
the unrounded product with dropout's mask, and the output its norm, in bits; each output's gradient
and each argument's may be missing; p = 0 and eval are the op without dropout; nothing but the sum
is kept, and an in-place write to it is noticed.
"""

from __future__ import annotations

import itertools
import math
import re

import pytest
import torch
from torch import Tensor

import memopt
from tests.support.cases import ALL_DROPOUT_ADD_NORM_CASES, Call, evaluate
from tests.support.cases.dropout import DropoutAddNormCase, keep_scales
from tests.support.record_ops import RecordOps
from tests.support.shapes import BFLOAT16, DTYPES, FLOAT32, LAYOUTS, Dtypes
from tests.support.tolerances import roundoff

ops = torch.ops.memopt
every_case = pytest.mark.parametrize("case", ALL_DROPOUT_ADD_NORM_CASES, ids=str)
every_dtype = pytest.mark.parametrize("dtypes", DTYPES, ids=str)
every_p = pytest.mark.parametrize("p", [0.1, 0.5, 0.9])


def without_dropout(case: DropoutAddNormCase, call: Call) -> tuple[Tensor, Tensor]:
    """add_layer_norm or add_rms_norm."""
    (x, residual, _, *rest), keywords = case.arguments(call)
    function = getattr(memopt.functional, case.family.removeprefix("dropout_"))
    return function(x, residual, *rest, **keywords)


def expected_sum(case: DropoutAddNormCase, call: Call) -> Tensor:
    """Of float64 the product is rounded here too: PyTorch has no fused multiply-add."""
    return case.rounded_sum(call).to(call.input.dtype)


@every_case
@every_dtype
@every_p
@pytest.mark.parametrize("layout", [None, *LAYOUTS])
def test_the_sum_is_rounded_once_and_the_output_is_its_norm(
    case: DropoutAddNormCase, dtypes: Dtypes, p: float, layout: str | None, device: torch.device
) -> None:
    for cols in (3, 129, 768):
        call = case.make_call((6, cols), dtypes, device).replace(p=p)
        if layout is not None:
            call = call.map_activations(LAYOUTS[layout])
        output, total = case.memopt(call)
        if dtypes.tensor == torch.float64:
            torch.testing.assert_close(total, expected_sum(case, call), rtol=1e-15, atol=1e-15)
        else:
            assert torch.equal(total, expected_sum(case, call))
        assert torch.equal(output, case.norm.memopt(case._norm_call(call, total)))
        assert total.stride() == (call.input + call.residual).stride()
        assert output.is_contiguous()


@pytest.mark.slow
@every_case
def test_large_tensors_are_stored_past_the_caches(case: DropoutAddNormCase) -> None:
    """More than the last-level cache holds, so the sum waits beside the output row."""
    call = case.make_call((3000, 8192), BFLOAT16, torch.device("cpu"))
    outputs, saved = case.forward(call)
    results = case.backward(call, saved)
    rows = slice(2990, 3000)
    scales = keep_scales(call, torch.float32)
    dropped = call.input.float() * scales
    total = (dropped + call.residual.float()).bfloat16()
    assert torch.equal(outputs["sum"], total)
    some = case._norm_call(call, total).map_activations(lambda t: t[rows].clone())
    assert torch.equal(outputs["output"][rows], case.norm.memopt(some))
    assert torch.equal(results["grad_input"], (results["grad_residual"] * scales.bfloat16()))


@every_case
@every_dtype
def test_gradients_of_the_addends(
    case: DropoutAddNormCase, dtypes: Dtypes, device: torch.device
) -> None:
    """Residual's is add_norm's at the sum, in bits; input's is that times the mask: by 2 and 0 in
    bits. So are the weights'.
    """
    for grad_sum in (True, False):
        call = case.make_call((67, 130), dtypes, device)
        if not grad_sum:
            call = call.replace(grad_sum=None)
        ours = evaluate(case.memopt, call)
        zero = torch.zeros_like(call.input)
        plain = evaluate(
            lambda c: without_dropout(case, c), call.replace(input=zero, residual=ours["sum"])
        )
        for name in ("grad_residual", *(f"grad_{name}" for name in case.parameters)):
            assert torch.equal(ours[name], plain[name]), name
        expected = ours.grad_residual * keep_scales(call, dtypes.tensor)
        # Below the normal numbers the residual's has lost a digit that input's keeps.
        tiny = torch.finfo(dtypes.tensor).smallest_normal
        lost = expected.abs() < 2 * tiny
        assert torch.equal(ours.grad_input[~lost], expected[~lost])
        assert (ours.grad_input - expected)[lost].abs().le(tiny * roundoff(dtypes.tensor) * 4).all()


@every_case
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_inputs_gradient_is_rounded_once(
    case: DropoutAddNormCase, dtype: torch.dtype, device: torch.device
) -> None:
    """It is closer to the exact one than residual's, rounded, times the scale, rounded again."""
    call = case.make_call((67, 769), Dtypes(dtype, dtype), device).replace(p=0.1)
    _, saved = case.forward(call)
    results = case.backward(call, saved)
    wide = call.map(torch.Tensor.double)
    wide_saved = {k: v if k == "rng_state" else v.double() for k, v in saved.items()}
    exact = case.backward(wide, wide_saved)["grad_input"]
    twice = (results["grad_residual"].float() * keep_scales(call, torch.float32)).to(dtype)
    error = (results["grad_input"].double() - exact).square().mean()
    assert error < 0.9 * (twice.double() - exact).square().mean()


@every_case
def test_gradient_of_the_sum_alone_passes_through_the_mask(
    case: DropoutAddNormCase, device: torch.device
) -> None:
    """No kernel of the norm runs, and the parameters get no gradient."""
    call = case.make_call((6, 130), FLOAT32, device)
    leaves = call.leaves()
    _, total = case.memopt(leaves)
    with RecordOps() as record:
        grads = torch.autograd.grad(
            total, list(leaves.given.values()), call.grad_sum, allow_unused=True
        )
    assert torch.equal(grads[0], call.grad_sum * keep_scales(call, torch.float32))
    assert torch.equal(grads[1], call.grad_sum)
    assert all(grad is None for grad in grads[2:])
    assert case.backward_op not in record.ops
    assert record.ops.count(ops._dropout_backward.default) == 1


@every_case
def test_any_subset_of_arguments(case: DropoutAddNormCase, device: torch.device) -> None:
    """What is asked for has the bits that it has when all is, and nothing else is computed."""
    call = case.make_call((6, 130), FLOAT32, device)
    expected = evaluate(case.memopt, call)
    for wanted in itertools.product((True, False), repeat=len(case.masked)):
        if not any(wanted):
            continue
        some = call.map(torch.clone)
        names = [name for name, one in zip(case.masked, wanted, strict=True) if one]
        for name in names:
            getattr(some, name).requires_grad_()
        outputs = case.memopt(some)
        with RecordOps() as record:
            sum_too = outputs[1].requires_grad  # not where a parameter alone is trained
            grads = [call.grad_output, call.grad_sum] if sum_too else [call.grad_output]
            torch.autograd.backward(outputs[: len(grads)], grads)
        (arguments,) = record.arguments_of(case.backward_op)
        mask = (*wanted, False)[:4]  # RMSNorm has no bias
        assert tuple(map(bool, arguments["output_mask"])) == mask
        for name in case.masked:
            gradient = getattr(some, name).grad
            if name in names:
                assert torch.equal(gradient, expected[f"grad_{name}"]), name
            else:
                assert gradient is None, name


@every_case
@every_dtype
def test_p_of_zero_and_eval_are_the_op_without_dropout(
    case: DropoutAddNormCase, dtypes: Dtypes, device: torch.device
) -> None:
    """That op itself, and nothing is drawn; the op with p = 0 has its bits."""
    call = case.make_call((6, 130), dtypes, device)
    expected = without_dropout(case, call)
    function = getattr(memopt.functional, case.family)
    plain = ops._norm_forward.default
    before = torch.get_rng_state()
    for p, training in ((0.0, True), (0.5, False), (1.0, False)):
        arguments, keywords = case.arguments(call.replace(p=p))
        with RecordOps() as record:
            outputs = function(*arguments, training=training, **keywords)
        assert record.ops == [plain]
        for output, reference in zip(outputs, expected, strict=True):
            assert torch.equal(output, reference)
    assert torch.equal(torch.get_rng_state(), before)
    arguments, keywords = case.arguments(call.replace(p=0.0))
    for output, reference in zip(case.public_op(*arguments, **keywords), expected, strict=True):
        assert torch.equal(output, reference)


@every_case
def test_p_of_one_leaves_the_residual(case: DropoutAddNormCase, device: torch.device) -> None:
    call = case.make_call((6, 130), FLOAT32, device).replace(p=1.0)
    results = evaluate(case.memopt, call)
    assert torch.equal(results["sum"], call.residual)
    assert not results.grad_input.any()
    assert results.grad_residual.any()
    call.input[2, 3] = math.inf
    _, total = case.memopt(call)
    assert total[2].isnan().sum() == 1


@every_case
def test_a_state_that_is_given_is_applied_and_none_returned(
    case: DropoutAddNormCase, device: torch.device
) -> None:
    call = case.make_call((6, 130), BFLOAT16, device)
    outputs, saved = case.forward(call)
    before = torch.get_rng_state()
    (x, residual, _, *rest), keywords = case.forward_arguments(call)
    again = case.forward_op(x, residual, saved["rng_state"], *rest, **keywords)
    assert torch.equal(again[0], outputs["output"])
    assert torch.equal(again[1], outputs["sum"])
    assert again[-1] is None
    assert torch.equal(torch.get_rng_state(), before)


@every_case
@pytest.mark.parametrize("p", [-0.1, 1.1, math.nan])
def test_bad_p_is_named(case: DropoutAddNormCase, p: float, device: torch.device) -> None:
    call = case.make_call((4, 8), FLOAT32, device)
    _, saved = case.forward(call)
    call = call.replace(p=p)
    rule = "p must be between 0 and 1, got "
    arguments, keywords = case.arguments(call)
    function = getattr(memopt.functional, case.family)
    for training in (True, False):
        with pytest.raises(ValueError, match=f"{case.family}: {rule}"):
            function(*arguments, training=training, **keywords)
    for op, make in (
        (case.public_op, case.arguments),
        (case.forward_op, case.forward_arguments),
    ):
        arguments, keywords = make(call)
        with pytest.raises(ValueError, match=f"{case.family}: {rule}"):
            op(*arguments, **keywords)
    arguments, keywords = case.backward_arguments(call, saved)
    with pytest.raises(ValueError, match=f"{case.family} backward: {rule}"):
        case.backward_op(*arguments, **keywords)


@every_case
@pytest.mark.parametrize(
    ("state", "rule"),
    [
        (torch.zeros(2), "rng_state must be an int64 tensor [seed, offset]"),
        (torch.zeros(3).long(), "rng_state must be an int64 tensor [seed, offset]"),
        (torch.zeros(2, device="meta").long(), "rng_state must be on {}'s device cpu, got meta"),
    ],
)
def test_bad_state_is_named(case: DropoutAddNormCase, state: Tensor, rule: str) -> None:
    call = case.make_call((4, 8), FLOAT32, torch.device("cpu"))
    _, saved = case.forward(call)
    (x, residual, _, *rest), keywords = case.forward_arguments(call)
    message = re.escape(f"{case.family}: {rule.format('input')}")
    with pytest.raises(RuntimeError, match=message):
        case.forward_op(x, residual, state, *rest, **keywords)
    arguments, keywords = case.backward_arguments(call, {**saved, "rng_state": state})
    message = re.escape(f"{case.family} backward: {rule.format('sum')}")
    with pytest.raises(RuntimeError, match=message):
        case.backward_op(*arguments, **keywords)


def test_a_pre_ln_model_trains_as_with_single_ops(device: torch.device) -> None:
    """Three layers that pass the sum on, in float32, each with a mask of its own."""
    torch.manual_seed(0)
    linears = [torch.nn.Linear(48, 48, device=device) for _ in range(3)]
    norm = torch.nn.LayerNorm(48, device=device)
    x = torch.randn(10, 48, device=device)

    def gradients(fused: bool) -> list[torch.Tensor]:
        torch.manual_seed(1)
        stream, branch = x, x
        for linear in linears:
            branch = linear(branch)
            if fused:
                branch, stream = memopt.functional.dropout_add_layer_norm(
                    branch, stream, 0.2, (48,), norm.weight, norm.bias
                )
            else:
                stream = stream + memopt.functional.dropout(branch, 0.2)
                branch = memopt.functional.layer_norm(stream, (48,), norm.weight, norm.bias)
        loss = (stream * branch).sum()
        parameters = [p for linear in linears for p in linear.parameters()]
        return list(torch.autograd.grad(loss, [*parameters, norm.weight, norm.bias]))

    for ours, expected in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
