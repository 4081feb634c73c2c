"""Proves: with a batch, regions are the set of modules that gives the least peak, the best of all
sets for small trees; what is said to stay is what stays; gradients have the bits of the plain step.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator

import torch
from hypothesis import given, settings
from torch import Tensor, nn

import memopt
from memopt._checkpoint.best import ModulePlace, best_cut, places_of, what_stays
from memopt._checkpoint.measured import measured_regions
from memopt.memory.calls.measure import call_tree, sum_of_outputs
from memopt.memory.calls.tree import CallTree
from memopt.memory.step import Step
from tests.checkpoint.random_trees import TREES, WIDTH, Wide, made
from tests.checkpoint.support import step_results
from tests.support.bits import assert_same_bits


def batch(rows: int = 32) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1))


def tree_of(model: nn.Module, x: Tensor) -> CallTree:
    return call_tree(Step(model, x, None, sum_of_outputs, who="test"), None)


def sets_below(place: ModulePlace) -> Iterator[tuple[ModulePlace, ...]]:
    """All sets of regions in and below a place, none inside another."""
    if place.may_be_region:
        yield (place,)
    for chosen in itertools.product(*map(list, map(sets_below, place.children))):
        yield tuple(itertools.chain(*chosen))


@given(TREES)
@settings(max_examples=60, deadline=None)
def test_the_chosen_set_is_the_best_of_all(spec: object) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(made(spec), Wide(1))
    tree = tree_of(model, batch())
    root = places_of(tree, (), {})
    found = best_cut(tree)
    floor = best_cut(tree, [place.path for place in everything(root)]).working
    peaks = [
        what_stays(root, chosen) + max(floor, *(p.working for p in chosen), 0)
        for chosen in itertools.islice(sets_below(root), 5000)
    ]
    assert found.peak <= min(peaks)


def everything(place: ModulePlace) -> Iterator[ModulePlace]:
    yield place
    for child in place.children:
        yield from everything(child)


@given(TREES)
@settings(max_examples=60, deadline=None)
def test_gradients_and_bytes_of_random_trees(spec: object) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(made(spec), Wide(1)), batch().requires_grad_()
    plain = step_results(lambda: model(x), [x, *model.parameters()])
    before = memopt.saved_bytes(model, x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on views
        measured = measured_regions("test", model, x)
        names = memopt.apply_activation_checkpointing(model, batch=x)
    assert set(names) == set(measured.paths)
    assert_same_bits(step_results(lambda: model(x), [x, *model.parameters()]), plain)
    own = sum(s.nbytes for s in before.storages if s.is_input)
    assert before - own == measured.tree.kept_bytes
    after = memopt.saved_bytes(model, x)
    own = sum(s.nbytes for s in after.storages if s.is_input)
    assert after - own == measured.cut.stays
