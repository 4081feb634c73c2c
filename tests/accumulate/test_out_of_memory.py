"""A micro-batch that runs out of memory leaves nothing: gradients, of the model's and of a loss's
weights, random numbers and buffers are those of a run that took fewer rows from the beginning.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt._accumulate import loop
from tests.accumulate.test_accumulate import WIDTH, WORDS, gradients, net


class Limited(nn.Module):
    """Runs out of memory with more than `most` rows: in forward, or in backward before or after
    gradients are there.
    """

    def __init__(self, most: int, where: str, failures: int = 100) -> None:
        super().__init__()
        self.first, self.norm, self.last = net(), nn.BatchNorm1d(WORDS).double(), net(0.5)
        self.middle = nn.Linear(WORDS, WIDTH).double()
        self.most, self.where, self.failures = most, where, failures

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.first(x))
        if len(x) > self.most and self.failures:
            if self.where == "forward":
                self._fail()
            at = y if self.where == "late" else x
        else:
            return self.last(self.middle(y)).mean()
        if self.where == "late":
            at.register_hook(lambda _: self._fail())
            return self.last(self.middle(y)).mean()
        loss = self.last(self.middle(y)).mean()
        loss.register_hook(lambda _: self._fail())
        return loss

    def _fail(self) -> None:
        self.failures -= 1
        raise torch.OutOfMemoryError("out of memory, for a test")


class Fails(nn.Module):
    """Is interrupted in its third call."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 3:
            raise KeyboardInterrupt
        return x


class Scaled(nn.Module):
    """A loss with a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, loss: Tensor) -> Tensor:
        return self.scale * loss


@pytest.mark.parametrize("where", ["forward", "early", "late"])
@pytest.mark.parametrize("with_gradients", [False, True])
def test_memory_runs_out(where: str, with_gradients: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits of the run that took the smaller micro-batches from the beginning: the same random
    numbers, the same statistics, nothing counted twice.
    """
    monkeypatch.setattr(loop, "largest_micro_batch", lambda *_: 12)
    x = torch.randn(12, WIDTH, dtype=torch.float64)
    model = Limited(3, where)
    before = [torch.randn_like(p) for p in model.parameters()] if with_gradients else []
    reference = copy.deepcopy(model)
    for one in (model, reference):
        for p, gradient in zip(one.parameters(), before, strict=False):
            p.grad = gradient.clone()
    state = torch.get_rng_state()
    result = memopt.accumulate(model, x, budget=1 << 30)
    assert result.out_of_memory == 2
    assert result.micro_batch == 3
    assert result.micro_batches == 4
    torch.set_rng_state(state)
    wanted = memopt.accumulate(reference, x, micro_batch=3)
    assert torch.equal(result.loss, wanted.loss)
    assert all(
        torch.equal(a, b) for a, b in zip(gradients(model), gradients(reference), strict=True)
    )
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), reference.buffers(), strict=True))
    assert memopt.accumulate(model, x, budget=1 << 30).out_of_memory == 0  # it has learnt


@pytest.mark.parametrize("where", ["early", "late"])
def test_gradients_of_a_loss_with_weights_count_once(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a loss that is a module are there before memory runs out, and go back too."""
    monkeypatch.setattr(loop, "largest_micro_batch", lambda *_: 12)
    model, x = Limited(3, where), torch.randn(12, WIDTH, dtype=torch.float64)
    loss = Scaled()
    reference, loss_alone = copy.deepcopy((model, loss))
    state = torch.get_rng_state()
    result = memopt.accumulate(model, x, budget=1 << 30, loss=loss)
    assert result.out_of_memory == 2
    torch.set_rng_state(state)
    memopt.accumulate(reference, x, micro_batch=3, loss=loss_alone)
    for a, b in zip(gradients(loss), gradients(loss_alone), strict=True):
        assert torch.equal(a, b)


def test_one_row_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "largest_micro_batch", lambda *_: 4)
    with pytest.raises(torch.OutOfMemoryError, match="for a test"):
        memopt.accumulate(
            Limited(0, "forward").eval(), torch.randn(4, WIDTH).double(), budget=1 << 30
        )


def test_a_given_number_is_not_changed() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="for a test"):
        memopt.accumulate(Limited(2, "forward"), torch.randn(5, WIDTH).double(), micro_batch=3)


@pytest.mark.parametrize("options", [{"micro_batch": 3}, {"budget": 1 << 30}])
def test_an_error_leaves_no_part_of_the_gradients(
    options: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch can be tried again: gradients of the first micro-batches counted twice."""
    monkeypatch.setattr(loop, "largest_micro_batch", lambda *_: 3)
    x = torch.randn(12, WIDTH, dtype=torch.float64)
    model = nn.Sequential(net(), Fails())
    reference = copy.deepcopy(model)
    with pytest.raises(KeyboardInterrupt):
        memopt.accumulate(model, x, loss=torch.mean, **options)
    assert all(p.grad is None for p in model.parameters())
    memopt.accumulate(model, x, loss=torch.mean, micro_batch=3)
    reference[-1].calls = 3
    memopt.accumulate(reference, x, loss=torch.mean, micro_batch=3)
    assert gradients(model)
    for a, b in zip(gradients(model), gradients(reference), strict=True):
        assert torch.equal(a, b)
