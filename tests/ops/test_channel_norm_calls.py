"""Proves, of group_norm, instance_norm and batch_norm, with an activation behind and without:
running statistics move once as PyTorch moves them; derivatives are those of the function; the ops
are well-formed and trace; bad arguments are refused by name. (Their results: test_channel_norm.py.)
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memopt
from tests.support.bits import assert_same_bits
from tests.support.cases import (
    CHANNEL_NORM_ACTIVATION_CASES,
    CHANNEL_NORM_CASES,
    Call,
    evaluate,
)
from tests.support.cases.channel_norm import ChannelNormCase
from tests.support.opchecks import opcheck
from tests.support.shapes import FLOAT32, FLOAT64, Dtypes, channels_last, random_normal

CASES = (*CHANNEL_NORM_CASES, *CHANNEL_NORM_ACTIVATION_CASES)
every_case = pytest.mark.parametrize("case", CASES, ids=str)


@pytest.mark.parametrize("momentum", [0.1, 1.0, 0.0])
@pytest.mark.parametrize("layout", [torch.clone, channels_last])
def test_running_statistics_move_as_pytorchs(
    momentum: float, layout: Callable, device: torch.device
) -> None:
    ours, theirs = ([torch.zeros(6, device=device), torch.ones(6, device=device)] for _ in range(2))
    for seed in range(3):
        x = layout(random_normal(4, 6, 5, 7, seed=seed).to(device, torch.float32) * 3 + 1)
        memopt.functional.batch_norm(x, *ours, training=True, momentum=momentum)
        F.batch_norm(x, *theirs, training=True, momentum=momentum)
        with torch.no_grad():
            memopt.functional.batch_norm(x, *ours, training=False)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_running_statistics_of_an_empty_batch_stay(device: torch.device) -> None:
    running = torch.zeros(6, device=device), torch.ones(6, device=device)
    x = torch.zeros(0, 6, 5, 7, device=device)
    assert memopt.functional.batch_norm(x, *running, training=True).shape == x.shape
    assert torch.equal(running[0], torch.zeros(6, device=device))
    assert torch.equal(running[1], torch.ones(6, device=device))


def test_a_recipe_moves_no_running_statistics(device: torch.device) -> None:
    running = torch.zeros(6, device=device), torch.ones(6, device=device)
    x = random_normal(4, 6, 5, 7).to(device, torch.float32).requires_grad_()
    kernel = torch.ones(4, 6, 1, 1, device=device, requires_grad=True)
    with memopt.recipes():
        loss = F.conv2d(memopt.functional.batch_norm(x, *running, training=True), kernel).sum()
    before = [t.clone() for t in running]
    loss.backward()
    assert_same_bits(list(running), before)
    assert before[0].any()


def test_evaluation_keeps_the_statistics_that_it_used(device: torch.device) -> None:
    """They may move before backward."""
    running = torch.zeros(6, device=device), torch.ones(6, device=device)
    x = random_normal(4, 6, 5, 7).to(device, torch.float32).requires_grad_()
    output = memopt.functional.batch_norm(x, *running)
    running[1].fill_(100)
    (grad,) = torch.autograd.grad(output.sum(), x)
    torch.testing.assert_close(grad, torch.ones_like(x))


def of_tensors(case: ChannelNormCase, leaves: Call, *tensors: Tensor) -> Tensor:
    changed = dict(zip(leaves.differentiable, tensors, strict=True))
    return case.memopt(leaves.replace(**changed))


@every_case
@pytest.mark.parametrize("size", [(2, 2, 3), (2, 4, 2, 2)], ids=str)
def test_derivatives(case: ChannelNormCase, size: tuple[int, ...], device: torch.device) -> None:
    for weight, bias in ((True, True), (True, False), (False, True)):
        call = case.make_call(size, FLOAT64, device, weight=weight, bias=bias)
        leaves = call.map_activations(channels_last).leaves()
        function = functools.partial(of_tensors, case, leaves)
        inputs = tuple(leaves.differentiable.values())
        torch.autograd.gradcheck(function, inputs)
        torch.autograd.gradgradcheck(function, inputs)


@every_case
def test_any_subset_of_gradients(case: ChannelNormCase, device: torch.device) -> None:
    call = case.make_call((3, 6, 5, 7), FLOAT32, device)
    _, saved = case.forward(call)
    everything = case.backward(call, saved)
    for mask in ((True, False, False), (False, True, False), (False, False, True)):
        some = case.backward(call, saved, mask)
        for name, wanted in zip(case.masked, mask, strict=True):
            expected = everything[f"grad_{name}"] if wanted else None
            assert_same_bits([some[f"grad_{name}"]], [expected], name)


@every_case
@pytest.mark.parametrize("layout", [torch.clone, channels_last])
@pytest.mark.parametrize("dtypes", [FLOAT32, Dtypes(torch.bfloat16, torch.float32)], ids=str)
def test_opcheck(
    case: ChannelNormCase, layout: Callable, dtypes: Dtypes, device: torch.device
) -> None:
    call = case.make_call((2, 4, 3, 5), dtypes, device).map_activations(layout)
    arguments, keywords = case.arguments(call.leaves())
    if case.family == "instance_norm":
        of_norm = [keywords.pop(name) for name in ("weight", "bias", "eps")]
        arguments = (*arguments, *of_norm)
    opcheck(case.public_op, arguments, keywords, random=False)
    arguments, keywords = case.forward_arguments(call)
    torch.library.opcheck(case.forward_op, arguments, keywords)
    _, saved = case.forward(call)
    arguments, keywords = case.backward_arguments(call, saved)
    torch.library.opcheck(case.backward_op, arguments, keywords)
    if case.activation is not None:
        torch.library.opcheck(case.gradient_op, *case.gradient_arguments(call, saved))


@every_case
def test_compiles_to_the_same_bits(case: ChannelNormCase, device: torch.device) -> None:
    torch._dynamo.reset()
    call = case.make_call((2, 4, 3, 5), FLOAT32, device)
    compiled = torch.compile(case.memopt, backend="aot_eager", fullgraph=True)
    ours, eager = call.map(torch.clone), call.map(torch.clone)
    assert_same_bits(evaluate(compiled, ours), evaluate(case.memopt, eager))
    if case.over_batch:
        assert torch.equal(ours.running_mean, eager.running_mean)
        assert torch.equal(ours.running_var, eager.running_var)
        assert torch.equal(ours.running_var, call.running_var) != case.training


@every_case
def test_autocast_leaves_the_dtype_of_the_input(case: ChannelNormCase) -> None:
    call = case.make_call((2, 4, 3, 5), Dtypes(torch.bfloat16, torch.float32), torch.device("cpu"))
    with torch.autocast("cpu", torch.bfloat16):
        assert case.memopt(call).dtype == torch.bfloat16
        wide = case.make_call((2, 4, 3, 5), FLOAT32, torch.device("cpu"))
        assert case.memopt(wide).dtype == torch.float32


def refused(function: Callable[[], object], message: str) -> None:
    with pytest.raises(RuntimeError, match=re.escape(message)):
        function()


def test_bad_input_of_group_norm() -> None:
    x, f = torch.zeros(2, 6, 5), memopt.functional
    refused(lambda: f.group_norm(x, 4), "group_norm: num_groups must divide the number of channels")
    refused(lambda: f.group_norm(x, 0), "group_norm: num_groups must be positive, got 0")
    refused(lambda: f.group_norm(x[0, 0], 1), "group_norm: input must have at least 2 dimensions")
    refused(
        lambda: f.group_norm(x, 2, torch.ones(5)),
        "group_norm: weight must have shape [6] (channels), got [5]",
    )
    refused(
        lambda: f.group_norm(x, 2, None, torch.ones(6, 1)),
        "group_norm: bias must have shape [6] (channels), got [6, 1]",
    )
    refused(
        lambda: f.group_norm(x, 2, torch.ones(6).double()),
        "group_norm: weight must have input's dtype Float or Float, got Double",
    )
    refused(lambda: f.group_norm(x, 2, eps=-1.0), "group_norm: eps must be finite and not negative")
    refused(
        lambda: f.group_norm(x, 2, activation="tanh"),
        "group_norm: activation must be one of 'gelu', 'gelu_tanh', 'silu'",
    )
    refused(
        lambda: f.group_norm(x, 2, activation="elu"),
        "group_norm: activation_scalar must be finite and positive for 'elu', got None",
    )
    refused(
        lambda: f.group_norm(x, 2, activation_scalar=1.0),
        "group_norm: activation_scalar must be None without an activation, got 1",
    )
    refused(lambda: f.group_norm(x.int(), 2), "group_norm: input must have dtype float32")
    refused(
        lambda: f.group_norm(torch.zeros(1, 6, 1), 6),
        "group_norm: input must have more than one value for each group, got shape [1, 6, 1]",
    )
    refused(
        lambda: f.instance_norm(torch.zeros(2, 6, 1)),
        "instance_norm: input must have more than one value for each channel, got shape [2, 6, 1]",
    )
    freed = torch.ones(6)
    freed.untyped_storage().resize_(0)
    refused(lambda: f.group_norm(x, 2, freed), "group_norm: weight must be in memory")


def test_bad_input_of_batch_norm_changes_nothing() -> None:
    x, f = torch.zeros(2, 6, 5), memopt.functional
    mean, var = torch.zeros(6), torch.ones(6)
    refused(
        lambda: f.batch_norm(x[:1, :, :1], mean, var, training=True),
        "batch_norm: input must have more than one value for each channel, got shape [1, 6, 1]",
    )
    refused(
        lambda: f.batch_norm(x, mean[:5], var, training=True),
        "batch_norm: running_mean must have shape [6] (channels), got [5]",
    )
    refused(
        lambda: f.batch_norm(x, mean, var[:5], training=True),
        "batch_norm: running_var must have shape [6] (channels), got [5]",
    )
    refused(
        lambda: f.batch_norm(x, mean, None),
        "batch_norm: running_mean and running_var must be given unless training, got no running",
    )
    refused(
        lambda: f.batch_norm(x, mean.requires_grad_(), var, training=True),
        "batch_norm: running statistics must not require a gradient",
    )
    assert not mean.any()
    assert torch.equal(var, torch.ones(6))


@every_case
def test_the_backward_op_checks_what_it_is_given(case: ChannelNormCase) -> None:
    call = case.make_call((2, 6, 5), FLOAT32, torch.device("cpu"))
    _, saved = case.forward(call)
    for changed, message in (
        (saved | {"mean": saved["mean"][:-1]}, "mean must have shape"),
        (saved | {"rstd": saved["rstd"].double()}, "rstd must be a contiguous Float"),
    ):
        backward = functools.partial(case.backward, call, changed)
        refused(backward, f"{case.family} backward: {message}")
    call = call.replace(grad_output=call.grad_output[:1])
    refused(lambda: case.backward(call, saved), f"{case.family} backward: grad_output must have")


def test_instance_norm_with_running_statistics_is_pytorchs() -> None:
    x = torch.randn(3, 4, 5)
    ours, theirs = ((torch.zeros(4), torch.ones(4)) for _ in range(2))
    assert torch.equal(memopt.functional.instance_norm(x, *ours), F.instance_norm(x, *theirs))
    assert torch.equal(ours[0], theirs[0])
    assert ours[0].any()


def test_modules_of_pytorch_may_call_it_in_a_region() -> None:
    """A checkpointed region moves running statistics once, too."""
    layers = [nn.BatchNorm2d(4) for _ in range(2)]

    def forward(layer: nn.BatchNorm2d, x: Tensor) -> Tensor:
        return memopt.functional.batch_norm(
            x, layer.running_mean, layer.running_var, layer.weight, layer.bias, training=True
        )

    x = torch.randn(3, 4, 5, 5, requires_grad=True)
    memopt.checkpoint(forward, layers[0], x).sum().backward()
    forward(layers[1], x).sum().backward()
    assert torch.equal(layers[0].running_mean, layers[1].running_mean)
    assert torch.equal(layers[0].running_var, layers[1].running_var)
