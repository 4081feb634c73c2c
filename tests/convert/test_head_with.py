"""Proves: lazy logits work with recipes, regions, offloading, LoRA on the head, the Trainer of
transformers with its label smoother, and generation; the bytes of a head in chunks are those of a
formula.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memopt
from memopt._head.call import watched_heads
from memopt._head.logits import LazyLogits
from memopt.memory.allocator import LiveBytes
from tests.convert.lazy import gradients

WORDS, WIDTH = 31, 8


class TailOfModel(nn.Module):
    """A norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(x))
        return logits


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.block = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.tail = TailOfModel()

    def forward(self, words: Tensor) -> Tensor:
        logits: Tensor = self.tail(self.block(self.embed(words)))
        return logits


def words() -> Tensor:
    return torch.arange(40).view(4, 10) * 7 % WORDS


def loss_of(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].reshape(-1, WORDS), words()[:, 1:].reshape(-1))


OPTIONS: dict[str, dict[str, Any]] = {
    "recipes": {},
    "no recipes": {"recipes": False},
    "a region around the head": {"checkpoint": TailOfModel},
    "the head a region": {"checkpoint": lambda module: module is nn.Linear},
    "regions": {"checkpoint": nn.Sequential},
    "regions, inputs offloaded": {"checkpoint": TailOfModel, "offload": "cpu"},
}


@pytest.mark.parametrize("again", [False, True], ids=["once", "logits too"])
@pytest.mark.parametrize("name", OPTIONS)
def test_with_other_fates(name: str, again: bool) -> None:
    plain = Language()
    lazy, without = copy.deepcopy(plain), copy.deepcopy(plain)
    options = OPTIONS[name]
    if name == "the head a region":
        for model in (lazy, without):
            memopt.checkpoint_wrapper(model.tail.head)
        options = {}
    assert memopt.convert(lazy, **options).heads
    memopt.convert(without, head=False, **options)
    found = []
    with watched_heads() as uses:
        for model in (lazy, without):
            logits = model(words())
            loss = loss_of(logits) + (logits.square().mean() if again else 0)
            found.append(gradients(model, loss))
    assert uses
    assert any(use.losses for use in uses)
    for key, gradient in found[0].items():
        torch.testing.assert_close(gradient, found[1][key], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("around", ["offload", "torch's checkpoint", "save_on_cpu"])
def test_inside_scopes_of_others(around: str) -> None:
    from torch.utils.checkpoint import checkpoint

    plain = Language()
    lazy = copy.deepcopy(plain)
    memopt.convert(lazy)
    found = []
    for model in (lazy, plain):
        scope: Any = contextlib.nullcontext()
        if around == "offload":
            scope = memopt.offload(min_bytes=0, keep_last=0)
        if around == "save_on_cpu":
            scope = torch.autograd.graph.save_on_cpu()
        with scope:
            if around == "torch's checkpoint":
                loss = loss_of(checkpoint(model, words(), use_reentrant=False))
            else:
                loss = loss_of(model(words()))
        found.append(gradients(model, loss))
    for key, gradient in found[0].items():
        torch.testing.assert_close(gradient, found[1][key], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("first", ["convert", "lora"])
def test_lora_on_the_head(first: str) -> None:
    """The sum of both is made as a whole: it is no linear's output."""
    peft: Any = pytest.importorskip("peft")
    plain = Language()
    lazy = copy.deepcopy(plain)
    config = peft.LoraConfig(r=2, target_modules=["head", "block.1"], init_lora_weights=False)
    torch.manual_seed(1)
    plain = peft.get_peft_model(plain, config)
    if first == "convert":
        memopt.convert(lazy)
    torch.manual_seed(1)
    lazy = peft.get_peft_model(lazy, config)
    if first == "lora":
        memopt.convert(lazy)
    ours, theirs = (gradients(model, loss_of(model(words()))) for model in (lazy, plain))
    assert ours.keys() == theirs.keys()
    for key, gradient in ours.items():
        torch.testing.assert_close(gradient, theirs[key], rtol=1e-4, atol=1e-6)


def test_lora_beside_a_frozen_head() -> None:
    peft: Any = pytest.importorskip("peft")
    model = peft.get_peft_model(Language(), peft.LoraConfig(r=2, target_modules=["block.1"]))
    assert memopt.convert(model).heads
    with watched_heads() as uses:
        loss_of(model(words())).backward()
    assert [(use.losses, use.were_made) for use in uses] == [(1, False)]
    assert all((p.grad is not None) == ("lora" in name) for name, p in model.named_parameters())


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_in_transformers_trainer(smoothing: float, tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers", minversion="5.23")
    pytest.importorskip("accelerate")
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=16, n_embd=8, n_layer=1, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    plain = transformers.GPT2LMHeadModel(config)
    data = [{"input_ids": row, "labels": row.clone()} for row in words()]
    trained = []
    for lazy in (True, False):
        model = copy.deepcopy(plain)
        if lazy:
            memopt.convert(model, recipes=False)
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=2,
            gradient_accumulation_steps=2, label_smoothing_factor=smoothing, use_cpu=True,
            report_to=[], save_strategy="no", disable_tqdm=True, logging_strategy="no",
        )  # fmt: skip
        with watched_heads() as uses:
            transformers.Trainer(model=model, args=arguments, train_dataset=data).train()
        assert len(uses) == (4 if lazy else 0)
        assert all(use.losses and not use.were_made for use in uses)
        trained.append(dict(model.named_parameters()))
    for name, parameter in trained[0].items():
        torch.testing.assert_close(parameter, trained[1][name], rtol=1e-4, atol=1e-5)


def test_generation_has_plain_logits() -> None:
    transformers: Any = pytest.importorskip("transformers", minversion="5.23")
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, bos_token_id=0, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    plain = transformers.LlamaForCausalLM(config)
    lazy = copy.deepcopy(plain)
    memopt.convert(lazy)
    made = [m.generate(words()[:1], max_new_tokens=4, do_sample=False) for m in (lazy, plain)]
    assert torch.equal(*made)
    output = lazy.train()(words())
    assert type(output.logits) is LazyLogits
    assert output.logits is output["logits"] is output.to_tuple()[0]
    assert isinstance(output.logits, torch.Tensor)


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed")
def test_trl_takes_log_probabilities_of_lazy_logits() -> None:
    trainer_utils = importlib.import_module("trl.trainer.utils")
    model = Language()
    memopt.convert(model)
    with watched_heads() as uses:
        trainer_utils.selective_log_softmax(model(words()), words()).sum().backward()
    assert uses[0].losses
    assert not uses[0].were_made


def test_blocks_that_are_compiled_leave_the_head_in_chunks() -> None:
    """A model that is compiled whole makes its logits in the graph; one whose blocks are compiled
    each by itself makes none.
    """
    model = Language()
    expected = gradients(model, loss_of(model(words())))
    memopt.convert(model)
    model.block.compile(backend="aot_eager")
    with watched_heads() as uses:
        actual = gradients(model, loss_of(model(words())))
    assert [use.losses for use in uses] == [1]
    assert not any(use.were_made for use in uses)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "features"),
    [
        (torch.float32, 48),
        (torch.bfloat16, 48),
        pytest.param(torch.float32, 768, marks=[pytest.mark.slow, pytest.mark.thorough]),
        # Twelve minutes on a processor that multiplies no numbers of 16 bits.
        pytest.param(torch.bfloat16, 768, marks=[pytest.mark.slow, pytest.mark.thorough]),
    ],
    ids=str,
)
def test_bytes_of_a_step_are_the_formulas(dtype: torch.dtype, features: int) -> None:
    """2,048 tokens and 50,257 words: gradients of the input and of the weight, and of a chunk of c
    rows the logits; for a bfloat16 weight a byte an element and a block of 2 MiB.
    """
    rows, words = 2048, 50257
    head = nn.Sequential(nn.Linear(features, words, bias=False, dtype=dtype))
    x = torch.randn(rows, features, dtype=dtype, requires_grad=True)
    target = torch.arange(rows)
    small = torch.ones(2 * features, features, dtype=dtype), torch.zeros(2 * features).long()

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = head

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            return F.cross_entropy(self.head(x), target)

    model = WithLoss()
    assert memopt.convert(model, small).heads
    with LiveBytes() as live:
        model(x, target).backward()
    size = dtype.itemsize
    # A quarter of the rows, of at most 1 KiB a word; a sixteenth is 128.
    chunk = max(128, (1024 - (features if size == 2 else 0)) // size)
    formula = size * (rows + words) * features + chunk * words * size
    if dtype == torch.bfloat16:
        formula += words * features + (2 << 20)
    assert formula <= live.most_with_scratch <= 1.1 * formula
    # eager keeps the logits and log-probabilities, and makes a gradient of each
    eager = rows * words * (3 * size) + size * (rows + words) * features
    assert live.most_with_scratch - size * (rows + words) * features < 0.1 * eager
