"""Proves: in a converted model PyTorch's group, instance and batch norms are memopt's where its
kernels take them and PyTorch's elsewhere; what stands behind them keeps nothing; running statistics
move once; the report has the bytes before and after.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memopt
from tests.convert.support import memopt_ops, one_step

WEIGHT, BIAS = torch.rand(4) + 0.5, torch.randn(4)
FORWARD = ["memopt::_channel_norm_forward"]


def running() -> tuple[Tensor, Tensor]:
    return torch.zeros(4), torch.ones(4)


CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "group_norm": lambda x: F.group_norm(x, 2, WEIGHT, BIAS),
    "group_norm of torch": lambda x: torch.group_norm(x, 2, eps=1e-3),
    "instance_norm": lambda x: F.instance_norm(x, weight=WEIGHT),
    "batch_norm": lambda x: F.batch_norm(x, *running(), WEIGHT, BIAS, training=True),
    "batch_norm, no statistics": lambda x: F.batch_norm(x, None, None, training=True),
    "batch_norm, evaluation": lambda x: F.batch_norm(x, *running(), WEIGHT, BIAS),
    "GroupNorm": nn.GroupNorm(2, 4),
    "InstanceNorm2d": nn.InstanceNorm2d(4),
    "BatchNorm2d": nn.BatchNorm2d(4, momentum=None),
    "SyncBatchNorm in evaluation": nn.SyncBatchNorm(4).eval(),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_calls_are_memopt_s(call: Callable, order: torch.memory_format) -> None:
    x = torch.randn(3, 4, 5, 6).contiguous(memory_format=order).requires_grad_()
    expected = one_step(lambda: call(x), x)
    with memopt.convert.functions():
        assert memopt_ops(lambda: call(x)) == FORWARD
        actual = one_step(lambda: call(x), x)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        assert ours.stride() == theirs.stride()


LEFT: dict[str, Callable[[Tensor], Tensor]] = {
    "empty": lambda x: F.group_norm(x[:0], 2),
    "one value to a channel of a sample": lambda x: torch.instance_norm(
        x[:, :, :1, :1], None, None, None, None, True, 0.1, 1e-5, False
    ),
}


@pytest.mark.parametrize("call", LEFT.values(), ids=LEFT)
def test_other_calls_are_pytorch_s(call: Callable) -> None:
    x = torch.randn(3, 4, 5, 6)
    with memopt.convert.functions():
        assert memopt_ops(lambda: call(x)) == []


def test_errors_are_pytorch_s() -> None:
    x = torch.randn(3, 4, 5, 6)
    with memopt.convert.functions():
        for call, message in (
            (lambda: F.group_norm(x, 3), "divisible"),
            (lambda: F.batch_norm(x, torch.zeros(3), torch.ones(3)), "running_mean"),
            (lambda: F.batch_norm(x, None, None), "running_mean"),
            (lambda: F.group_norm(x, 2, torch.ones(3)), "weight"),
            (lambda: F.batch_norm(x, WEIGHT.clone().requires_grad_(), WEIGHT), "differentiable"),
        ):
            with pytest.raises(RuntimeError, match=message):
                call()
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            F.batch_norm(torch.zeros(1, 4), None, None, training=True)


class Block(nn.Module):
    """Half a residual block of a U-Net, and its skip."""

    def __init__(self, norm: nn.Module, act: nn.Module) -> None:
        super().__init__()
        self.first = nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.act = norm, act
        self.second = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.act(self.norm(self.first(x))))


NORMS: dict[str, Callable[[], nn.Module]] = {
    "group norm": lambda: nn.GroupNorm(2, 8),
    "instance norm": lambda: nn.InstanceNorm2d(8, affine=True),
    "batch norm": lambda: nn.BatchNorm2d(8),
}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(("act", "stored"), [(nn.SiLU, 3), (nn.ReLU, 2)], ids=["silu", "relu"])
def test_the_bytes_of_a_block(norm: str, act: type[nn.Module], stored: int) -> None:
    """The norm's input is left of it, of SiLU's input and the convolution's; of ReLU, whose output
    the convolution keeps as well, there are two.
    """
    model = nn.Sequential(*(Block(NORMS[norm](), act()) for _ in range(2)))
    x = torch.randn(4, 8, 16, 16)
    one = x.nbytes
    report = memopt.convert(model, x)
    statistics = {"group norm": 4 * 2, "instance norm": 4 * 8, "batch norm": 8}[norm] * 2 * 4
    # Beside these of each block, the input of its first convolution. PyTorch's instance norm
    # repeats its weight for each sample.
    repeated = 4 * 8 * 4 if norm == "instance norm" else 0
    assert report.bytes_after == 2 * (2 * one + statistics)
    assert report.bytes_before == 2 * ((1 + stored) * one + statistics + repeated)
    assert {entry.what for entry in report.remaining} == {
        "inputs of convolutions",
        "inputs of memopt's ops",
    }


def train(model: nn.Module, steps: int = 3) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for seed in range(steps):
        torch.manual_seed(seed)
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8, 16, 16)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("act", [nn.SiLU, nn.ReLU], ids=["silu", "relu"])
def test_training_has_the_same_bits_with_recipes_and_in_regions(
    norm: str, act: type[nn.Module]
) -> None:
    """And is eager's within rounding; the state that is trained too."""
    eager = nn.Sequential(*(Block(NORMS[norm](), act()) for _ in range(2)))
    models = {name: copy.deepcopy(eager) for name in ("plain", "recipes", "regions")}
    memopt.convert(models["recipes"])
    memopt.convert(models["regions"], checkpoint=Block)
    losses = {"recipes": train(models["recipes"]), "regions": train(models["regions"])}
    with memopt.convert.functions():
        losses["plain"] = train(models["plain"])
    for name in ("recipes", "regions"):
        assert all(map(torch.equal, losses[name], losses["plain"])), name
        for key, value in models["plain"].state_dict().items():
            assert torch.equal(models[name].state_dict()[key], value), (name, key)
    torch.testing.assert_close(losses["plain"], train(eager))
    for key, value in eager.state_dict().items():
        torch.testing.assert_close(models["plain"].state_dict()[key], value, rtol=1e-3, atol=1e-5)


def test_evaluation_leaves_the_running_statistics() -> None:
    model = nn.Sequential(Block(nn.BatchNorm2d(8), nn.ReLU())).eval()
    memopt.convert(model)
    before = copy.deepcopy(model.state_dict())
    model(torch.randn(4, 8, 16, 16)).sum().backward()
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key


@pytest.mark.parametrize("norm", [nn.GroupNorm(2, 4), nn.InstanceNorm1d(4, affine=True)], ids=str)
def test_an_input_in_no_order_may_be_written_over(norm: nn.Module) -> None:
    """PyTorch's functions save a copy of it (of group norm up to version 2.13)."""
    x = torch.randn(3, 5, 4, requires_grad=True)

    def call() -> Tensor:
        hidden = x * 2
        result = norm(hidden.transpose(1, 2))
        hidden.zero_()
        return result

    try:
        expected = one_step(call, x)
    except RuntimeError:
        pytest.skip("PyTorch's own raises")
    with memopt.convert.functions():
        assert memopt_ops(call) == FORWARD
        actual = one_step(call, x)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
