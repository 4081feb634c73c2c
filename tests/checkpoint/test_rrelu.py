"""Proves: rrelu in training, the one op of PyTorch that saves a tensor (its noise) before it writes
it, has the plain run's outputs and gradients, in every bit, where saved tensors are copied away at
once, and where a region's recompute ends with the last tensor that is saved.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import torchgen
from torch import Tensor, nn

import memopt

FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "function": lambda x: F.rrelu(x, training=True),
    "in place": lambda x: F.rrelu(x.clone(), training=True, inplace=True),
    "module": nn.RReLU(0.2, 0.7),
    "one slope": lambda x: F.rrelu(x, 0.25, 0.25, training=True),
    "evaluation": lambda x: F.rrelu(x, training=False),
    "followed": lambda x: F.rrelu(x, training=True).exp(),
}


def offloaded(form: Callable[[Tensor], Tensor], x: Tensor, directory: Path) -> Tensor:
    with memopt.offload("disk", directory=directory, min_bytes=0, keep_last=0):
        return form(x)


def copied_at_once(form: Callable[[Tensor], Tensor], x: Tensor, directory: Path) -> Tensor:
    """What an offload may do, without the race."""

    class Handle:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor.clone()

        def restore(self) -> Tensor:
            return self.tensor

    class Copies:
        def pack(self, tensor: Tensor) -> Handle:
            return Handle(tensor)

    with memopt.saved_tensors(Copies()):
        return form(x)


def region(form: Callable[[Tensor], Tensor], x: Tensor, directory: Path) -> Tensor:
    return memopt.checkpoint(form, x)


def region_offloading(form: Callable[[Tensor], Tensor], x: Tensor, directory: Path) -> Tensor:
    return memopt.checkpoint(form, x, offload=directory)


def recipes(form: Callable[[Tensor], Tensor], x: Tensor, directory: Path) -> Tensor:
    with memopt.recipes():
        return form(x)


WAYS = [offloaded, copied_at_once, region, region_offloading, recipes]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_gradients_are_those_of_the_plain_run(
    form: Callable[[Tensor], Tensor],
    way: Callable[..., Tensor],
    device: torch.device,
    tmp_path: Path,
) -> None:
    x = torch.randn(64, 1000, device=device, requires_grad=True)
    results = []
    for run in (form, lambda x: way(form, x, tmp_path)):
        torch.manual_seed(1)
        y = run(x * 1)
        results.append((y.detach().clone(), *torch.autograd.grad(y.square().sum(), x)))
        results[-1] += (torch.rand(1),)  # drawn by both alike
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_no_other_op_of_pytorch_saves_what_it_writes_afterwards() -> None:
    """A derivative that reads an argument which is not the op's first and which the op writes."""
    path = Path(torchgen.__file__).parent / "packaged" / "autograd" / "derivatives.yaml"
    found = set()
    for entry in path.read_text().split("\n- name: ")[1:]:
        schema, *lines = entry.splitlines()
        formulas = " ".join(line for line in lines if not line.lstrip().startswith("#"))
        for written in re.findall(r"Tensor\(\w!\) (\w+)", schema):
            reads = re.search(rf"\b{written}\b", formulas)
            if written != "self" and reads:
                found.add(schema.split("(")[0])
    # Batch norms read running statistics in evaluation only, where they are not written.
    assert found <= {
        "rrelu_with_noise",
        "rrelu_with_noise_",
        "_native_batch_norm_legit",
        "_batch_norm_with_update",
    }
    assert "rrelu_with_noise" in found
