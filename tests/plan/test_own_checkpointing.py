"""Proves: a plan never doubles a model's own checkpointing, nor says less or more than the user's
step takes: where that runs whole blocks again it is refused by name, where it runs parts of them
the plan counts it and says so.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import memopt
from tests.plan.models import Chain, chain
from tests.plan.strangers import CHECKPOINTED, InLoop, OfBlocks, Partly, PartlyWithState, batch
from tests.plan.support import allocated_above, gradients, looks, without_regions


@pytest.mark.parametrize("measure", [False, True])
@pytest.mark.parametrize("name", CHECKPOINTED)
def test_whole_blocks_that_run_again_are_refused(name: str, measure: bool) -> None:
    model, x = CHECKPOINTED[name](), batch()
    before = looks(model)
    with pytest.raises(ValueError, match=r"checkpointing of its own around blocks.0, \.\.\., blo"):
        memopt.plan(model, x, 1 << 30, measure=measure)
    assert looks(model) == before
    assert all(p.grad is None for p in model.parameters())


def test_fit_refuses_too() -> None:
    model = InLoop(False)
    with pytest.raises(ValueError, match="checkpointing of its own"):
        memopt.fit(model, batch(), 1 << 30, optimizer=torch.optim.SGD(model.parameters()))


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_transformers_gradient_checkpointing(family: str) -> None:
    """Refused while it is on, planned once it is off; and turned on behind the plan, `apply` says
    so and leaves the model as it was.
    """
    transformers = pytest.importorskip("transformers")
    if family == "bert":
        config = transformers.BertConfig(
            hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64
        )
        model: nn.Module = transformers.BertForMaskedLM(config)
    else:
        config = transformers.GPT2Config(n_embd=32, n_layer=3, n_head=2, vocab_size=100)
        model = transformers.GPT2LMHeadModel(config)
    model.train()
    ids = torch.randint(0, 100, (2, 16))
    inputs = {"input_ids": ids, "labels": ids}
    controls: Any = model
    controls.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match=r"gradient_checkpointing_disable"):
        memopt.plan(model, inputs, 1 << 30, measure=False)
    controls.gradient_checkpointing_disable()
    plan = memopt.plan(model, inputs, 1 << 30, measure=False)
    controls.gradient_checkpointing_enable()
    before = looks(model)
    with pytest.raises(ValueError, match=r"gradient_checkpointing_disable"):
        plan.apply()
    assert looks(model) == before


@pytest.mark.parametrize("block", [Partly, PartlyWithState])
def test_parts_of_blocks_that_run_again_count_in_both_peaks(block: type[nn.Module]) -> None:
    """The plain peak is that of the user's step; a smaller budget is kept, and bits stay."""
    torch.manual_seed(0)
    model, x = OfBlocks(block), batch()
    plan = memopt.plan(model, x, 1 << 30, measure=False, optimizer=None)
    assert any("own checkpointing recomputes blocks.0.up" in note for note in plan.notes)
    base = plan.profile.base
    assert plan.plain_peak - base == pytest.approx(allocated_above(model, x), rel=0.01)
    found = plan.within(int(plan.plain_peak * 0.9))
    expected = gradients(model, x)
    found.apply()
    assert found.measured_peak is not None
    assert found.measured_peak <= found.budget
    same = gradients(model, x)
    found.undo()
    if not found.assignment.recipes:
        assert all(torch.equal(same[name], expected[name]) for name in same)
    assert without_regions(found).choices.keys() == found.assignment.choices.keys()


def test_the_plain_peak_is_that_of_the_step_itself() -> None:
    model, x = chain()
    plan = memopt.plan(model, x, 1 << 30, measure=False, optimizer=None)
    assert isinstance(model, Chain)
    assert plan.live is not None
    plain = plan.live.watch()
    assert plan.plain_peak == plan.profile.base + plain


def calls_of_a_blocks_linear(model: InLoop) -> int:
    calls = []
    handle = model.blocks[0].up.register_forward_hook(lambda *_: calls.append(1))
    model(batch()).backward()
    handle.remove()
    return len(calls)


@pytest.mark.parametrize(("reentrant", "expected"), [(False, 2), (True, 3)])
def test_convert_without_a_sample_says_what_regions_may_do(reentrant: bool, expected: int) -> None:
    """It was said that they change nothing, where blocks run three times."""
    assert calls_of_a_blocks_linear(InLoop(reentrant)) == 2
    model = InLoop(reentrant)
    report = memopt.convert(model, checkpoint=True)
    said = (
        "InLoop may call torch.utils.checkpoint in forward: regions inside it save nothing, and "
        "backward runs them once more where it is reentrant"
    )
    assert any(said in note for note in report.notes)
    assert calls_of_a_blocks_linear(model) == expected
    assert not any("checkpoint in" in n for n in memopt.convert(chain()[0], checkpoint=True).notes)


@pytest.mark.parametrize("name", CHECKPOINTED)
def test_convert_and_apply_checkpointing_name_regions_that_change_nothing(name: str) -> None:
    model, x = CHECKPOINTED[name](), batch()
    report = memopt.convert(model, x, recipes=False, checkpoint=True)
    assert report.checkpointed == ()
    assert any("checkpoint" in note and "blocks.0" in note for note in report.notes)
    with pytest.warns(UserWarning, match=r"no regions, since these cannot be recomputed.*blocks.0"):
        assert memopt.apply_activation_checkpointing(CHECKPOINTED[name](), batch=x) == []
