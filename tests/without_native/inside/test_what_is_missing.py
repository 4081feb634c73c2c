"""Proves that whatever needs the native library says so in one sentence, in the name of what was
called, and leaves the model as it was; and that all public names are there.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import memopt


def chain() -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU())


X = torch.randn(4, 8)
CALLS: dict[str, Callable[[nn.Sequential], object]] = {
    "memopt.convert": memopt.convert,
    "memopt.convert ": lambda model: memopt.convert(model, X, checkpoint=True),
    "memopt.saved_tensors": lambda model: memopt.recipes(),
    "memopt.offload": lambda model: memopt.offload("cpu").__enter__(),
    "memopt.offload ": lambda model: memopt.checkpoint(model, X, offload="cpu"),
    "memopt.offload.configure": lambda model: memopt.offload.configure(max_host_bytes=1 << 20),
    "memopt.functional.activation": lambda model: memopt.functional.gelu(X),
    "memopt.functional.layer_norm": lambda model: memopt.nn.LayerNorm(8)(X),
    "memopt.functional.linear_cross_entropy": lambda model: memopt.functional.linear_cross_entropy(
        X, torch.randn(3, 8), torch.tensor([0, 1, 2, 0])
    ),
    "memopt.checkpoint.buffers": lambda model: memopt.checkpoint.buffers(
        memopt.checkpoint_wrapper(model)
    ),
    "memopt.checkpoint(debug=True)": lambda model: memopt.checkpoint(model, X, debug=True),
}


@pytest.mark.parametrize("name", CALLS)
def test_is_said_in_one_sentence(name: str) -> None:
    model = chain()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(RuntimeError, match="needs memopt's native library") as error:
        CALLS[name](model)
    assert str(error.value).startswith(name.strip())
    assert "pip install" in str(error.value)
    assert [type(module) for module in model.modules()] == kinds
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def test_a_plan_with_a_place_to_offload_to(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"memopt\.offload needs memopt's native library"):
        memopt.plan(chain(), X, "1GB", loss=Tensor.sum, offload=tmp_path)


@pytest.mark.parametrize("name", memopt.__all__)
def test_public_names_are_there(name: str) -> None:
    assert getattr(memopt, name) is not None
