"""Proves: a step may be a function that runs forward and backward itself, as often and in the order
it likes. Plans, anatomies, checks and regions are of what it does; peaks are the allocator's.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memopt
from memopt.applied import assigned
from memopt.memory.allocator import LiveBytes
from tests.plan.models import Block
from tests.plan.support import looks, planned_or_refused, without_regions

WIDTH = 16
Function = Callable[[Any, Any], None]


class Tower(nn.Module):
    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(count))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x).tanh()
        return out


def plain(model: Tower, x: Tensor) -> None:
    model(x).mean().backward()


def two_backwards(model: Tower, x: Tensor) -> None:
    """Of one forward each, one after another."""
    model(x).mean().backward()
    (model(2 * x).square().mean() + 1).backward()


def twice_through_one_graph(model: Tower, x: Tensor) -> None:
    out = model(x)
    out.mean().backward(retain_graph=True)
    out.square().mean().backward()


def gradient_penalty(model: Tower, x: Tensor) -> None:
    x = x.detach().requires_grad_()
    out = model(x)
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    (out.mean() + (grad.flatten(1).norm(dim=1) - 1).square().mean()).backward()


def gan(models: nn.ModuleList, noise: Tensor) -> None:
    """Two models, two losses, and the second backward passes both of them."""
    generator, discriminator = models
    fake = generator(noise).expand_as(noise)
    real_loss = F.softplus(-discriminator(noise)).mean()
    (real_loss + F.softplus(discriminator(fake.detach())).mean()).backward()
    F.softplus(-discriminator(fake)).mean().backward()


def sharpness(model: Tower, x: Tensor) -> None:
    """Sharpness-aware minimization: the gradients where the first ones lead uphill."""
    model(x).square().mean().backward()
    parameters = [p for p in model.parameters() if p.grad is not None]
    with torch.no_grad():
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        before = [p.clone() for p in parameters]
        for parameter in parameters:
            parameter.add_(0.05 / norm * parameter.grad)
    model.zero_grad()
    model(x).square().mean().backward()
    with torch.no_grad():
        for parameter, weights in zip(parameters, before, strict=True):
            parameter.copy_(weights)


STEPS: dict[str, tuple[Callable[[], nn.Module], Function]] = {
    "plain": (Tower, plain),
    "two backwards": (Tower, two_backwards),
    "twice through one graph": (Tower, twice_through_one_graph),
    "a gradient penalty": (Tower, gradient_penalty),
    "sharpness": (Tower, sharpness),
    "a GAN": (lambda: nn.ModuleList([Tower(), Tower(3)]), gan),
}


def batch() -> Tensor:
    return torch.randn(8, 24, WIDTH, generator=torch.Generator().manual_seed(1))


def gradients_of(model: nn.Module, step: Function) -> dict[str, Tensor]:
    model.zero_grad()
    step(model, batch())
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def allocated(model: nn.Module, step: Function) -> int:
    x = batch()
    gradients_of(model, step)
    gc.collect()
    with LiveBytes() as live:
        step(model, x)
    model.zero_grad()
    return live.most


@pytest.mark.parametrize("name", STEPS)
def test_plans_hold_and_bits_stay(name: str) -> None:
    torch.manual_seed(0)
    make, step = STEPS[name]
    model, x = make(), batch()
    before = looks(model)
    rich = memopt.plan(model, x, 1 << 30, step=step, measure=False, optimizer=None)
    assert len(rich.profile.blocks) == sum(isinstance(m, Block) for m in model.modules())
    for share in (0.8, 0.5):
        plan, error = planned_or_refused(rich, int(share * rich.plain_peak))
        if error is not None:
            plan = rich.within(error.floor)
        assert plan.peak < rich.plain_peak
        with assigned(model, without_regions(plan)):
            expected = gradients_of(model, step)
        plan.apply()
        assert plan.measured_peak is not None
        assert plan.measured_peak <= plan.budget
        counted = allocated(model, step) + plan.profile.base
        found = gradients_of(model, step)
        plan.undo()
        assert counted <= plan.peak * 1.01
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in found)
    assert looks(model) == before


@pytest.mark.parametrize("name", STEPS)
def test_an_anatomy_is_of_what_the_function_does(name: str) -> None:
    torch.manual_seed(0)
    make, step = STEPS[name]
    model = make()
    found = memopt.anatomy(model, batch(), step=step, measure=True, optimizer=None)
    assert found.predicted is not None
    assert found.measured is not None
    assert found.predicted.peak.total == found.measured.peak.total
    weights = sum(p.nbytes for p in model.parameters())
    counted = allocated(model, step) + weights + batch().nbytes
    assert counted == pytest.approx(found.predicted.peak.total, rel=0.01)


def test_a_function_that_does_what_a_step_does_has_its_plan() -> None:
    model, x = Tower(), batch()
    given = memopt.plan(model, x, 1 << 30, step=plain, measure=False)
    known = memopt.plan(model, x, 1 << 30, loss=lambda out: out.mean(), measure=False)
    assert given.plain_peak == known.plain_peak
    budget = int(0.6 * known.plain_peak)
    assert given.within(budget).assignment.choices == known.within(budget).assignment.choices


def test_regions_and_a_check_of_a_gan() -> None:
    torch.manual_seed(0)
    models = STEPS["a GAN"][0]()
    expected = gradients_of(models, gan)
    regions = memopt.apply_activation_checkpointing(models, batch=batch(), step=gan)
    assert regions
    found = gradients_of(models, gan)
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    check = memopt.check(models, batch(), step=gan)
    assert check.ok
    assert {block.path for block in check.blocks} >= set(regions)
    memopt.unwrap(models)


def test_convert_chooses_regions_by_a_function() -> None:
    """The models in the list cannot be called as one."""
    torch.manual_seed(0)
    models = STEPS["a GAN"][0]()
    memopt.convert(models)
    expected = gradients_of(models, gan)
    memopt.revert(models)
    report = memopt.convert(models, batch(), checkpoint=True, step=gan)
    assert report.checkpointed
    assert report.bytes_before is None
    assert any("memopt.check(model, batch, step=step)" in note for note in report.notes)
    found = gradients_of(models, gan)
    assert memopt.check(models, batch(), step=gan).ok
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_rows_in_chunks_are_found_by_a_function() -> None:
    models = nn.ModuleList([Tower(1)])

    def step(models: nn.ModuleList, x: Tensor) -> None:
        plain(models[0], x)

    report = memopt.convert(models, batch(), checkpoint=True, chunks=4, step=step)
    assert report.in_chunks == ("0",)


def test_the_largest_batch_of_a_function() -> None:
    model, x = Tower(), batch()
    peak = memopt.plan(model, x, 1 << 30, step=plain, measure=False, optimizer=None).plain_peak
    rows = memopt.largest_batch(model, x, peak, step=plain, optimizer=None)
    assert rows == x.size(0)


def test_the_longest_sequence_of_a_function() -> None:
    model, x = Tower(), batch()
    peak = memopt.anatomy(model, x, step=two_backwards, optimizer=None).peak.total
    for budget, length in ((peak, x.size(1)), (peak - 1, x.size(1) - 1)):
        found = memopt.longest_sequence(model, x[:, :2], budget, step=two_backwards, optimizer=None)
        assert found == length


def test_whether_a_function_fits() -> None:
    """By the peak of its anatomy; and what would make it fit is of the function too."""
    torch.manual_seed(0)
    make, step = STEPS["a GAN"]
    models, x = make(), batch()
    peak = memopt.anatomy(models, x, step=step, optimizer=None).peak.total
    assert memopt.fits(models, x, peak, step=step, optimizer=None)
    found = memopt.fits(models, x, peak - 1, step=step, optimizer=None)
    assert not found
    assert found.spare == -1
    assert found.ways[0].fits


@pytest.mark.parametrize(
    ("step", "options", "error", "said"),
    [
        (3, {}, TypeError, "step must be a function of the model and a batch, got int"),
        (lambda model: None, {}, TypeError, "step must be a function of the model and a batch"),
        (lambda model, x: model(x), {}, ValueError, "step must run backward, got a function"),
        (plain, {"loss": torch.mean}, ValueError, "loss must not be given with step"),
    ],
    ids=["no function", "one argument", "no backward", "a loss too"],
)
def test_bad_steps_are_named(
    step: Any, options: dict[str, Any], error: type[Exception], said: str
) -> None:
    model = Tower()
    before = looks(model)
    for ask in (
        lambda: memopt.plan(model, batch(), 1 << 30, step=step, measure=False, **options),
        lambda: memopt.anatomy(model, batch(), step=step, **options),
        lambda: memopt.check(model, batch(), step=step, **options),
        lambda: memopt.fits(model, batch(), 1 << 30, step=step, **options),
        lambda: memopt.largest_batch(model, batch(), 1 << 30, step=step, **options),
        lambda: memopt.longest_sequence(model, batch(), 1 << 30, step=step, **options),
    ):
        with pytest.raises(error, match=said):
            ask()
    assert looks(model) == before


def test_regions_by_a_step_need_a_batch() -> None:
    for ask in (memopt.apply_activation_checkpointing, memopt.convert):
        with pytest.raises(ValueError, match="step must be given with a batch"):
            ask(Tower(), step=plain)
