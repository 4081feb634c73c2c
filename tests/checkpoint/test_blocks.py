"""Proves: a model's blocks are found as its author means them, whichever style it is written in:
towers, stages, dicts, lists of lists, mixtures of experts; and what is found runs as a region.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt._checkpoint import apply_activation_checkpointing, checkpoint_wrapper
from memopt._checkpoint.blocks import find_blocks
from tests.checkpoint.block_styles import (
    SIZE,
    STYLES,
    Alternating,
    Block,
    Experts,
    FeedForward,
    MambaBlock,
    NumberedStage,
    Tower,
    blocks,
    paths,
)
from tests.checkpoint.support import step_results
from tests.support.bits import assert_same_bits


@pytest.mark.parametrize("style", STYLES)
def test_the_blocks_are_the_author_s_and_run_as_regions(style: str) -> None:
    torch.manual_seed(0)
    make, expected = STYLES[style]
    model = make()
    x = torch.randn(2, 3, SIZE, requires_grad=True)
    plain = step_results(lambda: model(x), [x, *model.parameters()])
    before = memopt.saved_bytes(model, x)
    assert apply_activation_checkpointing(model) == expected
    assert_same_bits(step_results(lambda: model(x), [x, *model.parameters()]), plain)
    assert memopt.saved_bytes(model, x) < before
    for path in expected:
        assert calls_of(model.get_submodule(path), lambda: model(x).sum().backward()) == 2


def calls_of(module: nn.Module, call: Callable[[], Any]) -> int:
    """How often what is in `module` runs; a recompute may end before the last of it."""
    calls: Counter[nn.Module] = Counter()
    parts = [m for m in module.modules() if not list(m.children())]
    handles = [part.register_forward_pre_hook(lambda m, _: calls.update([m])) for part in parts]
    call()
    for handle in handles:
        handle.remove()
    return max(calls.values())


@pytest.mark.parametrize("norms", [False, True])
def test_of_a_list_of_lists_the_modules_inside_are_wrapped(norms: bool) -> None:
    model, x = nn.Sequential(Alternating(norms=norms)), torch.randn(2, 3, SIZE)
    plain = step_results(lambda: model(x), model.parameters())
    before = memopt.saved_bytes(model, x)
    names = apply_activation_checkpointing(model)
    assert names == [f"0.layers.{i}.{j + norms}" for i in range(3) for j in range(2)]
    assert_same_bits(step_results(lambda: model(x), model.parameters()), plain)
    assert memopt.saved_bytes(model, x) < before
    assert calls_of(model[0].layers[0][norms], lambda: model(x).sum().backward()) == 2


def test_convert_says_that_a_batch_finds_more() -> None:
    report = memopt.convert(nn.Sequential(Alternating()), checkpoint=True)
    (note,) = (note for note in report.notes if "a batch finds more" in note)
    assert note in str(report)
    assert not apply_activation_checkpointing(Alternating(), check_fn=lambda m: False)


def test_experts_of_layers_that_are_in_no_list_are_regions_each() -> None:
    """Experts beside a router look like layers in a list. Where the layers are one, they are."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = Block(mlp=Experts(experts=2))
            self.second = Block(mlp=Experts(experts=3))

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))

    assert apply_activation_checkpointing(Model()) == [
        *paths("first.mlp.experts.{}", 2),
        *paths("second.mlp.experts.{}", 3),
    ]
    layers = Tower([Block(mlp=Experts()) for _ in range(2)])
    assert apply_activation_checkpointing(layers) == paths("blocks.{}", 2)


class CalledByName(nn.Module):
    """Heads: each of them gets the same."""

    def __init__(self) -> None:
        super().__init__()
        self.head1, self.head2 = FeedForward(), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([head(x) for head in self.heads()]).sum(0)

    def heads(self) -> tuple[nn.Module, ...]:
        return self.head1, self.head2


class Projection(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.linear(x)
        return output


NO_BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "linears": lambda: NumberedStage([nn.Linear(SIZE, SIZE) for _ in range(3)]),
    "norms": lambda: NumberedStage([nn.LayerNorm(SIZE) for _ in range(3)]),
    "linears in modules": lambda: NumberedStage([Projection() for _ in range(3)]),
    "several classes": lambda: NumberedStage([Block(), MambaBlock()]),
    "one": lambda: NumberedStage([Block()]),
    "a list of linears": lambda: nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(4)),
    "a list of tables": lambda: nn.ModuleList(nn.Embedding(9, SIZE) for _ in range(4)),
}


@pytest.mark.parametrize("make", NO_BLOCKS.values(), ids=NO_BLOCKS)
def test_what_holds_no_blocks(make: Callable[[], nn.Module]) -> None:
    assert not find_blocks(make())


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (CalledByName, ["head1", "head2"]),
        (lambda: NumberedStage([Block(), nn.Identity(), Block()]), ["b1", "b3"]),
        (lambda: NumberedStage([CalledByName(), CalledByName()]), [
            f"b{i}.head{j}" for i in (1, 2) for j in (1, 2)
        ]),
    ],
)  # fmt: skip
def test_children_of_one_class_are_blocks_where_they_hold_none(
    make: Callable[[], nn.Module], expected: list[str]
) -> None:
    assert apply_activation_checkpointing(make()) == expected


@pytest.mark.parametrize(
    "module",
    [
        nn.ModuleList([nn.Linear(2, 2)]),
        nn.ModuleDict({"a": nn.Linear(2, 2)}),
        nn.ParameterList([nn.Parameter(torch.ones(2))]),
        nn.Module(),
    ],
    ids=lambda module: type(module).__name__,
)
def test_what_has_no_forward_is_no_region(module: nn.Module) -> None:
    kind = type(module)
    with pytest.raises(
        TypeError, match=rf"^checkpoint_wrapper: module must have a forward, .* got {kind.__name__}"
    ):
        checkpoint_wrapper(module)
    assert type(module) is kind
    module.forward = lambda x: x  # type: ignore[method-assign]
    checkpoint_wrapper(module)


def test_check_fn_passes_over_what_has_no_forward() -> None:
    model = Tower([Block(), nn.ModuleList([Block()])])
    chosen = apply_activation_checkpointing(
        model, check_fn=lambda m: isinstance(m, (Block, nn.ModuleList))
    )
    assert chosen == ["blocks.0", "blocks.1.0"]
    for choose in (
        lambda: apply_activation_checkpointing(model, check_fn=nn.ModuleList),
        lambda: memopt.convert(model, checkpoint=nn.ModuleList),
    ):
        with pytest.raises(TypeError, match=r"must choose modules that have a forward, got Mod"):
            choose()


@pytest.mark.parametrize("choice", [Block, [Block], (Block, MambaBlock)])
def test_classes_choose_as_in_convert(choice: Any) -> None:
    model = Tower([Block(), Block(), MambaBlock()])
    expected = [
        n
        for n, m in model.named_modules()
        if isinstance(m, choice if isinstance(choice, type) else tuple(choice))
    ]
    assert apply_activation_checkpointing(model, check_fn=choice) == expected
    memopt.unwrap(model)
    assert list(memopt.convert(model, checkpoint=choice).checkpointed) == expected


@pytest.mark.parametrize("choice", ["Block", 3, [3], [], int, [nn.Linear, int], [nn.Linear(2, 2)]])
def test_choices_of_another_kind(choice: object) -> None:
    with pytest.raises(
        TypeError,
        match=r"^apply_activation_checkpointing: check_fn must be a function of a module, a subc",
    ):
        apply_activation_checkpointing(Tower(blocks(2)), check_fn=choice)


def test_convert_offloads_the_blocks() -> None:
    model, x = Tower(blocks(3)), torch.randn(2, 3, SIZE)
    plain = step_results(lambda: model(x), model.parameters())
    report = memopt.convert(model, offload="cpu")
    assert (report.checkpointed, report.offloaded) == ((), ("blocks.0", "blocks.1", "blocks.2"))
    memopt.revert(model)
    assert_same_bits(step_results(lambda: model(x), model.parameters()), plain)
    report = memopt.convert(model, checkpoint=lambda m: m is model.blocks[1], offload="cpu")
    assert (report.checkpointed, report.offloaded) == ((), ("blocks.1",))
    report = memopt.convert(model, checkpoint=False)
    assert (report.checkpointed, report.offloaded) == ((), ())


def test_a_parametrization_is_no_list_of_blocks() -> None:
    model = Tower(blocks(2))
    for _ in range(2):
        nn.utils.parametrize.register_parametrization(model.stem, "weight", FeedForward())
    assert apply_activation_checkpointing(model) == ["blocks.0", "blocks.1"]


@pytest.mark.slow
def test_transformers_blocks_are_those_that_its_own_checkpointing_takes() -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_layers import GradientCheckpointingLayer

    small = {"vocab_size": 50, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    few = {"num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 8}
    t5 = {"vocab_size": 50, "d_model": 16, "d_ff": 16, "d_kv": 8, "num_heads": 2, "num_layers": 2}
    bart = {
        f"{part}_{name}": 2
        for part in ("encoder", "decoder")
        for name in ("layers", "attention_heads")
    }
    configs = [
        transformers.LlamaConfig(**small, **few),
        transformers.MixtralConfig(**small, **few, num_local_experts=4),
        transformers.DeepseekV3Config(
            **small, num_hidden_layers=3, n_routed_experts=8, first_k_dense_replace=1
        ),
        transformers.JambaConfig(
            **small,
            num_hidden_layers=4,
            attn_layer_period=4,
            attn_layer_offset=2,
            use_mamba_kernels=False,
        ),
        transformers.BertConfig(**small, num_hidden_layers=2),
        transformers.T5Config(**t5),
        transformers.BartConfig(vocab_size=50, d_model=16, **bart),
        transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2),
        transformers.SegformerConfig(hidden_sizes=[8, 16, 16, 16], depths=[1, 2, 1, 1]),
    ]
    for config in configs:
        with torch.device("meta"):
            model = transformers.AutoModel.from_config(config)
        theirs = [n for n, m in model.named_modules() if isinstance(m, GradientCheckpointingLayer)]
        assert apply_activation_checkpointing(model) == theirs, type(model)


class _Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class _Decoder(nn.Module):
    """Of SAM: a token for each of its heads; and layers."""

    def __init__(self, layers: int, gate: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(4, 8)
        self.layers = nn.ModuleList(_Mlp(8) for _ in range(layers))
        self.heads = nn.ModuleList(_Mlp(8) for _ in range(4))
        if gate:
            self.gate = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize(
    ("layers", "gate", "expected"),
    [
        (0, False, ["decoder.heads.0"]),
        (2, False, ["decoder.layers.0", "decoder.heads.0"]),
        (2, True, ["decoder.layers.0", "decoder.heads.0"]),
    ],
)
def test_tokens_for_heads_are_no_router_and_no_block_is_inside_another(
    layers: int, gate: bool, expected: list[str]
) -> None:
    model = nn.Module()
    model.decoder = _Decoder(layers, gate)
    names = memopt.apply_activation_checkpointing(model)
    assert set(expected) <= set(names)
    assert not any(one.startswith(f"{other}.") for one in names for other in names)


def _old_weight_norm(layer: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(layer)


class _Generator(nn.Module):
    """Of HiFi-GAN: layers to make it longer, and residual blocks of convolutions."""

    def __init__(self, norm: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.longer = nn.ModuleList(norm(nn.ConvTranspose1d(8, 8, 4, 2, 1)) for _ in range(3))
        self.blocks = nn.ModuleList(_Residual(norm) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.longer):
            x = layer(x.relu())
            x = self.blocks[2 * number](x) + self.blocks[2 * number + 1](x)
        return x.square().mean()


class _Residual(nn.Module):
    def __init__(self, norm: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.one = nn.ModuleList(norm(nn.Conv1d(8, 8, 3, padding=1)) for _ in range(3))
        self.two = nn.ModuleList(norm(nn.Conv1d(8, 8, 3, padding=1)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for one, two in zip(self.one, self.two, strict=True):
            x = x + two(one(x.relu()).relu())
        return x


@pytest.mark.parametrize(
    "norm",
    [
        lambda layer: layer,
        _old_weight_norm,
        nn.utils.parametrizations.weight_norm,
        nn.utils.parametrizations.spectral_norm,
        nn.utils.spectral_norm,
    ],
    ids=["plain", "weight_norm", "parametrized weight_norm", "parametrized spectral", "spectral"],
)
def test_a_layer_whose_weight_is_computed_is_a_layer(
    norm: Callable[[nn.Module], nn.Module],
) -> None:
    """The residual blocks are regions, and each drops some of what its forward saves."""
    model = _Generator(norm)
    x = torch.randn(1, 8, 16)
    before = memopt.saved_bytes(model, x)
    names = memopt.apply_activation_checkpointing(model)
    assert names == [f"blocks.{number}" for number in range(6)]
    assert memopt.saved_bytes(model, x) < 0.5 * before
