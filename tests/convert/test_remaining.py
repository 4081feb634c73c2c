"""Proves: what the report says is still saved adds up to the bytes that are counted and to those
that the allocator has; each share is named with the op, the module and what would help; and the
help helps.
"""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memopt
from memopt.memory.allocator import LiveBytes
from memopt.memory.attribution import attribute
from memopt.memory.saved import SavedTensors
from memopt.memory.storages import storages
from tests.convert import modules

WIDTH = 64


class Functional(nn.Module):
    """Computes gelu by itself, and takes more than one argument, so that no rule knows it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def gelu(self, x: Tensor) -> Tensor:
        """As an extension of Python's does, which nothing sees from outside."""
        return torch._C._nn.gelu(x)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.down(self.gelu(self.up(x)))


class Helped(Functional):
    def gelu(self, x: Tensor) -> Tensor:
        return memopt.functional.gelu(x)


class Attention(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout)


class Weights(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return F.softmax(q @ k.mT, dim=-1) @ v


class OddNorm(nn.Module):
    """An RMS norm of half of its input: none that memopt has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        half = x[..., : WIDTH // 2]
        return x * (half.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * self.weight


def example(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), *layers)


def sample() -> Tensor:
    return torch.randn(2, 16, WIDTH)


EXAMPLES = {
    "functional": lambda: example(Functional()),
    "helped": lambda: example(Helped()),
    "attention": lambda: example(Attention()),
    "attention with dropout": lambda: example(Attention(0.5)),
    "weights": lambda: example(Weights(), nn.Dropout(0.1)),
    "odd norm": lambda: example(OddNorm(), nn.Conv1d(16, 16, 3)),
    "gated": lambda: example(modules.FeedForward(WIDTH, WIDTH)),
    "transformer layer": lambda: example(nn.TransformerEncoderLayer(WIDTH, 2, WIDTH)),
}


@pytest.mark.parametrize("settings", [{}, {"recipes": False}, {"checkpoint": Functional}], ids=str)
@pytest.mark.parametrize("make", EXAMPLES.values(), ids=EXAMPLES)
def test_shares_are_the_allocator_s_count(make, settings) -> None:
    model, x = make(), sample()
    report = memopt.convert(model, x, **settings)
    assert sum(entry.nbytes for entry in report.remaining) == report.bytes_after
    assert report.bytes_after == memopt.saved_bytes(model, x)
    with LiveBytes() as live:
        output = model(x)
    saved = memopt.saved_bytes(model, x)
    inputs = sum(storage.nbytes for storage in saved.storages if storage.is_input)
    live_of_output = output.untyped_storage().nbytes()
    with LiveBytes() as again:
        kept = attribute(model, (x,), {}).storages
    assert sum(entry.nbytes for entry in kept) == report.bytes_after
    assert again.left == 0
    if _saves_its_output(model):
        live_of_output = 0
    assert live.left == report.bytes_after - inputs + live_of_output


def _saves_its_output(model: nn.Module) -> bool:
    """Whether the output is among the storages that are saved, as attention's is."""
    with SavedTensors() as saved:
        output = model(sample())
    return not storages([output]).keys().isdisjoint(saved.by_storage())


def shares(report: memopt.types.Report) -> dict[str, tuple[str, tuple[str, ...], str]]:
    return {e.what: (e.from_class, e.paths, e.help) for e in report.remaining}


def test_an_activation_that_a_module_computes_by_itself_is_named_and_the_help_helps() -> None:
    report = memopt.convert(example(Functional()), sample(), functional=False)
    what = "output of gelu, which `Functional` computes by itself"
    assert shares(report)[what] == (
        "Functional",
        ("2",),
        "convert with functional=True, or memopt.functional.gelu in its forward",
    )
    (entry,) = [e for e in report.remaining if e.what == what]
    assert entry.op == "GeluBackward0"
    assert entry.nbytes == 2 * 16 * 4 * WIDTH * 4
    percent = 100 * entry.nbytes / report.bytes_after
    assert f"{percent:4.1f} %  {what}, 1 x Functional (2): convert with functional=True" in str(
        report
    )
    for helped in (
        memopt.convert(example(Helped()), sample()),
        memopt.convert(example(Functional()), sample()),
    ):
        assert report.bytes_after - helped.bytes_after == entry.nbytes
    assert report.bytes_after - helped.bytes_after == entry.nbytes


def test_ops_and_modules_are_named() -> None:
    named = shares(memopt.convert(example(Weights(), nn.Conv1d(16, 16, 3)), sample()))
    assert named["softmax weights"][:2] == ("Weights", ("2",))
    assert "scaled_dot_product_attention" in named["softmax weights"][2]
    assert named["inputs of convolutions"][:2] == ("Conv1d", ("3",))
    assert named["inputs of memopt's ops"][:2] == ("LayerNorm", ("1",))
    named = shares(memopt.convert(example(OddNorm()), sample()))
    words = "`OddNorm` computes a root of a mean by itself"
    assert "register_rule" in named[words][2]
    named = shares(memopt.convert(example(Attention(0.5)), sample(), functional=False))
    assert named["masks of dropout on softmax weights"][:2] == ("Attention", ("2",))


def test_without_recipes_the_line_that_turns_them_on() -> None:
    report = memopt.convert(example(Helped()), sample(), recipes=False)
    named = shares(report)["output of a memopt op, made where no recipes are on"]
    assert "recipes=True" in named[2]
    with_recipes = memopt.convert(example(Helped()), sample())
    stored = [e.nbytes for e in report.remaining if e.what.startswith("output of a memopt op")]
    assert report.bytes_after - with_recipes.bytes_after == sum(stored)


def test_of_regions_their_inputs_remain() -> None:
    model = example(Functional(), Functional())
    report = memopt.convert(model, sample(), checkpoint=Functional)
    named = shares(report)["inputs of checkpointed regions"]
    assert named[:2] == ("Functional", ("3",))  # the first one's input is a norm's output
    assert "checkpoint=True" not in str(report)


def test_json_and_html() -> None:
    report = memopt.convert(example(Functional()), sample(), functional=False)
    data = json.loads(json.dumps(report.to_dict()))
    assert sum(entry["nbytes"] for entry in data["remaining"]) == data["bytes_after"]
    text = report._repr_html_()
    assert text.count("<table") == 1
    assert ">LayerNorm</td>" in text
    assert "which `Functional` computes by itself" in text
    assert "&lt;" in memopt.types.Report("<m>", (), (), True)._repr_html_()


def test_dropouts_that_drop_nothing_are_not_counted() -> None:
    model = nn.Sequential(nn.Dropout(0.0), nn.Dropout(0.5), nn.Dropout(0.0))
    report = memopt.convert(model)
    assert str(report).startswith("convert(Sequential): 1 swapped, 0 left\n1 x  Dropout ")
    assert report.idle == ("0", "2")
    assert len(report.swapped) == 3


def test_attribution_changes_nothing() -> None:
    model, x = example(Functional(), nn.BatchNorm1d(16), nn.Dropout(0.5)), sample()
    buffers = [b.clone() for b in model.buffers()]
    generator = torch.get_rng_state()
    assert attribute(model, (x,), {}).storages
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), buffers, strict=True))
    assert all(p.grad is None for p in model.parameters())
