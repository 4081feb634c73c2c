"""Proves: apply_activation_checkpointing wraps exactly the submodules that were asked for, finds a
model's blocks by itself, changes nothing when it must refuse, and `unwrap(model)` undoes it all.
"""

from __future__ import annotations

import itertools
import re
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor, nn

from memopt._checkpoint import apply_activation_checkpointing, checkpoint_wrapper, unwrap
from memopt._checkpoint.wrapper import settings_of
from tests.checkpoint.support import Net, runs_twice, step_results
from tests.support.bits import assert_same_bits


class Model(nn.Module):
    """A list of blocks between other things, a shorter list among them."""

    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.heads = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.layers = nn.ModuleList(Net() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return sum(head(x) for head in self.heads)


def wrapped(model: nn.Module) -> list[str]:
    """Names of the submodules whose forward is a region, in order."""
    return [name for name, m in model.named_modules() if settings_of(m) is not None]


def layers(*numbers: int) -> list[str]:
    return [f"layers.{number}" for number in numbers]


def test_finds_the_blocks_by_itself() -> None:
    model = Model()
    keys, shown = list(model.state_dict()), repr(model)
    assert apply_activation_checkpointing(model) == layers(*range(6)) == wrapped(model)
    assert list(model.state_dict()) == keys
    assert repr(model) == shown


def test_blocks_run_twice_and_give_the_same_bits() -> None:
    model, x = Model(), torch.randn(2, 4)
    expected = step_results(lambda: model(x), model.parameters())
    apply_activation_checkpointing(model, every=2)
    assert_same_bits(step_results(lambda: model(x), model.parameters()), expected)
    assert [layer.count.calls for layer in model.layers] == [3, 2] * 3


def test_unwrap_undoes_it_on_the_model() -> None:
    model = Model()
    apply_activation_checkpointing(model, maintain_forward_counter=True)
    assert unwrap(model) is model
    assert wrapped(model) == []
    assert not any(hasattr(m, "_checkpoint_fwd_counter") for m in model.modules())
    assert not runs_twice(model, model.layers[0].count)


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        ({"every": 1}, [0, 1, 2, 3, 4, 5]),
        ({"every": 2}, [0, 2, 4]),
        ({"every": 4}, [0, 4]),
        ({"every": 100}, [0]),
        ({"fraction": 0}, []),
        ({"fraction": 0.34}, [0, 3]),
        ({"fraction": 0.5}, [0, 2, 4]),
        ({"fraction": 1.0}, [0, 1, 2, 3, 4, 5]),
        ({"skip_first": 2}, [2, 3, 4, 5]),
        ({"skip_last": 1}, [0, 1, 2, 3, 4]),
        ({"skip_first": 1, "skip_last": 1, "every": 3}, [1, 4]),
        ({"skip_first": 2, "fraction": 0.5}, [2, 4]),
        ({"skip_first": 3, "skip_last": 3}, []),
        ({"skip_last": 8}, []),
        ({"skip_first": 8}, []),
    ],
    ids=str,
)
def test_chooses_among_the_blocks(options: dict[str, Any], numbers: list[int]) -> None:
    model = Model()
    assert apply_activation_checkpointing(model, **options) == layers(*numbers) == wrapped(model)


@given(st.integers(1, 40), st.floats(0, 1))
def test_a_fraction_is_rounded_and_spread_evenly(depth: int, fraction: float) -> None:
    model = nn.ModuleList(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)) for _ in range(depth))
    chosen = [int(name) for name in apply_activation_checkpointing(model, fraction=fraction)]
    assert len(chosen) == round(fraction * depth)
    # Around the ring of all blocks, gaps differ by one at most.
    ring = [*chosen, *(first + depth for first in chosen[:1])]
    gaps = [b - a for a, b in itertools.pairwise(ring)]
    assert not gaps or max(gaps) - min(gaps) <= 1
    assert chosen[:1] in ([], [0])


def test_check_fn_chooses_among_all_submodules_but_the_root() -> None:
    seen = []

    def check(module: nn.Module) -> bool:
        seen.append(module)
        return isinstance(module, (Model, nn.Linear))

    model = Model(depth=2)
    names = [
        "stem.0",
        "heads.0",
        "heads.1",
        "layers.0.linear",
        "layers.1.linear",
    ]
    assert apply_activation_checkpointing(model, check_fn=check) == names == wrapped(model)
    assert set(seen) == set(model.modules()) - {model}


def test_check_fn_that_chooses_none_wraps_none() -> None:
    model = Model()
    assert apply_activation_checkpointing(model, check_fn=lambda _: False) == []
    assert wrapped(model) == []


def test_candidates_inside_candidates_are_wrapped_too() -> None:
    model, x = Model(depth=2), torch.randn(2, 4)
    expected = step_results(lambda: model(x), model.parameters())
    names = apply_activation_checkpointing(
        model, check_fn=lambda m: isinstance(m, (Net, nn.Linear)), skip_first=3
    )
    assert names == ["layers.0", "layers.0.linear", "layers.1", "layers.1.linear"]
    assert wrapped(model) == names
    assert_same_bits(step_results(lambda: model(x), model.parameters()), expected)


def test_a_shared_module_is_wrapped_once() -> None:
    shared = Net()
    model = nn.Sequential(shared, Net(), shared)
    assert apply_activation_checkpointing(model) == ["0", "1"]
    twice = nn.ModuleDict({"a": model, "b": nn.ModuleList([Net(), shared])})
    assert apply_activation_checkpointing(twice) == ["a.0", "a.1", "b.0"]


def test_the_root_may_be_the_list() -> None:
    model = nn.Sequential(*(Net() for _ in range(3)))
    assert apply_activation_checkpointing(model) == ["0", "1", "2"] == wrapped(model)


def test_wrapping_again_replaces_the_settings_and_leaves_the_others() -> None:
    model = Model(depth=4)
    apply_activation_checkpointing(model, every=2, maintain_forward_counter=True)
    assert hasattr(model.layers[2], "_checkpoint_fwd_counter")
    # The blocks are found although only some of them are wrapped.
    assert apply_activation_checkpointing(model, skip_first=1) == layers(1, 2, 3)
    assert wrapped(model) == layers(0, 1, 2, 3)
    assert hasattr(model.layers[0], "_checkpoint_fwd_counter")
    assert not hasattr(model.layers[2], "_checkpoint_fwd_counter")


def test_settings_reach_the_wrapper() -> None:
    model, twin = Model(depth=3), Model(depth=3)
    apply_activation_checkpointing(model, offload_to_cpu=True, maintain_forward_counter=True)
    checkpoint_wrapper(twin.layers[0], offload_to_cpu=True, maintain_forward_counter=True)
    assert settings_of(model.layers[0]) == settings_of(twin.layers[0])


def test_the_options_of_a_region_reach_the_wrapper() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
    apply_activation_checkpointing(model, offload="cpu", preserve_rng_state=False)
    for block in model:
        settings = settings_of(block)
        assert settings is not None
        assert (settings.offload, settings.preserve_rng_state) == ("cpu", False)


def test_a_region_without_the_generators_state_draws_anew() -> None:
    block = nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 64))
    x = torch.ones(8, 64, requires_grad=True)
    same = []
    for preserve in (True, False):
        checkpoint_wrapper(block, preserve_rng_state=preserve)
        y = block(x)
        grad = torch.autograd.grad(y.sum(), block[1].weight)[0][0]
        drops = y.detach() - block[1].bias
        expected = (drops @ torch.linalg.pinv(block[1].weight.detach()).T).sum(0)
        same.append(torch.allclose(grad, expected, atol=1e-3))
    assert same == [True, False]


def test_all_lists_count_but_those_inside_a_block() -> None:
    model = nn.ModuleDict(
        {
            "encoder": nn.ModuleList(Net() for _ in range(3)),
            "short": nn.ModuleList(Net() for _ in range(2)),
            "decoder": nn.Sequential(
                *(nn.Sequential(*(nn.Linear(2, 2) for _ in range(3))) for _ in range(3))
            ),
            "heads": nn.ModuleList(nn.Linear(2, 2) for _ in range(5)),
        }
    )
    lengths = {"encoder": 3, "short": 2, "decoder": 3}
    expected = [f"{part}.{i}" for part, length in lengths.items() for i in range(length)]
    assert apply_activation_checkpointing(model) == expected == wrapped(model)


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(2, 2),
        nn.Sequential(),
        nn.ModuleList(nn.Tanh() for _ in range(3)),
        nn.Sequential(nn.Linear(2, 2), nn.Tanh()),
        nn.ModuleDict({"a": nn.Linear(2, 2)}),
    ],
    ids=["no list", "empty", "no parameters", "other classes", "no order"],
)
def test_a_model_without_blocks_is_refused(model: nn.Module) -> None:
    with pytest.raises(
        ValueError, match=r"^apply_activation_checkpointing: without check_fn, model must have"
    ):
        apply_activation_checkpointing(model)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_after_an_error_nothing_is_wrapped() -> None:
    script = torch.jit.trace(nn.Linear(4, 4), torch.ones(1, 4))
    model = nn.Sequential(checkpoint_wrapper(Net(), False, True), Net(), script)
    before = [(type(m), dict(m.__dict__)) for m in model.modules()]
    with pytest.raises(TypeError, match=r"^checkpoint_wrapper: module must not be a ScriptModule"):
        apply_activation_checkpointing(model, check_fn=lambda m: True)
    assert [(type(m), m.__dict__) for m in model.modules()] == before


def test_a_check_fn_that_raises_leaves_the_model_alone() -> None:
    model = Model()
    with pytest.raises(ZeroDivisionError):
        apply_activation_checkpointing(model, check_fn=lambda m: 1 / isinstance(m, nn.Sequential))
    assert wrapped(model) == []


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"every": 0}, ValueError, "every must be an int of at least 1, got 0"),
        ({"every": 1.5}, TypeError, "every must be an int of at least 1, got 1.5"),
        ({"every": True}, TypeError, "every must be an int of at least 1, got True"),
        ({"skip_first": -1}, ValueError, "skip_first must be an int of at least 0, got -1"),
        ({"skip_last": None}, TypeError, "skip_last must be an int of at least 0, got None"),
        ({"fraction": 1.01}, ValueError, "fraction must be a number from 0 to 1, got 1.01"),
        ({"fraction": -0.1}, ValueError, "fraction must be a number from 0 to 1, got -0.1"),
        ({"fraction": float("nan")}, ValueError, "fraction must be a number from 0 to 1, got nan"),
        ({"fraction": "half"}, TypeError, "fraction must be a number from 0 to 1, got 'half'"),
        (
            {"every": 2, "fraction": 0.5},
            ValueError,
            "every and fraction must not be given together, got every=2 and fraction=0.5",
        ),
        (
            {"check_fn": 3},
            TypeError,
            "check_fn must be a function of a module, a subclass of nn.Module, or a sequence of "
            "such classes, got 3",
        ),
    ],
    ids=str,
)
def test_wrong_arguments(options: dict[str, Any], error: type, message: str) -> None:
    model = Model()
    with pytest.raises(error, match=f"^{re.escape(f'apply_activation_checkpointing: {message}')}$"):
        apply_activation_checkpointing(model, **options)
    assert wrapped(model) == []


def test_model_that_is_no_module() -> None:
    with pytest.raises(
        TypeError, match=r"^apply_activation_checkpointing: model must be an nn.Module, got i"
    ):
        apply_activation_checkpointing(3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_models_of_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if name == "gpt2":
        # A cache of keys and values would be written a second time by the recompute.
        config = transformers.GPT2Config(
            vocab_size=50, n_positions=16, n_embd=8, n_layer=3, n_head=2, use_cache=False
        )
        model, blocks = transformers.GPT2LMHeadModel(config), "transformer.h"
    else:
        config = transformers.BertConfig(
            vocab_size=50,
            hidden_size=8,
            num_hidden_layers=3,
            num_attention_heads=2,
            intermediate_size=16,
        )
        model, blocks = transformers.BertForMaskedLM(config), "bert.encoder.layer"
    model.train()
    tokens = torch.randint(50, (2, 7))

    def loss() -> Tensor:
        return model(input_ids=tokens, labels=tokens).loss

    expected = step_results(loss, model.parameters())
    assert apply_activation_checkpointing(model) == [f"{blocks}.{i}" for i in range(3)]
    assert_same_bits(step_results(loss, model.parameters()), expected)
    unwrap(model)
    assert wrapped(model) == []
