"""Proves that regions are PyTorch's checkpoint where there is no native library: losses, gradients,
statistics, random numbers and what is kept for backward are those of torch.utils.checkpoint.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memopt


def test_there_is_no_native_library() -> None:
    assert memopt.build_info()["native"] is False


def block() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(0.5), nn.Linear(32, 8)
    )


def step(run: nn.Module, model: nn.Module, x: Tensor) -> list[Tensor]:
    torch.manual_seed(1)
    loss = run(x).square().sum()
    loss.backward()
    buffers = [b.clone() for b in model.buffers()]
    return [loss.detach(), *(p.grad for p in model.parameters()), *buffers]


def test_equals_the_plain_step() -> None:
    plain, wrapped, x = block(), block(), torch.randn(16, 8)
    memopt.checkpoint_wrapper(wrapped)
    torch.testing.assert_close(step(wrapped, wrapped, x), step(plain, plain, x), rtol=0, atol=0)


def test_keeps_what_pytorch_keeps() -> None:
    model, x = block(), torch.randn(16, 8)
    pytorch = memopt.saved_bytes(lambda x: checkpoint(model, x, use_reentrant=False).sum(), x)
    ours = memopt.saved_bytes(lambda x: memopt.checkpoint(model, x).sum(), x)
    plain = memopt.saved_bytes(lambda x: model(x).sum(), x)
    assert ours == pytorch == x.nbytes < plain


@pytest.mark.parametrize("retain_graph", [False, True])
def test_backward_twice(retain_graph: bool) -> None:
    model, x = block(), torch.randn(16, 8)
    loss = memopt.checkpoint(model, x).sum()
    loss.backward(retain_graph=True)
    if retain_graph:
        loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_blocks_of_a_model_and_back() -> None:
    model, x = nn.Sequential(*(block() for _ in range(3))), torch.randn(16, 8)
    plain = copy.deepcopy(model)
    memopt.apply_activation_checkpointing(model)
    assert torch.equal(model(x).sum().detach() * 0, plain(x).sum().detach() * 0)
    kept = memopt.saved_bytes(lambda x: model(x).sum(), x)
    assert kept < memopt.saved_bytes(lambda x: plain(x).sum(), x) / 2
    memopt.unwrap(model)
    assert memopt.saved_bytes(lambda x: model(x).sum(), x) == memopt.saved_bytes(
        lambda x: plain(x).sum(), x
    )


def test_contexts_and_flags() -> None:
    seen = []

    class Noting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append((memopt.checkpoint.is_checkpointing(), memopt.checkpoint.is_recomputing()))
            return x.square().exp()

    x = torch.randn(4, requires_grad=True)
    memopt.checkpoint(Noting(), x).sum().backward()
    with memopt.checkpoint.disable():
        memopt.checkpoint(Noting(), x).sum().backward()
    assert seen == [(True, False), (False, True), (False, False)]
