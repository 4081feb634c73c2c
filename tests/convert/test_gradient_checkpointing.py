"""Proves: transformers' gradient checkpointing runs each layer of a converted model as often as a
layer of the plain one, and holds no more bytes for backward, in whichever order the two are turned
on; convert's own regions take its place in the layers that they are made of, and say so.

Bits alone would not show it: with and without checkpointing they are the same.
"""

from __future__ import annotations

import inspect
import os
import zlib
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt.memory.allocator import LiveBytes
from tests.convert.support import NoNarrowing, errors
from tests.support.families import FAMILIES, LEFT_OUT, QUICK
from tests.support.fingerprint import Fingerprint
from tests.support.tiny_transformers import Tiny, checkpointing_families, loss_of, tiny
from tests.support.tolerances import RESULT_ERROR_RATIO

transformers: Any = pytest.importorskip("transformers", minversion="5.23")

Step = Callable[[nn.Module], object]


@dataclass
class Run:
    """A training step."""

    forwards: Counter[str]
    """Of each layer that transformers can checkpoint, in forward and backward: how often the leaf
    in it is called that is called first.
    """

    held: int
    """Bytes that are allocated when forward has returned and backward begins; -1 if not counted."""

    gradients: dict[str, Tensor]


def train(family: Tiny, *steps: Step, count: bool = True) -> Run:
    """One step of a new model, after these changes of it; `count` says whether to count bytes."""
    model = family.make()
    for step in steps:
        step(model)
    return run(model, lambda: loss_of(model(**family.inputs())), count)


def run(model: nn.Module, loss_of_model: Callable[[], Tensor], count: bool = True) -> Run:
    calls: Counter[tuple[str, str]] = Counter()
    handles = [
        leaf.register_forward_pre_hook(
            lambda *_, path=path, name=name: calls.update([(path, name)])
        )
        for path, layer in layers(model).items()
        for name, leaf in layer.named_modules()
        if not leaf._modules
    ]
    model.zero_grad(set_to_none=True)
    torch.manual_seed(2)
    live = LiveBytes()
    with live if count else nullcontext():
        loss = loss_of_model()
        live.mark()
        loss.backward()
    for handle in handles:
        handle.remove()
    forwards: Counter[str] = Counter()
    for (path, _), number in calls.items():
        forwards.setdefault(path, number)
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return Run(forwards, live.marks[0].nbytes if count else -1, gradients)


def layers(model: nn.Module) -> dict[str, nn.Module]:
    from transformers.modeling_layers import GradientCheckpointingLayer

    return {n: m for n, m in model.named_modules() if isinstance(m, GradientCheckpointingLayer)}


def checkpoint(model: nn.Module) -> None:
    model.activation_checkpointing_enable()  # type: ignore[operator]


def convert(model: nn.Module) -> None:
    assert memopt.convert(model).recipes


def convert_with_regions(model: nn.Module) -> None:
    assert memopt.convert(model, checkpoint=True).checkpointed


def same_bits(ours: Run, theirs: Run) -> bool:
    return ours.gradients.keys() == theirs.gradients.keys() and all(
        torch.equal(gradient, theirs.gradients[name]) for name, gradient in ours.gradients.items()
    )


def assert_as_right(family: Tiny, ours: Run, theirs: Run) -> None:
    """The same gradients but for rounding; where sums are long, as near to float64 as plain."""
    assert ours.gradients.keys() == theirs.gradients.keys()
    names = [n for n, g in theirs.gradients.items() if g.numel()]
    largest = max(float(theirs.gradients[n].abs().max()) for n in names)
    if all(
        float((ours.gradients[n] - theirs.gradients[n]).abs().max()) <= 1e-5 * largest
        for n in names
    ):
        return
    exact = {f"gradient of {n}": g for n, g in exact_run(family).gradients.items() if n in names}
    ours_and_theirs = (
        {f"gradient of {n}": each.gradients[n] for n in names} for each in (ours, theirs)
    )
    our_error, their_error = errors(*ours_and_theirs, exact)["all"]
    assert our_error <= RESULT_ERROR_RATIO * their_error


def exact_run(family: Tiny) -> Run:
    """The plain model in float64 throughout."""
    model = family.make().double()
    inputs = {n: v.double() if v.is_floating_point() else v for n, v in family.inputs().items()}
    with NoNarrowing():
        return run(model, lambda: loss_of(model(**inputs)), count=False)


ALL = pytest.mark.parametrize(
    "name", [pytest.param(f, marks=() if f in QUICK else pytest.mark.slow) for f in FAMILIES]
)


def is_thorough(name: str) -> bool:
    """Whether the other order, regions and a sample are tried as well: every third family, chosen
    by its name; all of them where MEMOPT_TEST_THOROUGH=1 is set, in ten minutes more.
    """
    chosen = zlib.crc32(name.encode()) % 3 == 0
    return name in QUICK or chosen or os.environ.get("MEMOPT_TEST_THOROUGH") == "1"


@ALL
def test_each_layer_runs_as_often_and_holds_no_more(name: str) -> None:
    """And a sample leaves all as it was: hooks that a first call installs, attributes, buffers."""
    family = tiny(name)

    def step(model: nn.Module, count: bool = True) -> Run:
        return run(model, lambda: loss_of(model(**family.inputs())), count)

    model = family.make()
    plain = step(model, count=False)
    checkpoint(model)
    alone = step(model)
    assert sum(alone.forwards.values()) > sum(plain.forwards.values())  # else it proves nothing

    model = family.make()
    convert(model)
    converted = step(model, count=False)
    assert converted.forwards == plain.forwards
    assert_as_right(family, converted, plain)
    checkpoint(model)
    after = step(model)

    assert after.forwards == alone.forwards
    assert after.held <= alone.held
    # Where a tensor goes to several layers its gradients are added in another order, as in plain.
    bits = same_bits(alone, plain)
    assert same_bits(after, converted) or not bits
    if not is_thorough(name):
        return

    model, inputs = family.make(), family.inputs()
    checkpoint(model)
    fingerprint = Fingerprint(model, inputs)
    memopt.convert(model, inputs)
    memopt.revert(model)
    assert Fingerprint(model, inputs).differences(fingerprint) == []
    convert(model)
    before = step(model)

    assert before.forwards == alone.forwards
    assert before.held <= alone.held
    assert same_bits(before, after)
    convert_with_regions(model)
    regions = step(model)
    assert regions.held <= alone.held
    assert same_bits(regions, converted) or not bits


@pytest.mark.slow
def test_every_family_is_tried_or_named() -> None:
    found = checkpointing_families()
    assert len(found) > 600
    assert found <= {*FAMILIES, *LEFT_OUT}, "new in transformers"
    assert not set(FAMILIES) & set(LEFT_OUT)
    assert set(LEFT_OUT) <= found, "no longer in transformers"


@pytest.mark.parametrize(
    "name",
    [n for n, why in LEFT_OUT.items() if why == "transformers checkpoints none of its layers"],
)
@pytest.mark.slow
def test_families_without_layers_to_checkpoint(name: str) -> None:
    family = tiny(name)
    model = family.make()
    checkpoint(model)
    assert not layers(model)
    source = inspect.getsource(inspect.getmodule(type(model)))  # type: ignore[arg-type]
    assert "_gradient_checkpointing_func(" not in source


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.parametrize("first", ["checkpoint", "regions"])
def test_regions_take_its_place(name: str, first: str) -> None:
    """No layer runs three times: neither inside the other's."""
    family = tiny(name)
    steps = [checkpoint, convert_with_regions][:: 1 if first == "checkpoint" else -1]
    alone, regions = train(family, checkpoint), train(family, *steps)
    assert regions.forwards == alone.forwards
    assert regions.held <= alone.held
    model = family.make()
    checkpoint(model)
    report = memopt.convert(model, checkpoint=True)
    assert any("take the place of transformers' gradient checkpointing" in n for n in report.notes)
    assert not any("twice" in note for note in report.notes)
    memopt.revert(model)
    reverted = run(model, lambda: loss_of(model(**family.inputs())))
    assert (reverted.forwards, reverted.held) == (alone.forwards, alone.held)


def test_a_report_without_it_does_not_mention_it() -> None:
    for step in (checkpoint, lambda m: (checkpoint(m), m.activation_checkpointing_disable())):
        model = tiny("llama").make()
        step(model)
        notes = str(memopt.convert(model).notes)
        assert "gradient checkpointing" not in notes


def test_regions_around_layers_that_it_is_on_in() -> None:
    family = tiny("llama")
    model = nn.Sequential(family.make())
    checkpoint(model[0])
    notes = memopt.convert(model, checkpoint=lambda m: m is model[0]).notes
    assert any(
        n.endswith("backward runs its layers again twice: 0.layers.0, 0.layers.1") for n in notes
    )
    step = run(model, lambda: loss_of(model[0](**family.inputs())))
    assert set(step.forwards.values()) == {3}


def test_some_of_the_layers_only() -> None:
    """As every_n_layers chooses them."""
    family = tiny("llama")

    def every_second(model: nn.Module) -> None:
        model.activation_checkpointing_enable(every_n_layers=2)  # type: ignore[operator]

    alone = train(family, every_second)
    assert sorted(alone.forwards.values()) == [1, 2]
    for steps in ((convert, every_second), (every_second, convert)):
        both = train(family, *steps)
        assert both.forwards == alone.forwards
        assert both.held <= alone.held


def test_turned_off_again_it_is_off() -> None:
    family = tiny("llama")

    def on_and_off(model: nn.Module) -> None:
        checkpoint(model)
        model.activation_checkpointing_disable()  # type: ignore[operator]

    converted, off = train(family, convert), train(family, convert, on_and_off)
    assert (off.forwards, off.held) == (converted.forwards, converted.held)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("first", ["convert", "checkpoint"])
def test_both_kinds_of_pytorch_s_checkpoint(use_reentrant: bool, first: str) -> None:
    family = tiny("llama")

    def enable(model: nn.Module) -> None:
        model.activation_checkpointing_enable(  # type: ignore[operator]
            activation_checkpointing_kwargs={"use_reentrant": use_reentrant}
        )
        model.enable_input_require_grads()  # type: ignore[operator]

    steps = [convert, enable][:: 1 if first == "convert" else -1]
    alone, both = train(family, enable), train(family, *steps)
    assert set(alone.forwards.values()) == {2}
    assert both.forwards == alone.forwards
    assert both.held <= alone.held
    assert same_bits(both, train(family, convert))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize(
    "order", ["wrap convert enable", "convert wrap enable", "wrap enable convert"]
)
def test_adapters(use_reentrant: bool, order: str) -> None:
    """PEFT's LoRA, on a frozen model."""
    peft = pytest.importorskip("peft")
    from transformers import LlamaForCausalLM

    family = tiny("llama")
    ids = family.inputs()["input_ids"]

    def adapted(order: str) -> Run:
        torch.manual_seed(0)
        model: Any = LlamaForCausalLM(family.config).train()
        for step in order.split():
            if step == "wrap":
                settings = peft.LoraConfig(target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
                torch.manual_seed(1)
                model = peft.get_peft_model(model, settings)
            elif step == "convert":
                convert(model)
            else:
                model.enable_input_require_grads()
                model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        return run(model, lambda: model(input_ids=ids, labels=ids).loss)

    alone, both = adapted("wrap enable"), adapted(order)
    assert set(alone.forwards.values()) == {2}
    assert both.forwards == alone.forwards
    assert both.held <= alone.held
    assert both.gradients.keys() == alone.gradients.keys()
    assert same_bits(both, adapted("wrap convert"))


def test_diffusers_models_that_checkpoint_their_blocks_themselves() -> None:
    """The model runs the block under a checkpoint; a region there keeps nothing less."""
    diffusers = pytest.importorskip("diffusers")

    def train(*steps: Step) -> Counter[int]:
        torch.manual_seed(0)
        model = diffusers.DiTTransformer2DModel(
            num_attention_heads=2,
            attention_head_dim=8,
            in_channels=4,
            num_layers=2,
            sample_size=4,
            num_embeds_ada_norm=4,
        ).train()
        for step in steps:
            step(model)
        calls: Counter[int] = Counter()
        for i, block in enumerate(model.transformer_blocks):
            block.attn1.to_q.register_forward_pre_hook(lambda *_, i=i: calls.update([i]))
        ones = torch.ones(1, dtype=torch.long)
        image = torch.randn(1, 4, 4, 4)
        model(image, timestep=ones, class_labels=ones).sample.sum().backward()
        return calls

    def enable(model: Any) -> None:
        model.enable_gradient_checkpointing()

    def regions(model: nn.Module) -> None:
        notes = memopt.convert(model, checkpoint=True).notes
        said = any("nothing left for that to save: transformer_blocks.0" in n for n in notes)
        assert said == model.gradient_checkpointing

    expected = {0: 2, 1: 2}
    for steps in ((enable,), (convert, enable), (enable, convert), (enable, regions), (regions,)):
        assert train(*steps) == expected
    assert train(convert) == {0: 1, 1: 1}
