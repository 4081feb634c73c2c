"""Proves: linear_logsumexp gives the logsumexp of a linear's output and its gradients, as right as
PyTorch's composition by float64, in chunks; it saves four bytes a row.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from memopt.functional import linear_logsumexp
from memopt.memory.saved import SavedTensors
from tests.support.bits import assert_same_bits
from tests.support.losses import error, head, limit_of
from tests.support.opchecks import opcheck


def composed(
    input: Tensor, weight: Tensor, bias: Tensor, softcap: float | None, scale: float
) -> Tensor:
    z = F.linear(input, weight, bias) * scale
    return (z if softcap is None else softcap * torch.tanh(z / softcap)).logsumexp(-1)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str
)
@pytest.mark.parametrize(("softcap", "scale"), [(None, 1.0), (4.0, 2.0)])
def test_as_right_as_the_composition(
    dtype: torch.dtype, softcap: float | None, scale: float, device: torch.device
) -> None:
    """Of many classes, each with a small probability: no class's part stands out."""
    tensors = head(29, 16, 1290, dtype, device)
    doubles = [t.detach().cpu().double().requires_grad_() for t in tensors.values()]

    def results(wanted: list[Tensor], value: Tensor) -> list[Tensor]:
        return [value, *torch.autograd.grad(value.square().sum(), wanted)]

    x, weight, bias = wanted = list(tensors.values())
    made = linear_logsumexp(
        x, weight, linear_bias=bias, softcap=softcap, logit_scale=scale, chunk=8
    )
    mine = results(wanted, made)
    theirs = results(wanted, composed(*wanted, softcap, scale))
    exact = results(doubles, composed(*doubles, softcap, scale))
    for ours, torchs, reference in zip(mine, theirs, exact, strict=True):
        assert error(ours, reference) <= limit_of(error(torchs, reference), dtype)
    assert mine[0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_large_and_masked_logits(device: torch.device) -> None:
    """Logits of +-1e4 overflow nothing, and classes with a bias of -inf have no gradient."""
    x = torch.tensor([[1e4], [-1e4], [0.5]], device=device, requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0], [0.5]], device=device)
    bias = torch.tensor([0.0, 0.0, -torch.inf], device=device)
    made = linear_logsumexp(x, weight, linear_bias=bias)
    theirs = F.linear(x, weight, bias).logsumexp(-1)
    torch.testing.assert_close(made, theirs)
    torch.testing.assert_close(
        torch.autograd.grad(made.sum(), x), torch.autograd.grad(theirs.sum(), x)
    )


def test_saves_four_bytes_a_row() -> None:
    tensors = head(40, 8, 64)
    with SavedTensors(exclude=list(tensors.values())) as saved:
        linear_logsumexp(tensors["input"], tensors["weight"])
    assert saved.bytes == 4 * 40


def test_double_backward(device: torch.device) -> None:
    tensors = head(5, 3, 7, torch.float64, device)

    def log_sum(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return linear_logsumexp(x, weight, linear_bias=bias, softcap=2.0, chunk=2)

    assert torch.autograd.gradcheck(log_sum, tuple(tensors.values()))
    assert torch.autograd.gradgradcheck(log_sum, tuple(tensors.values()))


def test_opcheck_autocast_shapes_and_one_graph(device: torch.device) -> None:
    tensors = head(12, 8, 20, torch.float32, device)
    x, weight = tensors["input"], tensors["weight"]
    opcheck(torch.ops.memopt.linear_logsumexp, (x, weight), {"chunk": 4}, random=False)
    with torch.autocast(device.type, torch.bfloat16):
        low = linear_logsumexp(x, weight)
    assert low.dtype == torch.float32
    assert_same_bits(low, linear_logsumexp(x.bfloat16(), weight.bfloat16()))
    assert_same_bits(
        linear_logsumexp(x.reshape(3, 4, 8), weight), linear_logsumexp(x, weight).reshape(3, 4)
    )
    torch.compiler.reset()
    compiled = torch.compile(linear_logsumexp, backend="aot_eager", fullgraph=True)
    assert_same_bits(compiled(x, weight), linear_logsumexp(x, weight))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chunk": 0}, "chunk must be at least 1"),
        ({"softcap": -1.0}, "softcap must be positive"),
        ({"linear_weight": torch.ones(5, 4)}, "linear_weight must have shape"),
        ({"linear_weight": torch.ones(0, 3)}, "there must be at least one class"),
    ],
)
def test_bad_input_is_named(change: dict, message: str) -> None:
    good = {"input": torch.ones(2, 3), "linear_weight": torch.ones(5, 3)}
    with pytest.raises((RuntimeError, ValueError), match="linear_logsumexp: ") as error_of:
        linear_logsumexp(**{**good, **change})
    error_of.match(message)
