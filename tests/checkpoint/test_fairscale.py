"""Proves: code written for FairScale's checkpoint_wrapper finds the behaviour it relies on, and
each defect of FairScale's that was reported or found by reading is absent here. Numbers are those
of facebookresearch/fairscale's issues and pull requests; letters are unreported defects.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt._checkpoint import checkpoint_wrapper, disable_checkpointing, is_recomputing
from tests.checkpoint.support import CountCalls, Watch, mlp, step_results, taken_for_an_accelerator
from tests.support.bits import assert_same_bits


class Returns(nn.Module):
    """Gives `make(y)` of the region's one tensor; importable for pickle."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(self.linear(x).tanh())


class Output(NamedTuple):
    hidden: Tensor
    cache: Any


def test_802_dict_output_stays_a_dict() -> None:
    module = checkpoint_wrapper(Returns(lambda y: {"a": y, "b": 2}))
    output = module(torch.randn(2, 4))
    assert list(output) == ["a", "b"]
    output["a"].sum().backward()
    assert module.linear.weight.grad is not None


def test_954_named_tuple_output_stays_one() -> None:
    output = checkpoint_wrapper(Returns(lambda y: Output(y, None)))(torch.randn(2, 4))
    assert type(output) is Output
    assert output.hidden.requires_grad
    assert output.cache is None


def test_1148_tensors_in_nested_containers_are_offloaded() -> None:
    class Nested(nn.Module):
        def forward(self, tree: dict[str, list[Tensor]]) -> Tensor:
            return tree["x"][0].exp()

    x = torch.randn(3, requires_grad=True)
    with taken_for_an_accelerator("cpu"):
        watch = Watch()
        checkpoint_wrapper(Nested(), offload_to_cpu=True)({"x": [x * 1]}).sum().backward()
    assert watch.to_host == watch.to_device == (1, 3 * 4)
    assert torch.equal(x.grad, x.detach().exp())


def test_816_deepcopy_has_weights_of_its_own() -> None:
    module = checkpoint_wrapper(mlp())
    twin = copy.deepcopy(module)
    x = torch.randn(2, 8)
    expected = module(x)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    assert torch.equal(twin(x), expected)
    del module
    twin(x).sum().backward()
    assert all(p.grad is not None for p in twin.parameters())


def test_893_wrapped_modules_pickle() -> None:
    module = checkpoint_wrapper(nn.Sequential(checkpoint_wrapper(nn.Linear(4, 4)), nn.ReLU()))
    x = torch.randn(2, 4)
    assert torch.equal(pickle.loads(pickle.dumps(module))(x), module(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_1199_autocast_dtype_is_kept(device: torch.device, dtype: torch.dtype) -> None:
    dtypes = []

    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x @ x
            dtypes.append(y.dtype)
            return y.exp()

    x = torch.randn(4, 4, device=device, requires_grad=True)
    with torch.autocast(device.type, dtype):
        y = checkpoint_wrapper(Net())(x)
    y.sum().backward()
    assert dtypes == [dtype, dtype]


def test_1035_batch_norm_statistics_are_those_of_the_plain_run() -> None:
    """They move in forward order, and although no backward follows the last forward."""
    plain = nn.BatchNorm1d(4)
    wrapped = checkpoint_wrapper(copy.deepcopy(plain))
    batches = [torch.randn(3, 4) for _ in range(3)]
    losses = [wrapped(batch).exp().sum() for batch in batches]
    for batch in batches:
        plain(batch)
    assert_same_bits(wrapped.buffers(), plain.buffers())
    for loss in (losses[1], losses[0]):
        loss.backward()
    assert_same_bits(wrapped.buffers(), plain.buffers())
    wrapped.eval()
    plain.eval()
    assert torch.equal(wrapped(batches[0]), plain(batches[0]))


def test_771_autograd_grad_works() -> None:
    module = checkpoint_wrapper(mlp())
    x = torch.randn(2, 8, requires_grad=True)
    (gradient,) = torch.autograd.grad(module(x).sum(), x)
    with disable_checkpointing():
        (expected,) = torch.autograd.grad(module(x).sum(), x)
    assert torch.equal(gradient, expected)


def test_a_offloaded_frozen_module_passes_the_gradient_on(device: torch.device) -> None:
    upstream = nn.Linear(4, 4).to(device)
    frozen = checkpoint_wrapper(nn.GELU(), offload_to_cpu=True)
    x = torch.randn(2, 4, device=device)
    with taken_for_an_accelerator(device):
        y = frozen(upstream(x))
        assert y.requires_grad
        y.sum().backward()
    (expected,) = torch.autograd.grad(nn.functional.gelu(upstream(x)).sum(), upstream.weight)
    assert torch.equal(upstream.weight.grad, expected)


def test_b_batch_norm_in_nested_wrappers_keeps_tracking() -> None:
    inner = checkpoint_wrapper(nn.Sequential(nn.BatchNorm1d(4), nn.Tanh()))
    outer = checkpoint_wrapper(nn.Sequential(inner, nn.Tanh()))
    for step in range(1, 4):
        outer(torch.randn(3, 4, requires_grad=True)).sum().backward()
        assert inner[0].track_running_stats
        assert inner[0].num_batches_tracked.item() == step


class FailsOnce(nn.Module):
    def __init__(self, in_recompute: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.in_recompute = in_recompute

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(self.norm(x))
        if is_recomputing() == self.in_recompute:
            raise ArithmeticError
        return x.exp()


@pytest.mark.parametrize("in_recompute", [False, True])
def test_c_exceptions_leave_batch_norm_and_generator_alone(in_recompute: bool) -> None:
    module = checkpoint_wrapper(FailsOnce(in_recompute))
    x = torch.randn(3, 4, requires_grad=True)

    if in_recompute:
        loss = module(x).sum()
        torch.randn(3)
        state = torch.get_rng_state()
        with pytest.raises(ArithmeticError):
            loss.backward()
        assert torch.equal(torch.get_rng_state(), state)
    else:
        with pytest.raises(ArithmeticError):
            module(x)
    assert module.norm.track_running_stats
    assert module.norm.num_batches_tracked.item() == 1


def test_d_tensors_in_a_nested_output_tuple_have_gradients() -> None:
    module = checkpoint_wrapper(Returns(lambda y: (y, (y * 2, [y.sin()]))))
    outer, (inner, (innermost,)) = module(torch.randn(2, 4))
    assert outer.requires_grad
    assert inner.requires_grad
    assert innermost.requires_grad
    innermost.sum().backward()
    assert module.linear.weight.grad is not None


def test_e_wrapping_twice_runs_and_hooks_once() -> None:
    count = CountCalls()
    module = nn.Sequential(count, nn.BatchNorm1d(4), nn.Tanh())
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules()]
    checkpoint_wrapper(checkpoint_wrapper(module))
    module(torch.randn(3, 4)).sum().backward()
    assert count.calls == 2
    assert module[1].num_batches_tracked.item() == 1
    assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules()]


def test_f_instance_forward_is_not_dropped() -> None:
    module = nn.Linear(4, 4)
    old_forward = module.forward
    module.forward = lambda x: old_forward(x) * 100
    x = torch.randn(2, 4)
    expected = module(x)
    assert torch.equal(checkpoint_wrapper(module)(x), expected)


def test_g_the_region_adds_nothing_to_the_graph() -> None:
    """FairScale's regions hang on a dummy tensor each, and its graphs consist of its own nodes."""

    def nodes(tensor: Tensor) -> list[str]:
        names, pending = [], [tensor.grad_fn]
        while pending:
            node = pending.pop()
            names.append(node.name())
            pending += [following for following, _ in node.next_functions if following]
        return names

    module = mlp()
    x = torch.randn(2, 8)
    expected = nodes(module(x))
    assert nodes(checkpoint_wrapper(module)(x)) == expected


@pytest.mark.parametrize("falsy", [{}, [], (), 0, None, "", False])
def test_second_positional_argument_may_be_any_falsy_object(falsy: object) -> None:
    with taken_for_an_accelerator("cpu"):
        watch = Watch()
        checkpoint_wrapper(mlp(), falsy)(torch.randn(2, 8)).sum().backward()
    assert watch.to_host == (0, 0)


def test_names_are_where_fairscale_code_looks_for_them() -> None:
    for name in ("checkpoint_wrapper", "is_checkpointing", "is_recomputing"):
        assert callable(getattr(memopt, name))
    with memopt.checkpoint.disable():
        pass


@pytest.mark.parametrize("offload_to_cpu", [False, True])
def test_loss_and_gradient_norm_equal_the_plain_run(
    device: torch.device, offload_to_cpu: bool
) -> None:
    """FairScale's test_basic, to the last bit."""
    model = nn.Sequential(mlp(dropout=0.5), mlp(dropout=0.5), mlp(dropout=0.5)).to(device)
    x = torch.randn(4, 8, device=device, requires_grad=True)
    expected = step_results(lambda: model(x), model.parameters())
    for layer in model:
        checkpoint_wrapper(layer, offload_to_cpu)
    assert_same_bits(step_results(lambda: model(x), model.parameters()), expected)


def test_list_in_list_out_without_input_gradient() -> None:
    """FairScale's test_list_input: two forwards, and a third for the one backward that needs it."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.count = CountCalls()
            self.conv = nn.Linear(2, 2)

        def forward(self, x: list[Tensor]) -> list[Tensor]:
            self.count(x)
            return [self.conv(x[0]).tanh()]

    model = nn.Sequential(checkpoint_wrapper(Model()))
    x = [torch.rand(4, 2)]
    model(x)
    y = model(x)
    assert model[0].count.calls == 2
    y[0].sum().backward()
    assert model[0].count.calls == 3


@pytest.mark.parametrize("trainable", [(True, True), (False, True), (True, False), (False, False)])
def test_requires_grad_of_chains(trainable: tuple[bool, bool]) -> None:
    """FairScale's test_checkpoint_requires_grad, with non-tensors passed along."""

    class Layer(nn.Module):
        def __init__(self, trainable: bool) -> None:
            super().__init__()
            self.count = CountCalls()
            self.linear = nn.Linear(2, 2).requires_grad_(trainable)

        def forward(self, x: Tensor, words: list[Any]) -> tuple[Tensor, list[Any]]:
            return self.linear(self.count(x)).tanh(), [*words, "hi", 1]

    layers = [checkpoint_wrapper(Layer(t)) for t in trainable]
    x, words = torch.randn(3, 2), ["bye"]
    for layer in layers:
        x, words = layer(x, words)
    assert words == ["bye", "hi", 1, "hi", 1]
    assert x.requires_grad == any(trainable)
    if x.requires_grad:
        x.sum().backward()
    first_runs_again, second_runs_again = trainable[0], any(trainable)
    assert [layer.count.calls for layer in layers] == [1 + first_runs_again, 1 + second_runs_again]
