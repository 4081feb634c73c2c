"""Proves what is particular to add_layer_norm and add_rms_norm: both outputs are, in bits, the
addition and the norm one after the other; each output's gradient may be missing; the sum's gradient
is added before rounding; nothing but the sum is kept, and an in-place write to it is noticed.
"""

from __future__ import annotations

import re

import pytest
import torch

import memopt
from memopt.memory.saved import SavedTensors
from tests.support.cases import ADD_NORM_CASES, ALL_DROPOUT_ADD_NORM_CASES, Call, OpCase, evaluate
from tests.support.record_ops import RecordOps
from tests.support.shapes import BFLOAT16, DTYPES, FLOAT32, FLOAT64, LAYOUTS, Dtypes
from tests.support.tolerances import root_mean_square

every_case = pytest.mark.parametrize("case", ADD_NORM_CASES, ids=str)
with_dropout_too = pytest.mark.parametrize(
    "case", [*ADD_NORM_CASES, *ALL_DROPOUT_ADD_NORM_CASES], ids=str
)
every_dtype = pytest.mark.parametrize("dtypes", DTYPES, ids=str)


def in_two_steps(case: OpCase, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """PyTorch's addition and memopt's norm."""
    total = call.input + call.residual
    return case.norm.memopt(case._norm_call(call, total)), total


@every_case
@every_dtype
@pytest.mark.parametrize("layout", [None, *LAYOUTS])
def test_outputs_have_the_bits_of_the_two_steps(
    case: OpCase, dtypes: Dtypes, layout: str | None, device: torch.device
) -> None:
    for cols in (3, 129, 768):
        call = case.make_call((6, cols), dtypes, device)
        if layout is not None:
            call = call.map_activations(LAYOUTS[layout])
        for ours, expected in zip(case.memopt(call), in_two_steps(case, call), strict=True):
            assert torch.equal(ours, expected)
            assert ours.stride() == expected.stride()


@pytest.mark.slow
@every_case
def test_large_tensors_are_stored_past_the_caches(case: OpCase) -> None:
    """More than the last-level cache holds, so the sum waits beside the output row."""
    call = case.make_call((3000, 8192), BFLOAT16, torch.device("cpu"))
    with torch.no_grad():
        for ours, expected in zip(case.memopt(call), in_two_steps(case, call), strict=True):
            assert torch.equal(ours, expected)


@every_case
@every_dtype
def test_float32_gradients_have_the_bits_of_the_two_steps(
    case: OpCase, dtypes: Dtypes, device: torch.device
) -> None:
    """In 16-bit types one rounding less: the error is smaller."""
    call = case.make_call((67, 769), dtypes, device)
    ours = evaluate(case.memopt, call)
    apart = evaluate(lambda c: in_two_steps(case, c), call)
    for name in (f"grad_{name}" for name in case.parameters):
        assert torch.equal(ours[name], apart[name]), name
    assert torch.equal(ours.grad_input, ours.grad_residual)
    if dtypes.tensor.itemsize >= 4:
        assert torch.equal(ours.grad_input, apart.grad_input)
        return
    wide = call.map(torch.Tensor.double)
    exact = evaluate(case.exact, wide).grad_input
    error = root_mean_square(ours.grad_input.double() - exact)
    assert error < root_mean_square(apart.grad_input.double() - exact)


@every_case
@every_dtype
def test_gradient_of_the_output_alone_is_the_norms(
    case: OpCase, dtypes: Dtypes, device: torch.device
) -> None:
    call = case.make_call((67, 130), dtypes, device).replace(grad_sum=None)
    ours = evaluate(case.memopt, call)
    apart = evaluate(lambda c: in_two_steps(case, c), call)
    for name, expected in apart.items():
        assert torch.equal(ours[name], expected), name


@every_case
def test_gradient_of_the_sum_alone_passes_through(case: OpCase, device: torch.device) -> None:
    """No kernel runs, and the parameters get no gradient."""
    call = case.make_call((6, 130), FLOAT32, device)
    leaves = call.leaves()
    _, total = case.memopt(leaves)
    with RecordOps() as ops:
        grads = torch.autograd.grad(
            total, list(leaves.given.values()), call.grad_sum, allow_unused=True
        )
    assert torch.equal(grads[0], call.grad_sum)
    assert torch.equal(grads[1], call.grad_sum)
    assert all(grad is None for grad in grads[2:])
    assert case.backward_op not in ops.ops


@every_case
def test_gradients_of_one_addend(case: OpCase, device: torch.device) -> None:
    call = case.make_call((6, 130), FLOAT32, device)
    expected = evaluate(case.memopt, call).grad_input
    for name in ("input", "residual"):
        leaf = getattr(call, name).detach().requires_grad_()
        outputs = case.memopt(call.replace(**{name: leaf}))
        torch.autograd.backward(outputs, [call.grad_output, call.grad_sum])
        assert torch.equal(leaf.grad, expected)


@every_case
def test_frozen_addends_leave_the_weight_gradient(case: OpCase, device: torch.device) -> None:
    call = case.make_call((6, 130), FLOAT32, device)
    expected = evaluate(case.memopt, call).grad_weight
    weight = call.weight.detach().requires_grad_()
    output, total = case.memopt(call.replace(weight=weight))
    assert not total.requires_grad  # no function of the weight
    output.backward(call.grad_output)
    assert torch.equal(weight.grad, expected)


@every_case
def test_one_tensor_as_both_addends(case: OpCase, device: torch.device) -> None:
    call = case.make_call((6, 130), FLOAT32, device)
    leaf = call.input.detach().requires_grad_()
    both = call.replace(input=leaf, residual=leaf)
    outputs = case.memopt(both)
    torch.autograd.backward(outputs, [call.grad_output, call.grad_sum])
    gradient = leaf.grad
    leaf.grad = None
    torch.autograd.backward(in_two_steps(case, both), [call.grad_output, call.grad_sum])
    assert torch.equal(gradient, leaf.grad)


@with_dropout_too
def test_only_the_sum_is_kept(case: OpCase, device: torch.device) -> None:
    leaves = case.make_call((67, 130), BFLOAT16, device).leaves()
    with SavedTensors(exclude=leaves.weights.values()) as saved:
        _, total = case.memopt(leaves)
    of_input_size = {t.data_ptr() for t in saved.tensors if t.numel() == leaves.input.numel()}
    assert of_input_size == {total.data_ptr()}


@every_case
def test_a_residual_stream_keeps_each_sum_once(case: OpCase, device: torch.device) -> None:
    """What one layer saves is what it hands on: 2 bytes an element and layer, and statistics."""
    leaves = case.make_call((67, 130), BFLOAT16, device).leaves()
    layers = 3
    with SavedTensors(exclude=leaves.weights.values()) as saved:
        stream = leaves.residual
        for _ in range(layers):
            _, stream = case.memopt(leaves.replace(residual=stream))
    assert saved.bytes == layers * (67 * 130 * 2 + case.statistics_bytes(leaves))


@with_dropout_too
def test_write_to_the_sum_is_noticed_in_backward(case: OpCase, device: torch.device) -> None:
    output, total = case.memopt(case.make_call((6, 130), FLOAT32, device).leaves())
    total.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@with_dropout_too
@pytest.mark.parametrize("used", ["output", "sum", "both"])
def test_second_derivatives(case: OpCase, used: str, device: torch.device) -> None:
    call = case.make_call((3, 5), FLOAT64, device).leaves()

    def outputs(*tensors: torch.Tensor):
        named = dict(zip(call.given, tensors, strict=True))
        output, total = case.memopt(call.replace(**named))
        return {"output": output, "sum": total.square(), "both": output * total}[used]

    assert torch.autograd.gradcheck(outputs, tuple(call.given.values()))
    assert torch.autograd.gradgradcheck(outputs, tuple(call.given.values()))


@with_dropout_too
@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda t: t[:3], "residual must have input's shape [4, 8], got [3, 8]"),
        (lambda t: t[:1], "residual must have input's shape [4, 8], got [1, 8]"),
        (lambda t: t.bfloat16(), "residual must have input's dtype Float, got BFloat16"),
        (lambda t: t.to_sparse(), "residual must be a dense (strided) tensor, got layout Sparse"),
        (lambda t: t.to("meta"), "residual must be on input's device cpu, got meta"),
    ],
)
def test_residual_unlike_the_input_is_refused(case: OpCase, change, rule: str) -> None:
    call = case.make_call((4, 8), FLOAT32, torch.device("cpu"))
    call = call.replace(residual=change(call.residual))
    for op, (arguments, keywords) in (
        (case.public_op, case.public_arguments(call)),
        (case.forward_op, case.forward_arguments(call)),
    ):
        if call.residual is None and op is case.forward_op:
            continue  # which is then that of the norm without a residual
        with pytest.raises(RuntimeError, match=re.escape(f"{case.family}: {rule}")):
            op(*arguments, **keywords)


@every_case
def test_float32_residual_stream_under_autocast_stays(case: OpCase, device: torch.device) -> None:
    """A 16-bit branch is added to it in float32, as by PyTorch's addition."""
    call = case.make_call((4, 8), FLOAT32, device)
    branch = call.input.bfloat16()
    expected = case.memopt(call.replace(input=branch.float()))
    with torch.autocast(device.type, torch.bfloat16):
        outputs = case.memopt(call.replace(input=branch))
    for output, same in zip(outputs, expected, strict=True):
        assert output.dtype == torch.float32
        assert torch.equal(output, same)


def test_a_pre_ln_model_trains_as_with_single_ops(device: torch.device) -> None:
    """Three layers that pass the sum on, in float32: the same bits everywhere."""
    torch.manual_seed(0)
    linears = [torch.nn.Linear(48, 48, device=device) for _ in range(3)]
    norm = torch.nn.LayerNorm(48, device=device)
    x = torch.randn(10, 48, device=device)

    def gradients(fused: bool) -> list[torch.Tensor]:
        stream, branch = x, x
        for linear in linears:
            branch = linear(branch)
            if fused:
                branch, stream = memopt.functional.add_layer_norm(
                    branch, stream, (48,), norm.weight, norm.bias
                )
            else:
                stream = stream + branch
                branch = memopt.functional.layer_norm(stream, (48,), norm.weight, norm.bias)
        loss = (stream * branch).sum()
        parameters = [p for linear in linears for p in linear.parameters()]
        return list(torch.autograd.grad(loss, [*parameters, norm.weight, norm.bias]))

    for ours, expected in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
