"""Proves: all nine ops are well-formed dispatcher ops (torch.library.opcheck: schema, autograd
registration, meta kernels, AOTAutograd with static and dynamic shapes), nothing is computed or kept
that nobody asked for, and transforms that the ops do not support refuse by name.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.profiler import ProfilerActivity, profile

from tests.support.cases import GELU_CASES, NORM_CASES, OP_CASES, Call, OpCase, evaluate
from tests.support.record_ops import RecordOps
from tests.support.shapes import BFLOAT16, FLOAT32, LAYOUTS, Dtypes, make_call

every_op = pytest.mark.parametrize("case", OP_CASES, ids=str)
every_norm = pytest.mark.parametrize("case", NORM_CASES, ids=str)

OPCHECK_CALLS = {
    "float32": lambda case, device: make_call(case, (4, 10), FLOAT32, device),
    "bfloat16+float32": lambda case, device: make_call(
        case, (2, 3, 8), Dtypes(torch.bfloat16, torch.float32), device, normalized_dims=2
    ),
    "no parameters": lambda case, device: make_call(
        case, (4, 10), FLOAT32, device, weight=False, bias=False
    ),
    "no rows": lambda case, device: make_call(case, (0, 10), FLOAT32, device),
    "strided": lambda case, device: make_call(case, (4, 6, 10), FLOAT32, device).map(
        lambda t: LAYOUTS["transposed and sliced"](t) if t.dim() == 3 else t
    ),
}
every_opcheck_call = pytest.mark.parametrize("make", OPCHECK_CALLS.values(), ids=OPCHECK_CALLS)


@every_op
@every_opcheck_call
@pytest.mark.parametrize("requires_grad", [True, False])
def test_opcheck_of_the_public_op(
    case: OpCase, make, requires_grad: bool, device: torch.device
) -> None:
    call = make(case, device)
    arguments, keywords = case.forward_arguments(call.leaves() if requires_grad else call)
    torch.library.opcheck(case.dispatcher_op(), arguments, keywords)


@every_op
@every_opcheck_call
def test_opcheck_of_the_forward_op(case: OpCase, make, device: torch.device) -> None:
    arguments, keywords = case.forward_arguments(make(case, device))
    torch.library.opcheck(case.dispatcher_op("forward"), arguments, keywords)


@every_op
@every_opcheck_call
@pytest.mark.parametrize("recompute_output", [True, False])
def test_opcheck_of_the_backward_op(
    case: OpCase, make, recompute_output: bool, device: torch.device
) -> None:
    call = make(case, device)
    _, statistics = case.forward(call)
    masks = [None, (False, True, False), (True, False, False)] if case.normalizes else [None]
    for mask in masks:
        arguments, keywords = case.backward_arguments(call, statistics, mask, recompute_output)
        torch.library.opcheck(case.dispatcher_op("backward"), arguments, keywords)


@every_op
@pytest.mark.parametrize("layout", LAYOUTS)
def test_meta_gives_the_sizes_strides_and_dtypes_of_the_real_thing(
    case: OpCase, layout: str, device: torch.device
) -> None:
    call = make_call(case, (6, 10, 129), BFLOAT16, device)
    call = dataclasses.replace(
        call,
        input=LAYOUTS[layout](call.input),
        grad_output=LAYOUTS[layout](call.grad_output),
    )
    real = evaluate(case.memopt, call)
    with FakeTensorMode() as mode:
        fake = evaluate(case.memopt, call.map(mode.from_tensor))
    for name, expected in real._asdict().items():
        if expected is None:
            assert getattr(fake, name) is None
            continue
        actual = getattr(fake, name)
        assert actual.shape == expected.shape, name
        assert actual.stride() == expected.stride(), name
        assert actual.dtype == expected.dtype, name
        assert actual.device == expected.device, name


@every_op
def test_meta_tensors_run_without_memory(case: OpCase) -> None:
    """More elements than any machine has memory for."""
    call = make_call(case, (1, 8), FLOAT32, torch.device("meta"))
    huge = call.input.expand(1 << 50, 8)
    call = dataclasses.replace(call, input=huge, grad_output=huge)
    results = evaluate(case.memopt, call)
    assert results.output.shape == huge.shape
    assert results.output.device.type == "meta"
    assert results.grad_input.shape == huge.shape


@every_op
@pytest.mark.parametrize("grad", [True, False])
def test_statistics_are_computed_only_for_a_backward(
    case: OpCase, grad: bool, device: torch.device
) -> None:
    call = make_call(case, (9, 130), FLOAT32, device)
    leaves = call.leaves()
    with RecordOps() as ops:
        case.memopt(leaves if grad else call)
        with torch.no_grad():
            case.memopt(leaves)
    expected = case.dispatcher_op("forward") if grad else case.dispatcher_op()
    assert ops.ops == [expected, case.dispatcher_op()]


@every_op
def test_without_grad_only_the_output_is_allocated(case: OpCase) -> None:
    call = make_call(case, (9, 130), FLOAT32, torch.device("cpu"))
    case.memopt(call)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        output = case.memopt(call)
    events = profiled.profiler.kineto_results.events()
    allocated = [e.nbytes() for e in events if e.name() == "[memory]" and e.nbytes() > 0]
    assert allocated == [output.nbytes]


@every_op
def test_no_op_writes_to_its_arguments(case: OpCase, device: torch.device) -> None:
    call = make_call(case, (9, 130), FLOAT32, device)
    copy = call.map(torch.Tensor.clone)
    _, statistics = case.forward(call)
    case.backward(call, statistics, recompute_output=True)
    for name in ("input", "weight", "bias", "grad_output"):
        if getattr(call, name) is not None:
            assert torch.equal(getattr(call, name), getattr(copy, name)), name


@every_op
def test_private_ops_refuse_to_be_differentiated(case: OpCase, device: torch.device) -> None:
    """They have no derivative of their own: a clear error, not a silent constant."""
    leaves = make_call(case, (4, 10), FLOAT32, device).leaves()
    output, _ = case.forward(leaves)
    with pytest.raises(RuntimeError, match=f"_{case.family}_forward.*not implemented"):
        output.sum().backward()


@every_op
def test_output_is_a_fresh_tensor(case: OpCase, device: torch.device) -> None:
    """Never an alias of the input: in-place ops on the output leave the input alone."""
    leaves = make_call(case, (4, 10), FLOAT32, device).leaves()
    before = leaves.input.detach().clone()
    output = case.memopt(leaves)
    assert not output._is_view()
    output.mul_(2)
    output.sum().backward()
    assert torch.equal(leaves.input.detach(), before)


@every_op
def test_inference_mode(case: OpCase, device: torch.device) -> None:
    call = make_call(case, (4, 10), FLOAT32, device)
    expected = case.memopt(call)
    with torch.inference_mode():
        output = case.memopt(call)
    assert output.is_inference()
    assert torch.equal(output, expected)


@every_op
def test_tensor_subclass_is_kept(case: OpCase, device: torch.device) -> None:
    class Named(torch.Tensor):
        pass

    call = make_call(case, (4, 10), FLOAT32, device)
    named = dataclasses.replace(call, input=call.input.as_subclass(Named))
    output = case.memopt(named)
    assert type(output) is Named
    assert torch.equal(output.as_subclass(torch.Tensor), case.memopt(call))


def _tangent_of(function, call: Call) -> None:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(call.input, torch.ones_like(call.input))
        function(dataclasses.replace(call, input=dual))


@every_op
@pytest.mark.parametrize("grad", [True, False])
def test_forward_mode_is_refused(case: OpCase, grad: bool, device: torch.device) -> None:
    """Forward-mode derivatives are not supported; they are never dropped in silence, also not under
    no_grad.
    """
    call = make_call(case, (4, 10), FLOAT32, device)
    with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match="jvp"):
        _tangent_of(case.memopt, call)


@every_op
def test_functorch_grad_is_refused(case: OpCase, device: torch.device) -> None:
    call = make_call(case, (4, 10), FLOAT32, device)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return case.memopt(dataclasses.replace(call, input=x)).sum()

    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.grad(loss)(call.input)


@every_op
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_equals_a_loop(case: OpCase, device: torch.device) -> None:
    call = make_call(case, (4, 3, 10), FLOAT32, device)

    def one(x: torch.Tensor) -> torch.Tensor:
        return case.memopt(dataclasses.replace(call, input=x))

    assert torch.equal(torch.vmap(one)(call.input), case.memopt(call))


@pytest.mark.parametrize("case", GELU_CASES + NORM_CASES[:2], ids=str)
def test_defaults_of_the_public_schema(case: OpCase, device: torch.device) -> None:
    """Called with required arguments alone, the op is PyTorch's with its defaults."""
    call = make_call(case, (4, 10), FLOAT32, device, weight=False, bias=False)
    required = (call.input, call.normalized_shape) if case.normalizes else (call.input,)
    keywords = {"approximate": "none"} if case.approximate is not None else {}
    op = case.dispatcher_op()
    assert torch.equal(op(*required), op(*required, **keywords))
    if case.normalizes:
        assert torch.equal(op(*required), op(*required, None, None, 1e-5))
