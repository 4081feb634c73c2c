"""Proves: where frameworks free a weight between forward and backward (FSDP its storage, ZeRO of
DeepSpeed the parameter's data), no other module's backward needs it, and a recipe never takes an
empty weight for none; parameters whose data is exchanged are held as without recipes.
"""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import memopt.functional as M
from tests.recipes.support import FEATURES, leaf, scope

ROWS = 4
BYTES = FEATURES * 4


class Sharded:
    """A weight that is in memory for its module's forward and backward alone."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.whole = leaf(FEATURES, seed=3).detach()
        self.weight = self.whole.clone().requires_grad_()

    def free(self) -> None:
        if self.how == "storage":
            self.weight.untyped_storage().resize_(0)
        else:
            self.weight.data = torch.empty(0)

    def gather(self) -> None:
        if self.how == "storage":
            self.weight.untyped_storage().resize_(BYTES)
            self.weight.data.copy_(self.whole)
        else:
            self.weight.data = self.whole.clone()


def run(recipes: bool, how: str, consumers: int = 1) -> list[Tensor | None]:
    """A norm that is gathered, freed, and gathered when its backward begins; `consumers` linears
    read its output, the first of them before the weight is freed if there are two.
    """
    x, norm = leaf(ROWS, FEATURES), Sharded(how)
    linears = [leaf(FEATURES, FEATURES, seed=5 + i) for i in range(consumers)]
    with scope(recipes):
        y = M.layer_norm(x, (FEATURES,), norm.weight)
        outputs = [F.linear(y, linear) for linear in linears[1:]]
        norm.free()
        last = F.linear(y, linears[0])
        # The last node runs first; it must do without. Then all is there.
        last.sum().backward(retain_graph=True, inputs=[linears[0]])
        norm.gather()
        torch.stack([last, *outputs]).square().sum().backward()
    return [x.grad, norm.weight.grad, *(linear.grad for linear in linears)]


@pytest.mark.parametrize("consumers", [1, 2])
@pytest.mark.parametrize("how", ["storage", "data"])
def test_another_module_s_backward_does_not_need_the_weight(how: str, consumers: int) -> None:
    for a, e in zip(run(True, how, consumers), run(False, how, consumers), strict=True):
        assert a is not None
        assert e is not None
        assert torch.equal(a, e)


def test_a_weight_that_is_freed_too_late_for_that_is_missed_by_name() -> None:
    x, norm, linear = leaf(ROWS, FEATURES), Sharded("storage"), leaf(FEATURES, FEATURES, seed=5)
    with scope(True):
        loss = F.linear(M.layer_norm(x, (FEATURES,), norm.weight), linear).sum()
    norm.free()
    with pytest.raises(RuntimeError, match=r"that a recipe reads must be in memory in backward"):
        loss.backward()


def test_a_parameter_s_exchanged_data_is_not_kept() -> None:
    norm = Sharded("data")
    with scope(True):
        loss = M.layer_norm(leaf(ROWS, FEATURES), (FEATURES,), norm.weight).sum()
    storage = weakref.ref(norm.weight.untyped_storage())
    norm.free()
    assert storage() is None
    norm.gather()
    loss.backward()
