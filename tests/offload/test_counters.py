"""Proves: a copy of a storage serves another tensor on it only if both count the same writes. Parts
that PyTorch's recurrent cells make (unsafe_chunk) count theirs apart: each is written in place
before it is saved, and a copy that was made for the first is older than the second's writes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

import memopt
from tests.support.bits import assert_same_bits

INPUTS, HIDDEN, ROWS, LENGTH = 8, 8, 4, 7
CELLS = {"GRUCell": nn.GRUCell, "LSTMCell": nn.LSTMCell}
LAYERS = {"GRU": nn.GRU, "LSTM": nn.LSTM}


def result(module: nn.Module, x: Tensor, packed: bool) -> Tensor:
    if isinstance(module, nn.RNNCellBase):
        state = module(x[0])
        return state if isinstance(state, Tensor) else state[0]
    given = pack_sequence(list(x.unbind(1)), enforce_sorted=False) if packed else x
    output = module(given)[0]
    return output if isinstance(output, Tensor) else output.data


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ["GRU", "LSTM", "GRU packed", "LSTM packed", *CELLS])
def test_recurrent_modules(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    name, _, packed = kind.partition(" ")
    torch.manual_seed(0)
    module = (LAYERS | CELLS)[name](INPUTS, HIDDEN).to(dtype)
    x = torch.randn(LENGTH, ROWS, INPUTS, dtype=dtype)

    def gradients() -> list[Tensor]:
        loss = result(module, x, bool(packed)).square().sum()
        return list(torch.autograd.grad(loss, list(module.parameters())))

    plain = gradients()
    with memopt.offload("disk", directory=tmp_path, min_bytes=1, keep_last=0):
        loss = result(module, x, bool(packed)).square().sum()
    offloaded = list(torch.autograd.grad(loss, list(module.parameters())))
    assert_same_bits(offloaded, plain)


def test_parts_that_are_written_one_after_the_other(tmp_path: Path) -> None:
    x = torch.randn(64, 32, requires_grad=True)

    def loss() -> Tensor:
        first, second = (x * 2).unsafe_chunk(2, dim=1)
        return first.sigmoid_().sum() + second.tanh_().sum()

    with memopt.offload("disk", directory=tmp_path, min_bytes=1, keep_last=0):
        offloaded = loss()
    (ours,), (plain,) = torch.autograd.grad(offloaded, x), torch.autograd.grad(loss(), x)
    assert torch.equal(ours, plain)
