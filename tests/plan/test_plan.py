"""Proves: a plan keeps its word. The peak that it predicts is the one that the ledger of a real
step and the allocator's own count have, and is within the budget; gradients are those of the same
ops without regions in every bit; and a plan that is taken off leaves nothing behind.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import memopt
from memopt._plan.choices import CHOICES
from memopt._plan.curve import curve_of
from memopt._plan.plan import Plan
from memopt._plan.terms import uniform
from memopt.applied import assign, assigned
from memopt.assignment import Assignment
from tests.plan.models import MODELS, Chain, branched, chain, tokens
from tests.plan.support import (
    allocated_above,
    gradients,
    looks,
    planned_or_refused,
    without_regions,
)

EVERYTHING = 1 << 30


@pytest.fixture(scope="module", params=sorted(MODELS))
def rich(request: pytest.FixtureRequest) -> tuple[nn.Module, Any, Plan]:
    """A model, its batch, and the plan for a budget that everything fits in."""
    model, batch = MODELS[request.param]()
    return model, batch, memopt.plan(model, batch, EVERYTHING, measure=False)


def budgets(plan: Plan) -> list[int]:
    """Evenly, from the least that some plan takes up to what the model takes without one."""
    least = curve_of(plan.profile, plan.terms, 2).plans[0].peak
    return [least + (plan.plain_peak - least) * part // 4 for part in range(5)]


def test_keeps_to_its_budget(rich: tuple[nn.Module, Any, Plan]) -> None:
    """At five budgets from the floor up: the prediction is the measured peak."""
    model, batch, all_fits = rich
    found = 0
    for budget in budgets(all_fits):
        plan, refused = planned_or_refused(all_fits, budget)
        if refused is not None:
            # The search's own floor may be a little below what really fits.
            assert budget < refused.floor <= 1.05 * budget
            continue
        found += 1
        assert plan.peak <= budget
        plan.apply()
        try:
            assert plan.measured_peak == plan.peak
            # Under the ledger nothing is written over, so that the allocator may see less.
            base, optimizer = plan.profile.base, plan.profile.optimizer
            counted = base + max(optimizer, allocated_above(model, batch))
            assert counted <= plan.peak + 4096
            assert counted >= 0.97 * plan.peak
        finally:
            plan.undo()
    assert found >= 4


def test_gradients_are_those_without_regions(rich: tuple[nn.Module, Any, Plan]) -> None:
    """In every bit, at each budget: what is computed again is what it was."""
    model, batch, all_fits = rich
    for budget in budgets(all_fits)[1:4]:
        plan = all_fits.within(budget)
        with assigned(model, without_regions(plan)):
            expected = gradients(model, batch)
        plan.apply(watch=False)
        found = gradients(model, batch)
        plan.undo()
        assert found.keys() == expected.keys()
        for name, gradient in found.items():
            assert torch.equal(gradient, expected[name]), name


def test_less_memory_never_is_faster(rich: tuple[nn.Module, Any, Plan]) -> None:
    """By the arithmetic that plans are chosen by: with a smaller budget the peak is not higher, the
    time not less.
    """
    _, _, plan = rich
    curve = plan.pareto(count=12)
    peaks = [point.peak for point in curve.plans]
    seconds = [point.seconds for point in curve.plans]
    assert peaks == sorted(peaks)
    assert seconds == sorted(seconds, reverse=True)


def test_no_setting_by_hand_is_better(rich: tuple[nn.Module, Any, Plan]) -> None:
    """Of those that treat all blocks alike, none is both within the peak of a plan and faster."""
    _, _, plan = rich
    curve = plan.pareto(count=100)
    for setting in curve.settings[:3]:
        best = min(p.seconds for p in curve.plans if p.peak <= setting.peak)
        assert best <= setting.seconds * (1 + 1e-9), setting.name


def test_undo_leaves_nothing() -> None:
    """Classes, attributes, hooks, parameters and gradients are the same objects as before; so too
    after the step that apply watches.
    """
    model, batch = chain()
    model(batch).backward()
    before = looks(model), {n: (p, p.grad) for n, p in model.named_parameters()}
    random = torch.get_rng_state()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    plan = memopt.plan(model, batch, EVERYTHING, steps=1)
    for share in (0.9, 0.5):
        plan = plan.within(int(share * plan.plain_peak)).apply()
        plan.undo()
    assert looks(model) == before[0]
    assert torch.equal(torch.get_rng_state(), random)
    for name, parameter in model.named_parameters():
        assert parameter is before[1][name][0]
        assert parameter.grad is before[1][name][1]
        assert torch.equal(parameter.grad, grads[name])


def test_each_choice_does_what_it_says() -> None:
    """The bytes that a block holds with each choice, by the allocator's count: recipes drop the
    norm's and GELU's outputs, a checkpoint all but the block's input; exact.
    """
    rows, features = 4 * 64, 32
    element = rows * features * 4
    held = {}
    for choice in CHOICES:
        model, batch = chain()
        plan = memopt.plan(model, batch, EVERYTHING, measure=False)
        held[str(choice)] = plan.profile.nbytes[0, choice].resident
    statistics = 2 * rows * 4
    assert held["keep"] == (1 + 1 + 4 + 4) * element + statistics
    assert held["recipes"] == (1 + 4) * element + statistics
    assert held["checkpoint"] == held["recipes + checkpoint"] == element


def test_blocks_of_one_kind_share_the_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six equal blocks: one step shows all four choices; six different ones take four steps."""
    from memopt._plan import samples

    counts = []
    original = samples.profile_of

    def counted(*args: Any) -> Any:
        found = original(*args)
        counts.append(len(found[1]))
        return found

    import memopt._plan.live as live

    monkeypatch.setattr(live, "profile_of", counted)
    for name in ("chain", "uneven"):
        model, batch = MODELS[name]()
        memopt.plan(model, batch, EVERYTHING, measure=False)
    assert counts == [1, 4]


def test_the_arithmetic_knows_what_is_between_blocks() -> None:
    """Before any plan is predicted whole: what runs behind the last block of the encoder is not
    taken for a cost of its other blocks, nor is it left out.
    """
    model, batch = branched()
    plan = memopt.plan(model, batch, EVERYTHING, measure=False)
    assert plan.live is not None
    plan.profile.exact.clear()
    for choice in CHOICES:
        whole = plan.live.look(Assignment(dict.fromkeys(plan.profile.blocks, choice)))
        counted = uniform(plan.profile, choice, plan.terms)
        assert counted.peak == pytest.approx(whole.nbytes.peak, rel=0.01)


def test_the_optimizer_counts() -> None:
    """With AdamW two more numbers for each parameter are there; with none neither."""
    model, batch = chain()
    parameters = sum(p.nbytes for p in model.parameters())
    sizes = [
        memopt.plan(model, batch, EVERYTHING, measure=False, optimizer=kind).profile.base
        for kind in (None, torch.optim.AdamW)
    ]
    states = 2 * parameters + 4 * len(list(model.parameters()))  # and the counts of steps
    assert sizes[1] - sizes[0] == states


def test_accumulation_counts_gradients() -> None:
    """In micro-batches gradients are there from the beginning, and less of the batch at a time."""
    model, batch = chain()
    whole = memopt.plan(model, batch, EVERYTHING, measure=False)
    halves = memopt.plan(model, batch, EVERYTHING, measure=False, micro_batches=2)
    gradients_of = sum(p.nbytes for p in model.parameters())
    assert halves.profile.base == whole.profile.base + gradients_of
    kept = [plan.profile.nbytes[0, CHOICES[0]].resident for plan in (whole, halves)]
    assert kept[1] * 2 == kept[0]


def test_another_model_of_the_architecture_takes_it(tmp_path: Any) -> None:
    """A plan that was saved and loaded is the same, and changes a model that it never saw alike."""
    model, batch = chain()
    plan = memopt.plan(model, batch, EVERYTHING, measure=False)
    plan = plan.within(int(0.5 * plan.plain_peak))
    plan.save(tmp_path / "plan.json")
    loaded = memopt.Plan.load(tmp_path / "plan.json")
    assert loaded.to_dict() == plan.to_dict()
    assert (loaded.profile, loaded.terms) == (plan.profile, plan.terms)
    assert str(loaded) == str(plan)
    assert loaded.pareto(count=5) == plan.pareto(count=5)
    other, _ = chain()
    before = looks(other)
    loaded.apply(other)
    peak = allocated_above(other, batch)
    loaded.undo()
    assert looks(other) == before
    plan.apply()
    assert peak == allocated_above(model, batch)


def test_training_with_a_plan() -> None:
    """Ten steps of AdamW: the losses are the plain model's but for rounding."""
    losses = []
    for share in (None, 0.5):
        model, batch = chain()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        if share is not None:
            plan = memopt.plan(model, batch, EVERYTHING, optimizer=optimizer, steps=1)
            plan.within(int(share * plan.plain_peak)).apply()
        for _ in range(10):
            loss = model(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0] < 3


def test_a_frozen_stem() -> None:
    """Blocks without gradients hold nothing, whatever is chosen; the plan holds."""
    model, batch = chain()
    for module in (model.embed, *model.blocks[:3]):
        module.requires_grad_(False)
    plan = memopt.plan(model, batch, EVERYTHING, measure=False)
    assert [block.kept for block in plan.within(int(0.8 * plan.plain_peak)).blocks][:3] == [0] * 3
    least = plan.within(curve_of(plan.profile, plan.terms, 2).plans[0].peak + 20000)
    least.apply()
    assert least.measured_peak == least.peak


def test_any_batch_is_taken() -> None:
    """A mapping, a tuple, a loss of one's own."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, _ = chain()

        def forward(self, ids: Any, scale: float = 1.0) -> Any:
            return {"value": scale * self.inner(ids)}

    model = Model()
    found = [
        memopt.plan(model, batch, EVERYTHING, measure=False, loss=lambda output: output["value"])
        for batch in ({"ids": tokens(), "scale": 2.0}, (tokens(), 2.0))
    ]
    assert found[0].peak == found[1].peak


def test_nested_assignments_restore_after_an_error() -> None:
    """Where a fate cannot be put on, the model is as before."""
    model, _ = chain()
    before = looks(model)
    with pytest.raises(TypeError, match="must have a forward"):
        assign(model, Assignment({"blocks.0": CHOICES[3], "blocks": CHOICES[3]}))
    assert looks(model) == before


def test_under_autocast() -> None:
    """Matrix products in 16 bits, residuals in 32: predicted as it is."""
    model, batch = chain()
    rich = memopt.plan(model, batch, EVERYTHING, measure=False, autocast=torch.bfloat16)
    plain = memopt.plan(model, batch, EVERYTHING, measure=False)
    assert rich.plain_peak < plain.plain_peak
    plan = rich.within(int(0.7 * rich.plain_peak)).apply()
    assert plan.measured_peak == plan.peak


def test_a_block_that_is_not_called() -> None:
    """It is left as it is, and a note says so."""

    class Drops(Chain):
        def forward(self, ids: Any) -> Any:
            x = self.embed(ids)
            for block in self.blocks[:-1]:
                x = block(x)
            return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())

    torch.manual_seed(0)
    model = Drops([4] * 4)
    plan = memopt.plan(model, tokens(), EVERYTHING, measure=False)
    assert [block.path for block in plan.blocks] == ["blocks.0", "blocks.1", "blocks.2"]
    assert any("not called in forward" in note and "blocks.3" in note for note in plan.notes)
    plan = plan.within(int(0.7 * plan.plain_peak)).apply()
    assert plan.measured_peak == plan.peak


def test_a_copy_of_a_plan_is_for_the_copy_of_its_model() -> None:
    """As where a module that holds its plan is copied: each comes off its own model."""
    model, batch = chain()
    plan = memopt.plan(model, batch, EVERYTHING, measure=False)
    before = looks(model)
    plan.apply()
    other = copy.deepcopy(plan)
    assert other.live is not None
    twin = other.live.step.model
    assert twin is not model
    other.undo()
    assert gradients(twin, batch).keys() == gradients(model, batch).keys()
    plan.undo()
    assert looks(model) == before
    assert [look[2:] for look in looks(twin)] == [look[2:] for look in before]
