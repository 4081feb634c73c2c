"""Proves: on random trees of modules the peak of a step with the chosen regions is predicted in
every byte that the allocator counts, also where the batch gets a gradient; and no other set of
regions, none inside another, has a peak that is lower by more than a hundredth.
"""

from __future__ import annotations

import gc
import itertools
import warnings
from collections.abc import Collection

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from memopt._checkpoint.assigned import put_regions
from memopt._checkpoint.best import ModulePlace, places_of
from memopt._checkpoint.measured import MeasuredRegions, measured_regions
from memopt.assignment import Assignment, Choice
from memopt.memory.allocator import LiveBytes
from memopt.memory.calls.measure import step_with, sum_of_outputs
from memopt.memory.peak import bytes_here
from memopt.memory.predicted.predict import hollow_step
from memopt.memory.step import Step
from memopt.memory.totals import highs_of
from tests.checkpoint.random_trees import TREES, WIDTH, Wide, made
from tests.checkpoint.test_measured import sets_below

_MOST_TO_PREDICT = 16


def model_of(spec: object) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(made(spec), Wide(1))


def step_of(model: nn.Module, with_gradient: bool = False) -> Step:
    batch = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(1))
    return Step(model, batch.requires_grad_(with_gradient), None, sum_of_outputs, who="test")


def put(model: nn.Module, paths: Collection[str]) -> None:
    put_regions(model, Assignment({(path,): Choice(checkpoint=True) for path in paths}))


def predicted_peak(step: Step, paths: Collection[str] = ()) -> int:
    return max(highs_of(hollow_step(step, lambda model: put(model, paths), "cpu").ledger))


def chosen(step: Step) -> MeasuredRegions:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on views
        return measured_regions(step_with("test", step.model, step.batch))


def measured_peak(step: Step) -> int:
    def run(batch: Tensor) -> None:
        step.forward_and_backward(batch)
        step.model.zero_grad()

    run(step.batch.detach().requires_grad_(step.batch.requires_grad))  # what is made once
    gc.collect()
    with LiveBytes() as live:
        run(step.batch)
    step.batch.grad = None
    return bytes_here(step) + live.most_with_scratch


@given(TREES, st.booleans())
@settings(max_examples=20, deadline=None)
def test_the_predicted_peak_is_the_measured_one(spec: object, with_gradient: bool) -> None:
    step = step_of(model_of(spec), with_gradient)
    put(step.model, chosen(step).paths)
    assert predicted_peak(step) == measured_peak(step)


@given(TREES)
@settings(max_examples=15, deadline=None, derandomize=True)
def test_no_other_set_of_regions_has_a_lower_peak(spec: object) -> None:
    """Of small trees, whose sets can all be predicted."""
    step = step_of(model_of(spec))
    found = chosen(step)
    root = places_of(found.tree, found.reasons, {})
    every = {paths_of(one) for one in itertools.islice(sets_below(root), _MOST_TO_PREDICT + 1)}
    assume(2 < len(every) <= _MOST_TO_PREDICT)
    mine = predicted_peak(step, found.paths)
    for paths in every - {found.paths}:
        assert mine <= 1.01 * predicted_peak(step, paths), paths


def paths_of(places: Collection[ModulePlace]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(place.path for place in places))
