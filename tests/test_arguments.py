"""Proves: an argument of another kind is refused in the name of the function that the user called,
with the rule and the value, and not taken by its truth value or passed over; models and files stay
as they were.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memopt
from tests.plan.models import chain
from tests.plan.support import looks

Call = Callable[[nn.Module, Any], object]


def planned(model: nn.Module, batch: Any) -> memopt.types.Plan:
    return memopt.plan(model, batch, "1GiB", measure=False)


FLAGS: dict[str, Call] = {
    "convert: recipes": lambda m, _: memopt.convert(m, recipes="no"),  # type: ignore[arg-type]
    "convert: functional": lambda m, _: memopt.convert(m, functional=0),  # type: ignore[arg-type]
    "convert: head": lambda m, _: memopt.convert(m, head="lm_head"),  # type: ignore[arg-type]
    "anatomy: recipes": lambda m, b: memopt.anatomy(m, b, recipes=None),  # type: ignore[arg-type]
    "anatomy: head": lambda m, b: memopt.anatomy(m, b, head="no"),  # type: ignore[arg-type]
    "anatomy: advice": lambda m, b: memopt.anatomy(m, b, advice=3),  # type: ignore[arg-type]
    "anatomy: set_to_none": lambda m, b: memopt.anatomy(m, b, set_to_none=1),  # type: ignore[arg-type]
    "fits: recipes": lambda m, b: memopt.fits(m, b, "1GB", recipes="no"),  # type: ignore[arg-type]
    "fits: head": lambda m, b: memopt.fits(m, b, "1GB", head="no"),  # type: ignore[arg-type]
    "plan: chunks": lambda m, b: memopt.plan(m, b, "1GB", chunks=4),  # type: ignore[arg-type]
    "plan: compiled": lambda m, b: memopt.plan(m, b, "1GB", compiled="no"),  # type: ignore[call-overload]
    "check: strict": lambda m, b: memopt.check(m, b, strict="no"),  # type: ignore[arg-type]
    "compile: fullgraph": lambda m, _: memopt.compile(m, fullgraph="no"),  # type: ignore[arg-type]
    "compile: dynamic": lambda m, _: memopt.compile(m, dynamic="no"),  # type: ignore[arg-type]
    "Plan.apply: watch": lambda m, b: planned(m, b).apply(watch="no"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("rule", FLAGS)
def test_a_flag_is_true_or_false(rule: str) -> None:
    model, batch = chain()
    before = looks(model)
    with pytest.raises(TypeError, match=f"^{rule} must be True or False, .*got "):
        FLAGS[rule](model, batch)
    assert looks(model) == before


REGIONS: dict[str, Callable[..., object]] = {
    "checkpoint": lambda m, b, **flag: memopt.checkpoint(m, b, **flag),
    "checkpoint_wrapper": lambda m, b, **flag: memopt.checkpoint_wrapper(m, **flag),
    "checkpoint_sequential": lambda m, b, **flag: memopt.checkpoint_sequential(m, 2, b, **flag),
    "apply_activation_checkpointing": (
        lambda m, b, **flag: memopt.apply_activation_checkpointing(m, **flag)
    ),
}
REGION_FLAGS = {
    "checkpoint": ("preserve_rng_state", "early_stop", "debug", "keep_decisions", "use_reentrant"),
    "checkpoint_wrapper": (
        *("maintain_forward_counter", "preserve_rng_state", "early_stop", "keep_decisions"),
    ),
    "checkpoint_sequential": ("unpack_outputs", "preserve_rng_state", "use_reentrant"),
    "apply_activation_checkpointing": (
        *("maintain_forward_counter", "preserve_rng_state", "early_stop", "keep_decisions"),
    ),
}


@pytest.mark.parametrize("value", ["", "no", torch.zeros(2), 0], ids=repr)
@pytest.mark.parametrize(
    ("who", "flag"), [(who, flag) for who, flags in REGION_FLAGS.items() for flag in flags]
)
def test_a_flag_of_a_region_is_true_or_false(who: str, flag: str, value: Any) -> None:
    model, batch = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)), torch.randn(2, 4)
    before = looks(model)
    with pytest.raises(TypeError, match=f"^{who}: {flag} must be True or False, got "):
        REGIONS[who](model, batch, **{flag: value})
    assert looks(model) == before


OTHERS: list[tuple[str, Call]] = [
    (
        "apply_activation_checkpointing: offload: must be 'cpu', 'disk' or a path, got int",
        lambda m, _: memopt.apply_activation_checkpointing(m, offload=0),  # type: ignore[arg-type]
    ),
    (
        'fits: checkpoint must be "all", .* got \\[\\]',
        lambda m, b: memopt.fits(m, b, "1GB", checkpoint=[]),  # type: ignore[arg-type]
    ),
    (
        "convert: checkpoint must be a ",
        lambda m, _: memopt.convert(m, checkpoint=torch.zeros(2)),  # type: ignore[arg-type]
    ),
    (
        "check: autocast must be a dtype .* got 0",
        lambda m, b: memopt.check(m, b, autocast=0),  # type: ignore[arg-type]
    ),
    (
        "compile: options must be a dict or None, got 'x'",
        lambda m, _: memopt.compile(m, options="x"),  # type: ignore[arg-type]
    ),
    (
        "plan: optimizer must make a torch.optim.Optimizer, got Linear",
        lambda m, b: memopt.plan(m, b, optimizer=nn.Linear, measure=False),  # type: ignore[call-overload]
    ),
]


@pytest.mark.parametrize(("words", "call"), OTHERS, ids=[words[:24] for words, _ in OTHERS])
def test_a_value_of_another_kind_is_named(words: str, call: Call) -> None:
    model, batch = chain()
    before = looks(model)
    with pytest.raises(TypeError, match=f"^{words}"):
        call(model, batch)
    assert looks(model) == before


@pytest.mark.parametrize("name", ["min_bytes", "max_bytes", "keep_last"])
def test_a_size_beyond_all_storages_is_a_size(name: str) -> None:
    x = torch.randn(4, requires_grad=True)
    with memopt.offload("cpu", **{name: 2**70}):  # type: ignore[arg-type]
        y = x.exp().sum()
    y.backward()
    assert x.grad is not None


PATHS: dict[str, Call] = {
    "Plan.load": lambda m, b: memopt.types.Plan.load(3),  # type: ignore[arg-type]
    "Plan.save": lambda m, b: planned(m, b).save(3),  # type: ignore[arg-type]
    "Plan.to_html": lambda m, b: planned(m, b).to_html(3),  # type: ignore[arg-type]
    "Plan.pareto": lambda m, b: planned(m, b).pareto(3),  # type: ignore[arg-type]
    "Anatomy.to_json": lambda m, b: memopt.anatomy(m, b).to_json(3),  # type: ignore[arg-type]
    "Anatomy.to_html": lambda m, b: memopt.anatomy(m, b).to_html(3),  # type: ignore[arg-type]
    "Anatomy.to_png": lambda m, b: memopt.anatomy(m, b).to_png(3),  # type: ignore[arg-type]
    "Anatomy.to_snapshot": lambda m, b: memopt.anatomy(m, b).to_snapshot(3),  # type: ignore[arg-type]
    "anatomy.read_snapshot": lambda m, b: memopt.anatomy.read_snapshot(3),  # type: ignore[arg-type]
    "Check.to_json": lambda m, b: memopt.check(m, b).to_json(3),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("who", PATHS)
def test_a_file_is_named_by_a_path(who: str) -> None:
    with pytest.raises(TypeError, match=f"^{who}: path must be a str or a path, got 3$"):
        PATHS[who](*chain())


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"micro_batch": 2, "budget": "1GB"}, ValueError, 'budget must be given with .*"auto"'),
        ({"micro_batch": 2, "optimizer": 3}, TypeError, "optimizer must be the torch.optim"),
        ({"micro_batch": 2, "labels": 3}, TypeError, "labels must be a key .*got 3"),
        ({"micro_batch": 2, "ignore_index": "x"}, TypeError, "ignore_index must be an int, got"),
    ],
)
def test_nothing_given_to_accumulate_is_passed_over(
    options: dict[str, Any], kind: type[Exception], said: str
) -> None:
    model, batch = chain()
    with pytest.raises(kind, match=f"^accumulate: {said}"):
        memopt.accumulate(model, batch, **options)
    assert all(p.grad is None for p in model.parameters())


def test_what_only_another_argument_takes_is_refused_without_it() -> None:
    model, batch = chain()
    with pytest.raises(ValueError, match=r"^plan: host_budget must be given with offload.*1GB"):
        memopt.plan(model, batch, "1GB", host_budget="1GB")
    with pytest.raises(ValueError, match=r'^plan: measure must be True, False or "auto", got 1'):
        memopt.plan(model, batch, "1GB", measure=1)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"^Plan.to_html: anatomy must be what memopt.anatomy ret"):
        planned(model, batch).to_html(anatomy=5)  # type: ignore[arg-type]


def test_a_device_is_a_name_or_an_object() -> None:
    model, batch = chain()
    for device in ("cpu", "cuda"):
        by_name = memopt.anatomy(model, batch, device=device)
        by_object = memopt.anatomy(model, batch, device=torch.device(device))
        assert by_name.predicted is not None
        assert by_object.predicted is not None
        assert by_object.predicted.peak == by_name.predicted.peak
        assert by_object.device == by_name.device == device


def test_a_plan_is_pickled_as_it_is_saved(tmp_path: Path) -> None:
    """For another process, or torch.save: with its numbers, without its model."""
    model, batch = chain()
    plan = memopt.plan(model, batch, "1GiB", measure=False)
    plan = plan.within(int(0.7 * plan.plain_peak))
    plan.save(tmp_path / "plan.json")
    there = pickle.loads(pickle.dumps(plan))
    assert there.to_dict() == memopt.types.Plan.load(tmp_path / "plan.json").to_dict()
    assert there.to_dict() == plan.to_dict()
    twin, _ = chain()
    plain = memopt.saved_bytes(twin, batch)
    plan.apply(watch=False)
    there.apply(twin)
    assert memopt.saved_bytes(twin, batch) == memopt.saved_bytes(model, batch) < plain
    there.undo()
    plan.undo()
