"""Proves that what would help does: each change is made, and the step measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt._anatomy import Advice
from tests.anatomy.models import Block, Mlp, tiny

BATCH = torch.randn(512, 32)


def advice(model: nn.Module, batch: Any = BATCH, **options: Any) -> dict[str, Advice]:
    report = memopt.anatomy(model, batch, advice=True, **options)
    assert all(a.saved == report.peak.total - a.peak > 0 for a in report.advice)
    return {entry.how: entry for entry in report.advice}


def measured(model: nn.Module, batch: Any = BATCH, **options: Any) -> int:
    return memopt.anatomy(model, batch, measure=True, **options).peak.total


@pytest.fixture(scope="module")
def of_blocks() -> dict[str, Advice]:
    torch.manual_seed(0)
    return advice(Mlp(blocks=3))


def test_convert(of_blocks: dict[str, Advice]) -> None:
    model = Mlp(blocks=3)
    memopt.convert(model)
    assert measured(model) == of_blocks["memopt.convert(model)"].peak


@pytest.mark.parametrize("every", [1, 2])
def test_checkpointing(of_blocks: dict[str, Advice], every: int) -> None:
    model = Mlp(blocks=3)
    memopt.apply_activation_checkpointing(model, every=every)
    how = f"memopt.apply_activation_checkpointing(model{', every=2' if every == 2 else ''})"
    assert measured(model) == of_blocks[how].peak


def test_recipes_inside_regions(of_blocks: dict[str, Advice]) -> None:
    model = Mlp(blocks=3)
    memopt.convert(model, checkpoint=True)
    assert measured(model) == of_blocks["memopt.convert(model, checkpoint=True)"].peak


def test_accumulation(of_blocks: dict[str, Advice]) -> None:
    how = "memopt.accumulate(model, batch, micro_batch=256)"
    assert measured(Mlp(blocks=3), micro_batches=2) == of_blocks[how].peak


def test_the_cheapest_come_first(of_blocks: dict[str, Advice]) -> None:
    ratios = [a.saved / max(a.slower, 1e-3) for a in of_blocks.values()]
    assert ratios == sorted(ratios, reverse=True)
    recipes = of_blocks["memopt.convert(model)"]
    regions = of_blocks["memopt.apply_activation_checkpointing(model)"]
    assert 0 <= recipes.slower < regions.slower < 0.5
    assert regions.peak < recipes.peak


@pytest.mark.slow
def test_gradients_that_are_kept() -> None:
    model, batch = Mlp(blocks=2, width=64), torch.randn(512, 64)
    found = advice(model, batch, set_to_none=False, optimizer=None)
    how = "optimizer.zero_grad(set_to_none=True)"
    assert measured(model, batch, optimizer=None) == found[how].peak


@pytest.mark.slow
def test_lists_of_all_parameters_in_the_optimizer() -> None:
    model, batch = Mlp(blocks=4, width=64), torch.randn(4, 64)
    found = advice(model, batch, optimizer=lambda p: torch.optim.AdamW(p, foreach=True))
    with_it = measured(model, batch, optimizer=lambda p: torch.optim.AdamW(p, fused=True))
    assert with_it == found["AdamW(..., fused=True)"].peak


class Rows(torch.optim.AdamW):
    """AdamW whose two moments have 8 bits: the numbers do not matter here."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["first"] = torch.zeros_like(p, dtype=torch.int8)
                    state["second"] = torch.zeros_like(p, dtype=torch.int8)
                    state["step"] = torch.zeros(())
                with torch.no_grad():
                    p.sub_(p.grad, alpha=group["lr"])


@pytest.mark.slow
def test_states_of_8_bits() -> None:
    """Up to what the optimizer's step needs for itself."""
    model, batch = Mlp(blocks=4, width=64), torch.randn(256, 64)
    found = advice(model, batch)["bitsandbytes.optim.AdamW8bit"]
    assert abs(measured(model, batch, optimizer=Rows) - found.peak) < 0.01 * found.peak


@pytest.mark.slow
def test_a_loss_without_logits() -> None:
    """Of a head that is no module, against a loss of the hidden state."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=1, n_embd=32, n_head=2, vocab_size=2000, bos_token_id=0, eos_token_id=0
    )
    batch = tiny("gpt2", rows=8, length=64)[1]

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = config  # which says how many words there are
            self.body = transformers.GPT2Model(config)
            self.head = nn.Parameter(torch.randn(2000, 32))

        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
            hidden = self.body(input_ids).last_hidden_state
            logits = nn.functional.linear(hidden, self.head)[:, :-1]
            return nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())

    class Body(Words):
        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
            hidden: Tensor = self.body(input_ids).last_hidden_state
            return hidden.square().mean() + self.head.sum() * 0

    model = Words().train()
    found = [a for a in memopt.anatomy(model, batch, advice=True).advice if "logits" in a.what]
    assert len(found) == 1
    assert abs(measured(Body(), batch) - found[0].peak) < 0.001 * found[0].peak


def test_nothing_is_said_of_what_gives_nothing() -> None:
    found = advice(Block(512, 0.0), torch.randn(1, 512), loss=torch.sum, optimizer=None)
    assert not found


@pytest.mark.parametrize(("device", "helps"), [("cpu", False), ("cuda", True)])
def test_offloading_helps_where_memory_is_not_the_host_s(device: str, helps: bool) -> None:
    found = advice(Mlp(blocks=3), device=device)
    assert any("memopt.offload()" in how for how in found) == helps
