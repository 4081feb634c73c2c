"""Proves: convert finds the head of a model by its structure, or by a batch in which its logits
reach a loss; the report says what it found, with bytes; `head=False` and `revert` leave and restore
the linear; predictions and memopt.check know that its logits are not there.
"""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memopt
from memopt._head.logits import LazyLogits
from memopt.memory.allocator import LiveBytes
from tests.support.fingerprint import Fingerprint

WORDS, WIDTH, TOKENS = 400, 16, 96


class Decoder(nn.Module):
    """Words to logits, and with a target to the loss."""

    def __init__(self, tied: bool = False, words: int = WORDS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.lm_head = nn.Linear(WIDTH, words, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, words: Tensor, target: Tensor | None = None) -> Tensor:
        logits: Tensor = self.lm_head(self.inner(self.embed(words)))
        return logits if target is None else F.cross_entropy(logits, target)


class Transformer(Decoder):
    """It says which is its head."""

    def __init__(self) -> None:
        super().__init__(words=WORDS - 1)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head


class Wide(nn.Module):
    """A head without an embedding, behind a wide layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WORDS)
        self.down = nn.Linear(4 * WORDS, WIDTH)
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.out(self.down(self.up(x).relu())), target)


def batch() -> tuple[Tensor, Tensor]:
    return torch.arange(TOKENS) % WORDS, torch.arange(TOKENS) * 7 % WORDS


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (Decoder(tied=True), "its weight is embed's"),
        (Decoder(), "as many classes as embed has words"),
        (Transformer(), "the model's output embeddings"),
    ],
    ids=["tied", "alike", "asked"],
)
def test_found_by_structure(model: nn.Module, why: str) -> None:
    (found,) = memopt.convert(model).heads
    head: Any = model.lm_head
    assert found[:3] == ("lm_head", head.out_features, why)
    assert type(model(batch()[0])) is LazyLogits
    assert isinstance(model.lm_head, nn.Linear)
    assert not memopt.convert(model).heads  # it is one already


def test_a_linear_that_only_looks_like_one_is_none() -> None:
    two = Decoder()
    two.other = nn.Linear(WIDTH, WORDS)
    assert not memopt.convert(two).heads
    assert not memopt.convert(Decoder(words=WORDS - 1)).heads
    assert not memopt.convert(nn.Sequential(nn.Linear(8, 8))).heads


def test_found_by_a_batch() -> None:
    model = Wide()
    sample = torch.randn(TOKENS, WIDTH), batch()[1]
    before = Fingerprint(model)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    assert not memopt.convert(model).heads
    memopt.revert(model)
    report = memopt.convert(model, sample)
    (found,) = report.heads
    assert found == ("out", WORDS, "its output reaches a loss", TOKENS * WORDS * 4, "", 1)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    memopt.revert(model)
    assert Fingerprint(model).differences(before) == []


class Rectified(torch.autograd.Function):
    """Writes over what it is given, and says so: not of logits that are not there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x.relu_())
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * (ctx.saved_tensors[0] > 0)


class OverInner(Decoder):
    """A linear inside that is no head, and whose output a Function of the model's own writes."""

    def forward(self, words: Tensor, target: Tensor | None = None) -> Tensor:
        inner = Rectified.apply(self.inner(self.embed(words)))  # type: ignore[no-untyped-call]
        return F.cross_entropy(self.lm_head(inner), target)


def test_other_linears_may_be_used_as_no_head_may() -> None:
    """What looked for a head tried all linears as one, and raised what the Function raised."""
    model = OverInner(words=WORDS - 1)
    words = batch()[0], batch()[1] % (WORDS - 1)
    plan = memopt.plan(model, words, "1GiB", measure=False)
    assert plan.peak > 0
    (found,) = memopt.convert(model, words).heads
    assert found[:2] == ("lm_head", WORDS - 1)
    model(*words).backward()
    assert model.inner.weight.grad is not None


def test_few_rows_are_no_head() -> None:
    """A classifier's logits are less than the gradient that a loss in chunks keeps."""
    model = nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 10))
    loss = Lossy(model)
    report = memopt.convert(loss, (torch.randn(4, 8), torch.zeros(4, dtype=torch.long)))
    assert not report.heads


class Lossy(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.model(x), target)


def test_the_report_says_what_was_found() -> None:
    report = memopt.convert(Decoder(), batch())
    nbytes = TOKENS * WORDS * 4
    assert f"head in chunks: lm_head ({WORDS} classes; as many classes as embed has words)" in str(
        report
    )
    assert "with batch, 0.2 MB of logits are never made" in str(report)
    assert json.loads(json.dumps(report.to_dict()))["heads"][0]["nbytes"] == nbytes
    assert report.bytes_before is not None
    assert report.bytes_after is not None
    # log-probabilities of all classes; gradients of the weight and of the head's input
    saved = nbytes - 4 * WIDTH * (WORDS + TOKENS) + 4 * TOKENS * WIDTH
    assert report.bytes_before - report.bytes_after == pytest.approx(saved, abs=2000)
    assert "gradients of the head" in str(report)
    waiting = memopt.convert(Decoder(), batch()[:1])
    assert "wait for a loss" in str(waiting)

    class Squared(Decoder):
        def forward(self, words: Tensor, target: Tensor | None = None) -> Tensor:
            return super().forward(words).square().mean()

    assert "0.2 MB of logits are made, for square" in str(memopt.convert(Squared(), batch()[:1]))


def test_without_heads_and_undone() -> None:
    model = Decoder(tied=True)
    before, head = Fingerprint(model), model.lm_head
    assert not memopt.convert(model, head=False).heads
    assert type(model(batch()[0])) is Tensor
    memopt.convert(model)
    assert type(model(batch()[0])) is LazyLogits
    memopt.revert(model)
    assert model.lm_head is head
    assert type(head) is nn.Linear
    assert Fingerprint(model).differences(before) == []


@pytest.mark.parametrize("skip", ["lm_head", nn.Linear])
def test_skipped(skip: Any) -> None:
    model = Decoder()
    assert not memopt.convert(model, skip=skip).heads
    assert type(model(batch()[0])) is Tensor


def test_a_reference_from_before_is_a_plain_linear() -> None:
    model = Decoder()
    head = model.lm_head
    memopt.convert(model)
    assert type(head(torch.randn(2, WIDTH))) is Tensor
    assert model.lm_head.weight is head.weight


def test_copies_are_lazy_too() -> None:
    model = Decoder(tied=True)
    memopt.convert(model)
    copied = copy.deepcopy(model)
    logits = copied(batch()[0])
    assert type(logits) is LazyLogits
    assert logits._pending.call.weight is copied.embed.weight


@pytest.mark.parametrize("frozen", [False, True])
def test_a_step_takes_less_memory(frozen: bool) -> None:
    """By the allocator: no logits, nor anything of their size."""
    peaks = []
    words, target = torch.arange(4096) % 3000, torch.arange(4096) % 3000
    for lazy in (True, False):
        model = Decoder()
        model.embed = nn.Embedding(3000, WIDTH)
        model.lm_head = nn.Linear(WIDTH, 3000).requires_grad_(not frozen)
        memopt.convert(model, head=lazy)
        model(words, target).backward()
        model.zero_grad()
        with LiveBytes() as live:
            model(words, target).backward()
        peaks.append(live.most_with_scratch)
    logits = 4096 * 3000 * 4
    assert peaks[1] > 2 * logits
    assert peaks[0] < logits / 2


def test_a_prediction_knows_it() -> None:
    sample = {"words": torch.arange(4096) % WORDS, "target": torch.arange(4096) % WORDS}
    model = Decoder()
    plain = memopt.anatomy(model, sample, optimizer=None).peak.total
    memopt.convert(model)
    predicted = memopt.anatomy(model, sample, optimizer=None).peak.total
    measured = memopt.anatomy(model, sample, optimizer=None, measure=True)
    logits = 4096 * WORDS * 4
    assert plain > 2 * logits
    assert predicted < plain - logits
    assert measured.peak.total <= predicted


def test_check_says_head_in_chunks() -> None:
    model = Decoder()
    sample = {"words": batch()[0], "target": batch()[1]}
    memopt.convert(model, recipes=False)
    (head,) = (each for each in memopt.check(model, sample).blocks if each.path == "lm_head")
    assert (head.asked, head.happened, head.problem) == ("head in chunks", "head in chunks", "")
    (head,) = (
        each for each in memopt.check(model, {"words": batch()[0]}).blocks if each.path == "lm_head"
    )
    assert head.happened == "logits computed, for sum"
    on_meta = copy.deepcopy(model).to("meta")
    (head,) = (
        each
        for each in memopt.check(
            on_meta, {name: value.to("meta") for name, value in sample.items()}
        ).blocks
        if each.path == "lm_head"
    )
    assert head.happened == "head in chunks"


def test_on_meta_it_is_converted_with_a_batch() -> None:
    sample = {"words": batch()[0].to("meta"), "target": batch()[1].to("meta")}
    report = memopt.convert(Decoder().to("meta"), sample)
    assert "lm_head" in str(report)
    assert report.bytes_before is not None
    assert report.bytes_after is not None
    assert report.bytes_after < report.bytes_before
