"""Proves: memopt.check says of each block what was asked and what happened: counts of forwards are
those of the step, bytes those of the allocator, on models with memopt's fates, transformers' or
PyTorch's checkpointing or none; what has no effect is named with the reason and raises; the model
is afterwards as it was.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as torchs
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import memopt
from memopt.__main__ import main
from memopt.memory.allocator import LiveBytes
from memopt.types import Check, CheckedBlock, FateWithoutEffect
from tests.support.fingerprint import Fingerprint
from tests.support.residual import ResidualBlock

WIDTH, ROWS = 32, 64
X = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ResidualBlock(WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.run(block, x)
        return self.head(x)

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)


class Own(Net):
    """Runs its blocks under PyTorch's checkpoint, in forward."""

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        return torch_checkpoint(block, x, use_reentrant=False)


def by_path(found: Check) -> dict[str, CheckedBlock]:
    return {block.path: block for block in found.blocks}


def allocated(model: nn.Module) -> tuple[int, int]:
    """Bytes at the end of forward and at the peak, by the allocator."""
    model(X).sum().backward()
    model.zero_grad()
    with LiveBytes() as live:
        loss = model(X).sum()
        live.mark()
        loss.backward()
    model.zero_grad()
    return live.marks[0].nbytes, live.most


def fates() -> dict[str, Any]:
    def wrapped() -> nn.Module:
        model = Net()
        for place, block in enumerate(model.blocks):
            model.blocks[place] = torchs.checkpoint_wrapper(block)
        return model

    def with_(change: Any) -> nn.Module:
        model = Net()
        change(model)
        return model

    return {
        "memopt's": lambda: with_(memopt.apply_activation_checkpointing),
        "converted": lambda: with_(lambda m: memopt.convert(m, checkpoint=True)),
        "PyTorch's wrapper": wrapped,
        "its own": Own,
    }


@pytest.mark.parametrize("how", fates())
def test_regions_of_any_kind(how: str) -> None:
    torch.manual_seed(0)
    model = fates()[how]()
    found = memopt.check(model, X)
    blocks = [block for block in found.blocks if block.path.startswith("blocks.")]
    assert len(blocks) == 3
    for block in blocks:
        assert (block.calls, block.again, block.happened) == (1, 1, "recomputed")
        assert (block.asked == "keep") == (how == "its own")
        if how != "its own":  # which a copy cannot be without
            assert block.plain_kept is not None
            assert block.plain_kept >= 4 * ROWS * 8 * WIDTH
    assert found.ok
    assert (found.kept, found.peak) == pytest.approx(allocated(model), abs=64)
    plain = allocated(Net())
    assert found.kept is not None
    assert found.kept < plain[0] / 4
    if how != "its own":
        assert found.plain_peak == pytest.approx(plain[1], rel=0.02)
    found.raise_if_not_ok()


def test_a_plain_model_and_a_converted_one() -> None:
    model = Net()
    plain = memopt.check(model, X)
    assert {(b.asked, b.happened, b.again) for b in plain.blocks} == {("keep", "kept", 0)}
    assert plain.predicted_kept == plain.plain_kept
    memopt.convert(model)
    converted = memopt.check(model, X)
    assert {(b.asked, b.happened) for b in converted.blocks} == {("recipes", "recipes")}
    assert converted.plain_kept == plain.plain_kept
    assert converted.kept is not None
    assert plain.kept is not None
    less = 3 * 4 * ROWS * 5 * WIDTH  # outputs of norms and activations
    assert plain.kept - converted.kept == pytest.approx(less, rel=0.05)


def test_regions_inside_others_are_noted() -> None:
    model = Net()
    memopt.apply_activation_checkpointing(model)
    inner = model.blocks[1] = nn.Sequential(ResidualBlock(WIDTH), ResidualBlock(WIDTH))
    memopt.checkpoint_wrapper(inner)
    memopt.apply_activation_checkpointing(inner)
    found = memopt.check(model, X)
    assert found.ok
    assert by_path(found)["blocks.1.0"].again == 2
    assert by_path(found)["blocks.1.0"].happened == "recomputed 2 times"
    assert "blocks.1.0: a region inside another, blocks.1" in found.notes[0]


def test_offloaded_bytes_are_counted(tmp_path: Path) -> None:
    """Of three regions' inputs one stays: it would come back as soon as it has left."""
    model, x = Net(), torch.randn(16 * ROWS, WIDTH)
    for block in model.blocks:
        memopt.checkpoint_wrapper(block, offload=tmp_path)
    found = memopt.check(model, x)
    assert found.offloaded == 2 * x.nbytes
    assert by_path(found)["blocks.0"].asked == f"region, inputs offloaded to {tmp_path}"


class Cases:
    """Models in which something has no effect, and the words that say why."""

    def never_called(self) -> nn.Module:
        model = Net()
        model.extra = memopt.checkpoint_wrapper(ResidualBlock(WIDTH))
        return model

    never_called.words = r"extra: the step never calls it"  # type: ignore[attr-defined]

    def without_gradients(self) -> nn.Module:
        class Target(Net):
            def forward(self, x: Tensor) -> Tensor:
                with torch.no_grad():
                    x = self.blocks[0](x)
                return self.head(self.blocks[1](x))

        model = Target()
        memopt.checkpoint_wrapper(model.blocks[0])
        return model

    without_gradients.words = r"blocks\.0: it runs without gradients"  # type: ignore[attr-defined]

    def keeps_nothing(self) -> nn.Module:
        model = Net()
        model.head = nn.Sequential(nn.Flatten(0, 0), model.head)
        memopt.checkpoint_wrapper(model.head[0])
        return model

    keeps_nothing.words = r"head\.0: it keeps nothing for backward"  # type: ignore[attr-defined]

    def another_forward(self) -> nn.Module:
        class Replaced(ResidualBlock):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x)

        def other(self: nn.Module, x: Tensor) -> Tensor:
            return ResidualBlock.forward(self, x)

        model = Net()
        model.blocks[0] = Replaced(WIDTH)
        memopt.checkpoint_wrapper(model.blocks[0])
        Replaced.forward = other  # as libraries of faster kernels do
        return model

    another_forward.words = r"blocks\.0: Replaced has got another forward since: put the region"  # type: ignore[attr-defined]

    def another_forward_of_its_own(self) -> nn.Module:
        model = Net()
        memopt.checkpoint_wrapper(model.blocks[0])
        model.blocks[0].forward = lambda x: x.exp() * x
        return model

    another_forward_of_its_own.words = r"blocks\.0: ResidualBlock has got another forward since"  # type: ignore[attr-defined]

    def no_recipes(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
        memopt.convert(model)
        return model

    no_recipes.words = r"recipes: the model was converted, and keeps no fewer"  # type: ignore[attr-defined]

    def compiled_recipes(self) -> nn.Module:
        model = Net()
        memopt.convert(model)
        model.blocks[1].compile(backend="eager")
        return model

    compiled_recipes.words = r"blocks\.1: it is compiled: torch\.compile decides"  # type: ignore[attr-defined]

    def recipes_inside_compiled_code(self) -> nn.Module:
        model = Net()
        memopt.convert(model)
        return torch.compile(model, backend="eager")

    recipes_inside_compiled_code.words = r"_orig_mod\.blocks\.1: it is compiled"  # type: ignore[attr-defined]


@pytest.mark.parametrize("case", [n for n in vars(Cases) if not n.startswith("_")])
def test_without_effect(case: str) -> None:
    make = getattr(Cases, case)
    model = make(Cases())
    found = memopt.check(model, X)
    assert not found.ok
    with pytest.raises(FateWithoutEffect, match=make.words):
        memopt.check(model, X, strict=True)


def test_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = transformers.LlamaForCausalLM(config)
    model.gradient_checkpointing_enable()
    ids = torch.arange(64).reshape(2, 32)
    batch = {"input_ids": ids, "labels": ids, "use_cache": False}
    found = memopt.check(model.train(), batch)
    assert found.ok
    assert {(b.asked, b.again) for b in found.blocks} == {("region by transformers", 1)}
    found = memopt.check(model.eval(), batch)
    assert {b.again for b in found.blocks} == {0}
    assert "transformers checkpoints in training mode alone" in str(found)


def test_a_head_in_evaluation_mode_has_no_effect() -> None:
    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(40, WIDTH), nn.Linear(WIDTH, 40)

        def forward(self, ids: Tensor) -> Tensor:
            return nn.functional.cross_entropy(self.head(self.words(ids)), ids)

    model, ids = Language(), torch.arange(16)
    memopt.convert(model)
    assert by_path(memopt.check(model, ids))["head"].happened == "head in chunks"
    found = memopt.check(model.eval(), ids)
    assert not found.ok
    assert "in evaluation mode its logits are computed; model.train()" in str(found)


def test_the_model_is_as_before() -> None:
    model = Net()
    memopt.convert(model, checkpoint=True)
    model(X).sum().backward()
    before = Fingerprint(model)
    state = torch.get_rng_state()
    memopt.check(model, X)
    assert Fingerprint(model).entries == before.entries
    assert torch.equal(torch.get_rng_state(), state)


def test_without_values_bytes_are_predicted() -> None:
    model, x = copy.deepcopy(Net()).to("meta"), X.to("meta")
    memopt.checkpoint_wrapper(model.blocks[0])
    found = memopt.check(model, x)
    assert (found.kept, found.peak) == (None, None)
    assert found.predicted_kept is not None
    assert found.plain_kept is not None
    assert found.predicted_kept < found.plain_kept
    assert by_path(found)["blocks.0"].kept == 0


def test_a_step_that_looks_at_values_is_counted() -> None:
    class Looks(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if self.head.weight.sum().item() else x

    model = Looks()
    memopt.checkpoint_wrapper(model.blocks[1])
    found = memopt.check(model, X)
    assert by_path(found)["blocks.1"].again == 1
    assert found.plain_kept is None
    assert "bytes by block are not known: DependsOnValues" in str(found)


class Alone(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        assert x.sum().item() < 1e9
        return super().forward(x).tanh().exp().sin()


def test_regions_without_modules_inside_are_counted() -> None:
    """In a step whose bytes are not known, too."""
    model = nn.Sequential(Alone(WIDTH, WIDTH), Alone(WIDTH, WIDTH))
    model[1].forward = model[1].forward
    memopt.apply_activation_checkpointing(model, check_fn=lambda module: True)
    found = memopt.check(model, X, strict=True)
    assert [(b.again, b.happened) for b in found.blocks] == [(1, "recomputed")] * 2


def test_recipes_inside_checkpointing_of_the_models_own_lower_its_peak() -> None:
    """They were said to have no effect, since nothing is kept there anyway."""
    model = Own()
    before = allocated(model)[1]
    memopt.convert(model)
    assert allocated(model)[1] < before
    assert memopt.check(model, X, strict=True).ok


def test_recipes_of_a_step_that_looks_at_values_are_not_said_to_be_kept() -> None:
    """Their bytes by block are not known then."""

    class Asks(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            assert self[0][0].weight.sum().item() < 1e9
            return super().forward(x)

    layers = (nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8))
    model = Asks(*(nn.Sequential(*layers) for _ in range(3)))
    memopt.convert(model)
    found = memopt.check(model, torch.randn(4, 8))
    assert found.ok
    assert {block.happened for block in found.blocks} == {"recipes, not counted"}


def job() -> tuple[nn.Module, Any]:
    model = Net()
    memopt.checkpoint_wrapper(model.blocks[0])
    return model, X


def bad_job() -> tuple[nn.Module, Any]:
    return Cases().never_called(), X


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "check.json"
    assert main(["check", "tests.check.test_check:job", "--json", str(file)]) == 0
    assert "everything that was asked took effect" in capsys.readouterr().out
    assert json.loads(file.read_text())["ok"] is True
    assert main(["check", "tests.check.test_check:bad_job"]) == 1
    assert "extra: the step never calls it" in capsys.readouterr().out
    assert main(["check", "nowhere:f"]) == 2


def test_bad_input() -> None:
    with pytest.raises(TypeError, match=r"^check: model must be an nn\.Module, got int"):
        memopt.check(3, X)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="expected input with shape"):
        memopt.check(Net(), torch.randn(3, 5))
