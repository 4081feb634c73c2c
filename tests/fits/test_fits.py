"""Proves: `memopt.fits` answers with the peak of `memopt.anatomy`; what it proposes fits, and what
does not fit is said to be nearest; frozen weights in few bits take what the formula says; models
without values are enough; and bad input is refused by name.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt.whatif.quantized import quantized_weights


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.act = nn.GELU()
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 128)
        self.layers = nn.Sequential(*(nn.Linear(128, 128) for _ in range(3)))
        self.lm_head = nn.Linear(128, 100)

    def forward(self, ids: Tensor) -> Tensor:
        return self.lm_head(self.layers(self.embed(ids)))


def loss(output: Tensor) -> Tensor:
    return output.square().mean()


@pytest.fixture
def model() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(Block(32) for _ in range(4)))


@pytest.fixture
def batch() -> Tensor:
    return torch.empty(64, 32, device="meta")


def peak(model: nn.Module, batch: Tensor, **options: object) -> int:
    return memopt.anatomy(model, batch, loss=loss, device="cpu", **options).peak.total


def test_the_peak_is_that_of_an_anatomy(model: nn.Module, batch: Tensor) -> None:
    expected = peak(model, batch)
    for memory, answer in ((expected, True), (expected - 1, False)):
        found = memopt.fits(model, batch, memory, loss=loss, device="cpu")
        assert bool(found) is answer
        assert found.peak == expected
        assert found.spare == memory - expected
        assert sum(found.by_category.values()) == expected
    on_cuda = memopt.fits(model, batch, "80GB", loss=loss)
    assert on_cuda.reserve == 1 << 30
    assert on_cuda.spare == 80 * 10**9 - (1 << 30) - on_cuda.peak


def test_what_is_proposed_fits(model: nn.Module, batch: Tensor) -> None:
    """Each way's peak is that of a step with it, and the cheapest ways stand first."""
    checkpointed = peak(model, batch, recipes=True, checkpoint="all")
    found = memopt.fits(model, batch, checkpointed, loss=loss, device="cpu")
    assert not found
    peaks = {way.how: way.peak for way in found.ways if way.fits}
    assert peaks["memopt.convert(model, checkpoint=True)"] == checkpointed
    assert 1 <= len(found.ways) <= 3
    assert "What would make it fit" in str(found)
    roomy = memopt.fits(model, batch, peak(model, batch, recipes=True), loss=loss, device="cpu")
    assert roomy.ways[0].how == "memopt.convert(model)"


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_offloading_is_proposed_where_bytes_move(device: str, model: nn.Module) -> None:
    """From the memory of a CPU to itself nothing moves."""
    batch = torch.empty(4096, 32, device="meta")  # inputs of regions are more than gradients
    asked = {"loss": loss, "device": device, "optimizer": None}
    regions = {"recipes": True, "checkpoint": "all"}
    away = memopt.anatomy(model, batch, offload="cpu", **regions, **asked).peak.total
    assert away < memopt.anatomy(model, batch, **regions, **asked).peak.total
    found = memopt.fits(model, batch, away, reserve=0, **asked)
    assert any("offloaded" in way.how for way in found.ways) == (device == "cuda")


def test_states_alone_are_too_large(model: nn.Module, batch: Tensor) -> None:
    """Then no fate of activations is tried: ranks are."""
    weights = sum(p.nbytes for p in model.parameters())
    found = memopt.fits(model, batch, 3 * weights, loss=loss, device="cpu")
    assert found.always >= 4 * weights
    assert "shard them over more ranks" in " ".join(str(found).split())
    assert [way.fits for way in found.ways] == [True]
    assert "FSDP2 over" in found.ways[0].how
    alone = memopt.fits(model, batch, weights, loss=loss, device="cpu", ranks=2, parallel="ddp")
    assert alone.ways == ()


def test_ways_of_ranks_are_steps_of_ranks(model: nn.Module, batch: Tensor) -> None:
    weights = sum(p.nbytes for p in model.parameters())
    found = memopt.fits(model, batch, 3 * weights, loss=loss, device="cpu")
    ranks = int(found.ways[0].how.split("over ")[1].split()[0])
    again = memopt.fits(
        model,
        batch,
        3 * weights,
        loss=loss,
        device="cpu",
        ranks=ranks,
        recipes=True,
        checkpoint="all",
    )
    assert again
    assert again.peak == found.ways[0].peak


@pytest.mark.parametrize(("bits", "scales"), [(4, 1 / 64), (8, 1 / 128)])
def test_frozen_weights_in_few_bits(bits: int, scales: float) -> None:
    """LoRA-like: frozen linears but the head, with 4 bytes for each 64 elements or for each row."""
    with torch.device("meta"):
        model = Language()
    for parameter in model.layers.parameters():
        parameter.requires_grad_(parameter.dim() == 1)
    model.lm_head.requires_grad_(False)
    assert list(quantized_weights(model)) == [f"layers.{n}.weight" for n in range(3)]
    ids = torch.zeros(2, 8, dtype=torch.long, device="meta")
    whole, few = (
        memopt.fits(model, ids, "1GB", loss=loss, device="cpu", weight_bits=b) for b in (None, bits)
    )
    elements = 3 * 128 * 128
    expected = whole.by_category["weights"] - 4 * elements
    expected += elements * bits // 8 + math.ceil(4 * elements * scales)
    assert few.by_category["weights"] == expected
    assert few.quantized == 3


def test_ranks_of_ddp_have_buckets(model: nn.Module, batch: Tensor) -> None:
    one, two = (
        memopt.fits(model, batch, "1GB", loss=loss, device="cpu", ranks=n, parallel="ddp")
        for n in (1, 2)
    )
    assert two.peak == one.peak + sum(p.nbytes for p in model.parameters())


def test_more_ranks_never_take_more(model: nn.Module, batch: Tensor) -> None:
    peaks = [
        memopt.fits(model, batch, "1GB", loss=loss, device="cpu", ranks=n).peak
        for n in (2, 4, 8, 64)
    ]
    assert peaks == sorted(peaks, reverse=True)


BAD = {
    "ranks": ({"ranks": 0}, ValueError, r"ranks must be an int of at least 1, got 0"),
    "parallel": ({"parallel": "tp"}, ValueError, r'parallel must be "fsdp" or "ddp", got \'tp\''),
    "bits": ({"weight_bits": 3}, ValueError, r"weight_bits must be 4, 8 or None, got 3"),
    "memory": ({"memory": "big"}, ValueError, r"memory must be bytes or a string"),
    "reserve": ({"reserve": "2GB"}, ValueError, r"memory must be above .* 2,000\.0 MB, got 1GB"),
    "negative": ({"reserve": -1}, ValueError, r"reserve must be at least 0 .*, got -1"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str, model: nn.Module, batch: Tensor) -> None:
    options, kind, words = BAD[name]
    with pytest.raises(kind, match=r"^fits: " + words):
        memopt.fits(model, batch, **{"memory": "1GB", "loss": loss, **options})


@pytest.mark.parametrize("nothing", [0, "0", "0MB"])
def test_no_reserve(nothing: int | str, model: nn.Module, batch: Tensor) -> None:
    assert memopt.fits(model, batch, "1GB", reserve=nothing, loss=loss).reserve == 0


def test_no_module() -> None:
    with pytest.raises(TypeError, match=r"^fits: model must be an nn\.Module, got int"):
        memopt.fits(3, torch.zeros(1), "1GB")  # type: ignore[arg-type]


def test_nothing_changes() -> None:
    model = nn.Sequential(*(Block(8) for _ in range(2)))
    before = {name: (value, value._version) for name, value in model.state_dict().items()}
    batch = torch.randn(4, 8)
    state = torch.random.get_rng_state()
    memopt.fits(model, batch, "1KB", loss=loss)
    assert all(p.grad is None for p in model.parameters())
    assert all(value._version == before[name][1] for name, value in model.state_dict().items())
    assert [type(m) for m in model.modules()].count(Block) == 2
    assert torch.equal(torch.random.get_rng_state(), state)


def test_as_a_dictionary(model: nn.Module, batch: Tensor) -> None:
    found = memopt.fits(model, batch, "1GB", loss=loss, device="cpu").to_dict()
    assert found["fits"] is True
    assert found["spare"] == 10**9 - found["peak"]
