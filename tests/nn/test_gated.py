"""Proves: the gated units' modules run memopt's ops, of two tensors and of one, and copy."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import memopt
from tests.support.modules import assert_copies
from tests.support.record_ops import RecordOps


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("approximate", [None, "none", "tanh"])
def test_of_two_tensors_and_of_one(
    approximate: str | None, interleaved: bool, device: torch.device
) -> None:
    if approximate is None:
        module = memopt.nn.SwiGLU(interleaved)
    else:
        module = memopt.nn.GEGLU(approximate, interleaved)
    gate, up = torch.randn(3, 7, device=device), torch.randn(3, 7, device=device)
    packed = torch.stack((gate, up), -1 if interleaved else -2).flatten(-2)
    with RecordOps() as ops:
        outputs = module(gate, up), module(packed)
    ours = torch.ops.memopt
    assert ops.ops == [ours._gated_forward.default, ours._gated_packed_forward.default]
    value = F.silu(gate) if approximate is None else F.gelu(gate, approximate=approximate)
    assert torch.equal(outputs[0], outputs[1])
    torch.testing.assert_close(outputs[0], value * up)
    assert_copies(module, packed)


def test_repr() -> None:
    assert repr(memopt.nn.SwiGLU()) == "SwiGLU()"
    assert repr(memopt.nn.SwiGLU(interleaved=True)) == "SwiGLU(interleaved=True)"
    assert repr(memopt.nn.GEGLU("tanh")) == "GEGLU(approximate='tanh')"


def test_mistakes_are_named() -> None:
    x = torch.zeros(2, 4)
    with pytest.raises(
        RuntimeError, match=r"swiglu: up must have gate's shape \[2, 4\], got \[2\]"
    ):
        memopt.nn.SwiGLU()(x, torch.zeros(2))
    with pytest.raises(RuntimeError, match="geglu: approximate must be 'none' or 'tanh', got 'x'"):
        memopt.nn.GEGLU("x")(x, x)
