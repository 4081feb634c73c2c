"""Proves: with a sample, modules that cannot run again as they did are found and are no regions,
and no others; and the model is as it was.
"""

from __future__ import annotations

import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memopt
from memopt._checkpoint.probe import cannot_run_again
from memopt._checkpoint.state import State
from memopt._checkpoint.wrapper import settings_of
from memopt.memory.step import Step
from tests.checkpoint.stateful import MOVES, STAYS, Row, Stateful


def sample() -> Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", MOVES)
def test_a_state_that_moves_in_forward(kind: str) -> None:
    """The block is left out by name, with what moves; its neighbours are regions. A later step
    leaves the state that a plain model has.
    """
    torch.manual_seed(0)
    model = Row("nothing", kind, "nothing")
    plain = Row("nothing", kind, "nothing")
    plain.load_state_dict(model.state_dict())
    with pytest.warns(
        UserWarning, match=r"apply_activation_checkpointing: no regions.*blocks\.1"
    ) as found:
        names = memopt.apply_activation_checkpointing(model, batch=sample())
    assert names == ["blocks.0", "blocks.2"]
    assert MOVES[kind] in str(found[0].message)
    assert settings_of(model.blocks[1]) is None
    for step in (model, plain):
        random.seed(0)
        np.random.seed(0)
        step(sample()).backward()
    assert State(model.blocks[1]).differing(State(plain.blocks[1])) == []
    gradients = zip(model.parameters(), plain.parameters(), strict=True)
    assert all(
        one.grad is other.grad or torch.equal(one.grad, other.grad) for one, other in gradients
    )


@pytest.mark.parametrize("kind", STAYS)
def test_what_may_run_again(kind: str) -> None:
    model = Row("nothing", kind)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        names = memopt.apply_activation_checkpointing(model, check_fn=Stateful, batch=(sample(),))
    assert names == ["blocks.0", "blocks.1"]


@pytest.mark.parametrize("kind", [*MOVES, *STAYS])
def test_a_probe_leaves_nothing(kind: str) -> None:
    torch.manual_seed(0)
    model = Row("nothing", kind)
    x = sample()
    if kind != "table made once":
        model(x)
    before, numbers, given = State(model), torch.get_rng_state(), x.clone()
    hooks = [len(m._forward_pre_hooks) for m in model.modules()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        memopt.apply_activation_checkpointing(model, batch={"x": x})
    memopt.unwrap(model)
    assert before.differing(State(model)) == []
    assert torch.equal(torch.get_rng_state(), numbers)
    assert torch.equal(x, given)
    assert [len(m._forward_pre_hooks) for m in model.modules()] == hooks
    assert all(p.grad is None for p in model.parameters())


def test_convert_says_what_it_leaves_out() -> None:
    model = Row("nothing", "spectral norm", "counter")
    report = memopt.convert(model, sample(), checkpoint=True)
    assert report.checkpointed == ("blocks.0",)
    (note,) = (note for note in report.notes if note.startswith("no regions, since these cannot"))
    assert "blocks.1 (a.weight_u" in note
    assert "blocks.2 (count would change twice in a step)" in note


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Writes() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        for block in self.blocks:
            x = block(x)
        return x.sum()


class _Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x.add_(1)
        return self.b(self.a(x).tanh())


def test_blocks_that_write_to_their_arguments() -> None:
    with pytest.warns(UserWarning, match="it writes to its arguments in place"):
        assert memopt.apply_activation_checkpointing(Writes(), batch=sample()) == []


def test_an_error_of_the_model_is_its_own() -> None:
    model = Row("nothing", "nothing")
    hooks = [len(m._forward_pre_hooks) for m in model.modules()]
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        memopt.apply_activation_checkpointing(model, batch=torch.randn(2, 3))
    assert [len(m._forward_pre_hooks) for m in model.modules()] == hooks
    assert all(settings_of(m) is None for m in model.modules())


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.attention(x, x, x)[0]
        return x + self.out(found)


def test_regions_inside_lora_of_attention() -> None:
    """PEFT merges weights for the time of the inner attention's forward. That one is left out, and
    training goes on as without regions; a region around all of it is one.
    """
    peft = pytest.importorskip("peft")

    def made() -> Any:
        torch.manual_seed(0)
        config = peft.LoraConfig(target_modules=["attention"], r=2, init_lora_weights=False)
        return peft.get_peft_model(nn.Sequential(Attends(), Attends()), config)

    x = torch.randn(2, 4, 8)
    model, plain = made(), made()
    with pytest.warns(UserWarning, match="in_proj_weight.* is changed from outside"):
        names = memopt.apply_activation_checkpointing(
            model, check_fn=nn.MultiheadAttention, batch=x
        )
    assert names == []
    assert len(memopt.apply_activation_checkpointing(made(), check_fn=Attends, batch=x)) == 2
    for step in (model, plain):
        for _ in range(2):
            step(x).sum().backward()
    gradients = zip(model.parameters(), plain.parameters(), strict=True)
    assert all(
        one.grad is other.grad or torch.equal(one.grad, other.grad) for one, other in gradients
    )


class Borrows(nn.Module):
    """A buffer has another value until its forward ends."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("lent", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.lent.add_(1)
        x = self.b(self.a(x).tanh())
        self.lent.sub_(1)
        return x


def test_a_forward_that_a_recompute_leaves_before_it_puts_back_what_it_changed() -> None:
    """A buffer. Where it is back before the last tensor that backward needs, the block is a
    region.
    """
    x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1))
    blocks = nn.Sequential(Borrows(), nn.Sequential(Borrows(), nn.Linear(8, 8), nn.Tanh()))
    chosen = {blocks[0], blocks[1]}
    with pytest.warns(UserWarning, match=r"0 \(lent would stay as in the middle"):
        names = memopt.apply_activation_checkpointing(
            blocks, check_fn=lambda m: m in chosen, batch=x
        )
    assert names == ["1"]


def test_blocks_that_keep_features_from_call_to_call() -> None:
    """diffusers' Magvit: its causal convolutions pad with what the last call left."""
    diffusers = pytest.importorskip("diffusers")
    kinds = ("SpatialTemporalDownBlock3D", "SpatialTemporalUpBlock3D")
    down, up = ([f"{kind.replace('Temporal', '')}", *[kind] * 3] for kind in kinds)
    torch.manual_seed(0)
    model = diffusers.AutoencoderKLMagvit(
        latent_channels=4,
        block_out_channels=[8] * 4,
        norm_num_groups=2,
        layers_per_block=1,
        down_block_types=down,
        up_block_types=up,
    )
    x = torch.randn(1, 3, 5, 16, 16)
    with pytest.warns(UserWarning, match=r"decoder.up_blocks.3 \(it cannot be recomputed"):
        memopt.apply_activation_checkpointing(model, batch=x)
    model(x).sample.square().mean().backward()
    assert all(p.grad is not None for p in model.decoder.up_blocks.parameters())


class Grows:
    """A cache as research code writes it, for two towers: keys and values of each layer."""

    def __init__(self) -> None:
        self.kept: dict[int, Tensor] = {}

    def update(self, layer: int, found: Tensor) -> Tensor:
        known = self.kept.get(layer)
        self.kept[layer] = found if known is None else torch.cat((known, found), 1)
        return self.kept[layer]


class Remembers(nn.Module):
    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer, self.linear, self.out = layer, nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, cache: Grows | None = None) -> Tensor:
        found = self.linear(x)
        if cache is not None:
            found = cache.update(self.layer, found)
        return x + self.out(F.scaled_dot_product_attention(x, found, found))


class TwoTowers(nn.Module):
    """The second tower reads what the first one left in the cache."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(map(Remembers, range(2)))
        self.second = nn.ModuleList(map(Remembers, range(2)))
        self.alone = nn.ModuleList(map(Remembers, range(2)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        cache = Grows()
        for block in self.first:
            x = block(x, cache=cache)
        for block in self.second:
            y = block(y, cache=cache)
        for block in self.alone:
            y = block(y)
        return (y.square().mean() + x.mean()).square()


def test_a_cache_of_the_user_s_class_among_the_arguments() -> None:
    """It would grow a second time in the recompute: the layers that get one are left out by name,
    and those that get none are regions.
    """
    torch.manual_seed(0)
    model, batch = TwoTowers(), (torch.randn(2, 3, 8), torch.randn(2, 2, 8))
    model(*batch).backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    with pytest.warns(UserWarning, match=r"first\.0.*the argument Grows\.kept") as found:
        names = memopt.apply_activation_checkpointing(model, check_fn=Remembers, batch=batch)
    assert "second.1" in str(found[0].message)
    assert names == ["alone.0", "alone.1"]
    model(*batch).backward()
    assert all(
        given is not None and p.grad is not None and torch.equal(given, p.grad)
        for given, p in zip(expected, model.parameters(), strict=True)
    )


def test_modules_inside_others_are_each_looked_at() -> None:
    """The probe of one does not disturb that of the module around it, whose statistics move once;
    and what is inside a module that cannot be recomputed is still looked at.
    """
    inner = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    model = nn.Sequential(nn.Sequential(inner, nn.ReLU()), Row("nothing", "counter"))
    modules = {path: module for path, module in model.named_modules() if path}
    found = cannot_run_again(Step(model, (sample(),), None, torch.sum, who="test"), modules)
    assert set(found) == {"1", "1.blocks.1"}


class Learner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))
        self.b = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))

    def forward(self, x: Tensor, adapts: bool = False) -> Tensor:
        x = self.a(x)
        # Equal ones, where they are others.
        weights = {n: p * 1.0 if adapts else p for n, p in self.b.named_parameters()}
        found: Tensor = torch.func.functional_call(self.b, weights, (x,))
        return found.square().mean()


def meta_step(model: nn.Module, x: Tensor) -> None:
    """A step of MAML: the loss of weights that an inner step has made."""
    weights = dict(model.named_parameters())
    inner = torch.func.functional_call(model, weights, (x,))
    found = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
    moved = {n: p - g for (n, p), g in zip(weights.items(), found, strict=True)}
    torch.func.functional_call(model, moved, (x,)).backward()


def test_weights_that_a_step_lends_to_the_whole_model() -> None:
    """A recompute would take the model's own: its gradients were wrong, and nothing said so."""
    torch.manual_seed(0)
    model = Learner()
    meta_step(model, sample())
    wanted = [p.grad for p in model.parameters()]
    model.zero_grad()
    with pytest.warns(UserWarning, match=r"0.weight, 0.bias, .* is changed from outside"):
        names = memopt.apply_activation_checkpointing(model, batch=sample(), step=meta_step)
    assert names == []
    meta_step(model, sample())
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, gradient)


def test_weights_that_a_model_lends_to_its_parts() -> None:
    """Its own parameters, under `functional_call`, are no others."""
    assert memopt.apply_activation_checkpointing(Learner(), batch=sample()) == ["a", "b"]
    lent = {"x": sample(), "adapts": True}
    with pytest.warns(UserWarning, match=r"b \(0.weight, .* is changed from outside"):
        assert memopt.apply_activation_checkpointing(Learner(), batch=lent) == ["a"]


class Explained(nn.Module):
    """Keeps what it attends to, and whoever explains it reads the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.a(x).softmax(-1)
        if self.seen.requires_grad:
            self.seen.retain_grad()
        return self.b(self.seen.tanh())


def test_a_tensor_that_a_block_keeps_with_its_gradient() -> None:
    """The recompute put another in its place, which had no gradient."""
    model = nn.Sequential(Explained(), nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8)))
    with pytest.warns(UserWarning, match=r"0 \(seen would lose the gradient that it retains"):
        names = memopt.apply_activation_checkpointing(
            model, check_fn=[model[0], model[1]].__contains__, batch=sample()
        )
    assert names == ["1"]
    model(sample()).sum().backward()
    assert model[0].seen.grad is not None
