"""Proves: all ops, public and private, are well-formed dispatcher ops (torch.library.opcheck:
schema, autograd registration, meta kernels, AOTAutograd with static and dynamic shapes), nothing is
computed or kept that was not asked for, and transforms that the ops do not support raise an error.
"""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.profiler import ProfilerActivity, profile

import memopt
from tests.support.cases import (
    CHANNEL_NORM_CASES,
    EACH_OP,
    GELU_CASES,
    NORM_CASES,
    OP_CASES,
    Call,
    OpCase,
    as_tuple,
    evaluate,
)
from tests.support.opchecks import opcheck
from tests.support.record_ops import RecordOps
from tests.support.shapes import BFLOAT16, FLOAT32, LAYOUTS, Dtypes

every_op = pytest.mark.parametrize("case", OP_CASES, ids=str)
every_norm = pytest.mark.parametrize("case", NORM_CASES, ids=str)

BFLOAT16_WITH_FLOAT32 = Dtypes(torch.bfloat16, torch.float32)
OPCHECK_CALLS = {
    "float32": lambda case, device: case.make_call((4, 10), FLOAT32, device),
    "bfloat16+float32": lambda case, device: case.make_call(
        (2, 3, 8), BFLOAT16_WITH_FLOAT32, device, normalized_dims=2
    ),
    "no parameters": lambda case, device: case.make_call(
        (4, 10), FLOAT32, device, weight=False, bias=False
    ),
    "no rows": lambda case, device: case.make_call((0, 10), FLOAT32, device),
    "strided": lambda case, device: case.make_call((4, 6, 10), FLOAT32, device).map(
        lambda t: LAYOUTS["transposed and sliced"](t) if t.dim() == 3 else t
    ),
}
# An op's further cases differ in a keyword: for them one of the calls.
every_opcheck = pytest.mark.parametrize(
    ("case", "make"),
    [
        pytest.param(case, make, id=f"{name}-{case}")
        for case in OP_CASES
        for name, make in OPCHECK_CALLS.items()
        if case in EACH_OP or name == "float32"
    ],
)
each_op = pytest.mark.parametrize("case", EACH_OP, ids=str)


def opcheck_public(case: OpCase, call: Call) -> None:
    opcheck(case.public_op, *case.public_arguments(call), random=case.random)


@every_opcheck
def test_opcheck_of_the_public_op(case: OpCase, make, device: torch.device) -> None:
    opcheck_public(case, make(case, device).leaves())


@each_op
def test_opcheck_of_the_public_op_without_gradients(case: OpCase, device: torch.device) -> None:
    opcheck_public(case, case.make_call((4, 10), FLOAT32, device))


@every_opcheck
def test_opcheck_of_the_forward_op(case: OpCase, make, device: torch.device) -> None:
    arguments, keywords = case.forward_arguments(make(case, device))
    torch.library.opcheck(case.forward_op, arguments, keywords)


# Which results are asked for changes what an op returns, not how it is traced.
OF_RESULTS = ("test_schema", "test_faketensor")


@every_opcheck
def test_opcheck_of_the_backward_op(case: OpCase, make, device: torch.device) -> None:
    call = make(case, device)
    _, saved = case.forward(call)
    arguments, keywords = case.backward_arguments(call, saved, None, True)
    torch.library.opcheck(case.backward_op, arguments, keywords)
    single = [tuple(name == one for name in case.masked) for one in case.masked]
    for mask in single[:2]:
        arguments, keywords = case.backward_arguments(call, saved, mask, True)
        torch.library.opcheck(case.backward_op, arguments, keywords, test_utils=OF_RESULTS)


@each_op
def test_opcheck_of_the_backward_op_without_the_output(case: OpCase, device: torch.device) -> None:
    call = case.make_call((4, 10), FLOAT32, device)
    _, saved = case.forward(call)
    arguments, keywords = case.backward_arguments(call, saved, None, False)
    torch.library.opcheck(case.backward_op, arguments, keywords)


@every_op
@pytest.mark.parametrize("layout", LAYOUTS)
def test_meta_gives_the_sizes_strides_and_dtypes_of_the_real_thing(
    case: OpCase, layout: str, device: torch.device
) -> None:
    call = case.make_call((6, 10, 129), BFLOAT16, device).map_activations(LAYOUTS[layout])
    real = evaluate(case.memopt, call)
    with FakeTensorMode() as mode:
        fake = evaluate(case.memopt, call.map(mode.from_tensor))
    for name, expected in real.items():
        actual = fake[name]
        if expected is None:
            assert actual is None, name
            continue
        assert actual.shape == expected.shape, name
        assert actual.stride() == expected.stride(), name
        assert actual.dtype == expected.dtype, name
        assert actual.device == expected.device, name


@every_op
def test_meta_tensors_run_without_memory(case: OpCase) -> None:
    """More elements than any machine has memory for."""
    call = case.make_call((1, 8), FLOAT32, torch.device("meta"))
    rows = 1 << 48
    call = call.map_activations(lambda t: t.expand(rows, *t.shape[1:]))
    results = evaluate(case.memopt, call)
    for name in case.outputs:
        assert results[name].device.type == "meta"
        assert results[name].shape[0] == rows
    for name, tensor in call.differentiable.items():
        assert results[f"grad_{name}"].shape == tensor.shape


@every_op
@pytest.mark.parametrize("grad", [True, False])
def test_statistics_are_computed_only_for_a_backward(
    case: OpCase, grad: bool, device: torch.device
) -> None:
    call = case.make_call((9, 130), FLOAT32, device)
    leaves = call.leaves()
    with RecordOps() as ops:
        case.memopt(leaves if grad else call)
        with torch.no_grad():
            case.memopt(leaves)
    # An output that is saved is detached from its own graph.
    saving = [torch.ops.aten.detach.default] * len(case.kept_outputs) if grad else []
    assert ops.ops == [case.forward_op, *saving, case.forward_op]
    schema = [argument.name for argument in case.forward_op._schema.arguments]
    if "for_backward" in schema:
        calls = ops.arguments_of(case.forward_op)
        assert [call.get("for_backward", True) for call in calls] == [grad, False]


@every_op
def test_without_grad_only_the_output_is_allocated(case: OpCase) -> None:
    call = case.make_call((9, 130), FLOAT32, torch.device("cpu"))
    case.memopt(call)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        outputs = as_tuple(case.memopt(call))
    events = profiled.profiler.kineto_results.events()
    allocated = [e.nbytes() for e in events if e.name() == "[memory]" and e.nbytes() > 0]
    assert allocated == [output.nbytes for output in outputs]


@every_op
def test_no_op_writes_to_its_arguments(case: OpCase, device: torch.device) -> None:
    call = case.make_call((9, 130), FLOAT32, device)
    copy = call.map(torch.Tensor.clone)
    _, saved = case.forward(call)
    case.backward(call, saved, recompute_output=True)
    for name, tensor in {**call.given, **call.incoming}.items():
        assert torch.equal(tensor, getattr(copy, name)), name


@pytest.mark.parametrize("case", [case for case in OP_CASES if not case.linear], ids=str)
def test_private_ops_refuse_to_be_differentiated(case: OpCase, device: torch.device) -> None:
    """They have no derivative of their own: a clear error, not a silent constant."""
    leaves = case.make_call((4, 10), FLOAT32, device).leaves()
    outputs, saved = case.forward(leaves)
    results = [
        (case.backward_op, case.backward(leaves, saved, recompute_output=True)),
        (case.forward_op, outputs),
    ]
    for op, result in results:
        tensor = next(t for t in result.values() if t is not None)
        name = op.name().removeprefix("memopt::")
        with pytest.raises(RuntimeError, match=f"{name}.*not implemented"):
            tensor.sum().backward()


@every_op
def test_output_is_a_fresh_tensor(case: OpCase, device: torch.device) -> None:
    """Never an alias of the input: in-place ops on the output leave the input alone."""
    leaves = case.make_call((4, 10), FLOAT32, device).leaves()
    before = {name: t.detach().clone() for name, t in leaves.given.items()}
    outputs = as_tuple(case.memopt(leaves))
    for name, output in zip(case.outputs, outputs, strict=True):
        assert not output._is_view()
        if name not in case.kept_outputs:
            output.mul_(2)
    sum(output.sum() for output in outputs).backward()
    for name, tensor in leaves.given.items():
        assert torch.equal(tensor.detach(), before[name]), name


@every_op
def test_inference_mode(case: OpCase, device: torch.device) -> None:
    call = case.make_call((4, 10), FLOAT32, device)
    with torch.inference_mode():
        outputs = as_tuple(case.memopt(call))
    for output, expected in zip(outputs, as_tuple(case.memopt(call)), strict=True):
        assert output.is_inference()
        assert torch.equal(output, expected)


@every_op
def test_tensor_subclass_is_kept(case: OpCase, device: torch.device) -> None:
    class Named(torch.Tensor):
        pass

    call = case.make_call((4, 10), FLOAT32, device)
    named = with_first(call, call.first.as_subclass(Named))
    for output, expected in zip(
        as_tuple(case.memopt(named)), as_tuple(case.memopt(call)), strict=True
    ):
        assert type(output) is Named
        assert torch.equal(output.as_subclass(torch.Tensor), expected)


def with_first(call: Call, tensor: torch.Tensor) -> Call:
    return call.replace(**{next(iter(call.given)): tensor})


def _tangent_of(function, call: Call) -> None:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(call.first, torch.ones_like(call.first))
        function(with_first(call, dual))


@every_op
@pytest.mark.parametrize("grad", [True, False])
def test_forward_mode_is_refused(case: OpCase, grad: bool, device: torch.device) -> None:
    """Forward-mode derivatives are not supported; they are never dropped in silence, also not under
    no_grad.
    """
    call = case.make_call((4, 10), FLOAT32, device)
    with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match="jvp"):
        _tangent_of(case.memopt, call)


@every_op
def test_functorch_grad_is_refused(case: OpCase, device: torch.device) -> None:
    call = case.make_call((4, 10), FLOAT32, device)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return sum(output.sum() for output in as_tuple(case.memopt(with_first(call, x))))

    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.grad(loss)(call.first)


@pytest.mark.parametrize("case", [case for case in OP_CASES if not case.random], ids=str)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_equals_a_loop(case: OpCase, device: torch.device) -> None:
    call = case.make_call((4, 3, 10), FLOAT32, device)

    def one(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        named = dict(zip(call.activations, tensors, strict=True))
        return as_tuple(case.memopt(call.replace(**named)))

    outputs = torch.vmap(one)(*call.activations.values())
    for output, expected in zip(outputs, as_tuple(case.memopt(call)), strict=True):
        assert torch.equal(output, expected)


@pytest.mark.parametrize("case", GELU_CASES + NORM_CASES[:2], ids=str)
def test_defaults_of_the_public_schema(case: OpCase, device: torch.device) -> None:
    """Called with required arguments alone, the op is PyTorch's with its defaults."""
    call = case.make_call((4, 10), FLOAT32, device, weight=False, bias=False)
    normalizes = case in NORM_CASES
    required = (call.input, call.normalized_shape) if normalizes else (call.input,)
    keywords = {"approximate": "none"} if case.approximate is not None else {}
    op = case.public_op if normalizes else getattr(memopt.functional, case.family)
    assert torch.equal(op(*required), op(*required, **keywords))
    if normalizes:
        assert torch.equal(op(*required), op(*required, None, None, 1e-5))


def _normal(*size: int, grad: bool = False) -> torch.Tensor:
    return torch.randn(size).requires_grad_(grad)


def _linears(grad: bool) -> dict[str, tuple[tuple, dict]]:
    """Arguments of the ops with linears and of mlp, which have no case."""
    x, n = _normal(2, 3, 8, grad=grad), _normal(8, grad=grad)
    w, b = _normal(5, 8, grad=grad), _normal(5, grad=grad)
    silu = {"activation": "silu"}
    return {
        "layer_norm_linear": ((x, n, n, [w, w], [b, None]), {}),
        "rms_norm_linear": ((x, n, [w], [b]), {"zero_centered_weight": True}),
        "activation_linear": ((x, w, b), silu),
        "gated_linear": ((x, _normal(2, 3, 8, grad=grad), w, b), silu),
        "gated_packed_linear": ((_normal(2, 3, 16, grad=grad), w, None), silu),
        "mlp": ((x, w, b, _normal(8, 5, grad=grad), None), {"residual": True}),
    }


def _writing() -> dict[str, tuple[tuple, dict]]:
    """Arguments of the private ops that write over one of them."""
    x, up, grad, row = _normal(4, 8), _normal(4, 8), _normal(4, 8), torch.ones(4, 1)
    silu = {"activation": "silu"}
    norm = (grad, x, 1, row, row, None, None, (False, False), True)
    return {
        "_activation_forward_": ((x.clone(),), silu),
        "_activation_backward_": ((grad, x), {**silu, "output": torch.empty(4, 8)}),
        "_gated_forward_": ((x.clone(), up), silu),
        "_gated_backward_": ((grad, x, up), {**silu, "grad_up": torch.empty(4, 8)}),
        "_norm_backward_": (norm, {"norm": "layer_norm"}),
    }


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", _linears(False))
def test_opcheck_of_the_ops_with_linears(name: str, grad: bool) -> None:
    arguments, keywords = _linears(grad)[name]
    torch.library.opcheck(getattr(torch.ops.memopt, name).default, arguments, keywords)


# Not test_aot_dispatch_dynamic: nothing traces them, since traced graphs leave buffers to their
# compiler (csrc/autograd/ownership.h).
WRITING_CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")


@pytest.mark.parametrize("name", _writing())
def test_opcheck_of_the_ops_that_write_over_an_argument(name: str) -> None:
    arguments, keywords = _writing()[name]
    op = getattr(torch.ops.memopt, name).default
    torch.library.opcheck(op, arguments, keywords, test_utils=WRITING_CHECKS)


@pytest.mark.parametrize("grad", [True, False])
def test_opcheck_of_the_public_op_that_writes_over_its_input(grad: bool) -> None:
    x = _normal(4, 8, grad=grad) * 1
    op = torch.ops.memopt.activation_.default
    torch.library.opcheck(op, (x, "silu"), test_utils=WRITING_CHECKS)


@pytest.mark.parametrize("name", _writing())
def test_ops_that_write_over_an_argument_refuse_a_graph(name: str) -> None:
    """At once and by name: the argument would keep the graph of the values that it had."""
    (first, *rest), keywords = _writing()[name]
    before = first.clone()
    with pytest.raises(RuntimeError, match=f"{name} writes over its argument"):
        getattr(torch.ops.memopt, name)(first.requires_grad_(), *rest, **keywords)
    assert torch.equal(first.detach(), before)


OF_LOSSES = (
    "cross_entropy",
    "_cross_entropy_forward",
    "_cross_entropy_backward",
    "_cross_entropy_backward_",
    "linear_cross_entropy",
    "_linear_cross_entropy",
    "linear_log_probs",
    "linear_log_probs_and_entropy",
    "linear_logsumexp",
)
"""Checked in the test files of these ops."""

OF_SYNC_BATCH_NORM = (
    "sync_batch_norm",
    "_sync_batch_norm_moments",
    "_sync_batch_norm_sums",
    "_sync_batch_norm_input_gradient",
)
"""Checked in tests/nn/test_sync_batch_norm.py."""


def test_every_op_of_the_library_is_checked() -> None:
    """No op is forgotten by the tests above."""
    cases = OP_CASES + CHANNEL_NORM_CASES  # the latter in test_channel_norm_calls.py
    by_cases = {op for case in cases for op in (case.public_op, case.forward_op, case.backward_op)}
    checked = {op.name() for op in by_cases}
    checked |= {case.gradient_op.name() for case in CHANNEL_NORM_CASES}
    named = (*_linears(False), *_writing(), *OF_LOSSES, *OF_SYNC_BATCH_NORM, "activation_")
    checked |= {f"memopt::{name}" for name in named}
    everything = {
        name for name in torch._C._dispatch_get_all_op_names() if name.startswith("memopt::")
    }
    assert everything == checked
