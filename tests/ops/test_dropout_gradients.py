"""Proves: dropout saves 16 bytes a call and no mask; backward draws forward's mask again, and is
differentiable any number of times.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from memopt.functional import dropout
from memopt.memory.saved import SavedTensors
from tests.support.record_ops import RecordOps
from tests.support.shapes import random_normal

ops = torch.ops.memopt
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def normal(*size: int, dtype: torch.dtype = torch.float32, device: object = "cpu") -> Tensor:
    return random_normal(*size).to(device=device, dtype=dtype)


@every_dtype
@pytest.mark.parametrize("size", [(67, 769), (1,), (0, 3)], ids=str)
def test_saves_16_bytes_and_no_mask(
    dtype: torch.dtype, size: tuple[int, ...], device: torch.device
) -> None:
    x = normal(*size, dtype=dtype, device=device).requires_grad_()
    with SavedTensors() as saved:
        output = dropout(x, 0.1)
    print(f"dropout, {dtype}, {size}: 2 x 8 B a call = {saved.bytes} bytes")
    assert saved.bytes == 16
    assert [t.shape for t in saved.tensors] == [(2,)]
    output.sum().backward()
    with SavedTensors() as saved, torch.no_grad():
        dropout(x, 0.1)
    dropout(x.detach(), 0.1)
    assert saved.tensors == []


def test_without_grad_no_state_is_kept(device: torch.device) -> None:
    x = normal(100, device=device)
    with RecordOps() as record:
        dropout(x, 0.1)
        dropout(x.requires_grad_(), 0.1)
    calls = record.arguments_of(ops._dropout_forward.default)
    assert [call.get("for_backward", True) for call in calls] == [False, True]
    assert len(record.ops) == 2


def test_gradient_is_the_mask(device: torch.device) -> None:
    x = normal(35, 130, device=device).requires_grad_()
    output = dropout(x, 0.1)
    grad = normal(35, 130, device=device).cos()
    (gradient,) = torch.autograd.grad(output, x, grad, retain_graph=True)
    (again,) = torch.autograd.grad(output, x, grad)
    keep = (output != 0).float()
    torch.testing.assert_close(gradient, grad * keep / 0.9)
    assert torch.equal(gradient, again)


def test_gradcheck_and_gradgradcheck(device: torch.device) -> None:
    x = normal(3, 7, dtype=torch.float64, device=device).requires_grad_()

    def function(x: Tensor) -> Tensor:
        torch.manual_seed(4)
        return dropout(x, 0.3)

    torch.autograd.gradcheck(function, (x,))
    torch.autograd.gradgradcheck(function, (x,))


def test_third_derivative_has_the_same_mask(device: torch.device) -> None:
    x = normal(50, dtype=torch.float64, device=device).requires_grad_()
    torch.manual_seed(0)
    y = dropout(x, 0.5).pow(3).sum()
    (first,) = torch.autograd.grad(y, x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    (third,) = torch.autograd.grad(second.sum(), x)
    torch.manual_seed(0)
    keep = (dropout(torch.ones_like(x), 0.5) != 0).double()
    torch.testing.assert_close(third, 6 * 8 * keep)
