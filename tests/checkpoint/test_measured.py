"""Proves: with a batch, regions are the set of modules that gives the least peak, the best of all
sets for small trees; what is said to stay is what stays; gradients have the bits of the plain step.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

import memopt
from memopt._checkpoint.best import ModulePlace, best_cut, places_of, what_stays
from memopt._checkpoint.measured import measured_regions
from memopt._checkpoint.wrapper import settings_of
from memopt.memory.allocator import LiveBytes
from memopt.memory.calls.measure import step_with
from memopt.memory.calls.tree import CallTree, ModuleCall
from memopt.memory.paths import outermost_paths
from tests.checkpoint.random_trees import TREES, WIDTH, InTurn, Norm, Target, Wide, made
from tests.checkpoint.support import step_results, tree_of
from tests.support.bits import assert_same_bits
from tests.support.looks import looks


def batch(rows: int = 32) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1))


def sets_below(place: ModulePlace) -> Iterator[tuple[ModulePlace, ...]]:
    """All sets of regions in and below a place, none inside another."""
    if place.may_be_region:
        yield (place,)
    for chosen in itertools.product(*map(list, map(sets_below, place.children))):
        yield tuple(itertools.chain(*chosen))


@given(TREES)
@settings(max_examples=30, deadline=None)
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
@settings(max_examples=30, deadline=None)
def test_gradients_and_bytes_of_random_trees(spec: object) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(made(spec), Wide(1)), batch().requires_grad_()
    plain = step_results(lambda: model(x), [x, *model.parameters()])
    before = memopt.saved_bytes(model, x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on views
        measured = measured_regions(step_with("test", model, x))
        names = memopt.apply_activation_checkpointing(model, batch=x)
    assert set(names) == set(measured.paths)
    assert_same_bits(step_results(lambda: model(x), [x, *model.parameters()]), plain)
    own = sum(s.nbytes for s in before.storages if s.is_input)
    assert before - own == measured.tree.kept_bytes
    after = memopt.saved_bytes(model, x)
    own = sum(s.nbytes for s in after.storages if s.is_input)
    assert after - own == measured.cut.stays


def test_modules_that_run_without_gradients_are_none_and_are_named() -> None:
    model = nn.Sequential(Target(Wide(4), Wide(4)), Wide(4))
    report = memopt.convert(model, batch(), recipes=False, checkpoint=True)
    assert "0.frozen" not in report.checkpointed
    assert "1" in report.checkpointed
    (note,) = (note for note in report.notes if "without gradients" in note)
    assert note.endswith(": 0.frozen")


class Writing(nn.Module):
    """Writes to its argument, which nothing else keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Wide(4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(torch.exp(self.inner(x.mul_(2))))


class Later(nn.Module):
    """Writes to what was a module's argument, once that has run."""

    def __init__(self) -> None:
        super().__init__()
        self.part = _Exponents()

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        found = self.part(x)
        return found.sum() + x.add_(1)


class _Exponents(nn.Module):
    """Keeps results and not its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Wide(4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = (-x).exp()
        return self.inner(x)


class Viewing(nn.Module):
    """Returns a view of its argument beside what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Wide(8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.sin(torch.exp(self.inner(torch.sin(x)))), x[:, :4]


class Holder(nn.Module):
    """Calls each of its parts on a new tensor."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(())
        for part in self.parts:
            found = part(x * self.scale)
            total = total + sum(t.sum() for t in (found if isinstance(found, tuple) else (found,)))
        return total


@pytest.mark.parametrize(
    ("model", "path", "why"),
    [
        (Holder(Writing(), Writing(), Writing()), "parts.0", "it writes to its arguments in place"),
        (
            Holder(Later(), Later(), Later()),
            "parts.0.part",
            "an argument is written",
        ),
        (Holder(Viewing(), Viewing(), Viewing()), "parts.0", "it returns a view of an argument"),
    ],
    ids=["writes", "written later", "view"],
)
def test_what_cannot_be_a_region_is_none_and_the_warning_says_why(
    model: nn.Module, path: str, why: str
) -> None:
    x = batch()
    plain = step_results(lambda: model(x), model.parameters())
    with pytest.warns(UserWarning, match=rf"no regions.*{path}.*\({why}"):
        names = memopt.apply_activation_checkpointing(model, batch=x)
    assert path not in names
    assert_same_bits(step_results(lambda: model(x), model.parameters()), plain)


def test_modules_that_the_batch_never_calls_are_named() -> None:
    model = nn.Sequential(Wide(4), Wide(4))
    model.spare = Wide(4)
    model.forward = lambda x: model[1](model[0](x))  # type: ignore[method-assign]
    report = memopt.convert(model, batch(), recipes=False, checkpoint=True)
    assert report.checkpointed == ("0", "1")
    assert "no regions, since the batch never calls them: spare" in report.notes


def test_choices_that_overlap_or_change_nothing_are_named() -> None:
    model = nn.Sequential(Target(InTurn([Wide(2)]), InTurn([Wide(2)])), Wide(2))
    with pytest.warns(UserWarning, match="regions") as found:
        names = memopt.apply_activation_checkpointing(model, check_fn=(InTurn, Wide), batch=batch())
    assert len(names) == 5  # as without a batch
    told = " ".join(str(one.message) for one in found)
    assert "modules that the batch calls without gradients alone: 0.frozen" in told
    assert "inside others, which backward runs again twice: 0.frozen.parts.0" in told


def test_a_batch_that_the_model_refuses() -> None:
    model = nn.Sequential(Wide(2), Wide(2))
    before = looks(model)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as error:
        memopt.apply_activation_checkpointing(model, batch=torch.randn(2, 3))
    (note,) = error.value.__notes__
    assert note.startswith("apply_activation_checkpointing: Sequential raised this with the batch")
    with pytest.raises(TypeError, match="positional argument"):
        memopt.apply_activation_checkpointing(model, batch=(batch(), batch()))
    assert looks(model) == before


def test_a_module_that_two_others_call_may_be_a_region() -> None:
    shared = Wide(16)
    model = Holder(*(InTurn([shared, Wide(16), Wide(16)]) for _ in range(2)))
    names = memopt.apply_activation_checkpointing(model, batch=batch())
    others = ["parts.0.parts.1", "parts.0.parts.2", "parts.1.parts.1", "parts.1.parts.2"]
    assert names == ["parts.0.parts.0", *others]
    assert settings_of(shared) is not None


class Attends(nn.Module):
    """Its memory is made by the module around it."""

    def __init__(self, memory: int, query: int) -> None:
        super().__init__()
        self.memory, self.query = Wide(memory), nn.Parameter(torch.randn(WIDTH, query * WIDTH))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return torch.tanh(x @ self.query) @ self.query.T * memory


class Decodes(nn.Module):
    def __init__(self, memory: int, query: int) -> None:
        super().__init__()
        self.attention, self.out = Attends(memory, query), Wide(8)

    def forward(self, x: Tensor) -> Tensor:
        made = self.attention.memory(x)
        for _ in range(3):
            x = x + self.attention(x, made)
        return self.out(x).square().mean()


@pytest.mark.parametrize(
    ("memory", "query", "expected"), [(4, 16, "attention"), (64, 1, "attention.memory")]
)
def test_no_region_is_inside_another_by_its_path(memory: int, query: int, expected: str) -> None:
    """Where a module is called from outside of the one that it is in."""
    model = Decodes(memory, query)
    assert expected in (names := memopt.apply_activation_checkpointing(model, batch=batch()))
    assert len(outermost_paths(names)) == len(names)
    blocks = memopt.plan(Decodes(memory, query), batch(), "1GiB", measure=False).profile.blocks
    assert len(outermost_paths(blocks)) == len(blocks)


def test_a_model_that_looks_at_values_runs() -> None:
    class Looks(InTurn):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if float(x.sum()) < 1e9 else x

    model = Looks([Wide(4), Wide(4)])
    assert memopt.apply_activation_checkpointing(model, batch=batch()) == ["parts.0", "parts.1"]


def test_a_model_without_values_is_predicted() -> None:
    with torch.device("meta"):
        model, x = nn.Sequential(Wide(4), Norm(), Wide(4)), torch.empty(32, WIDTH)
    assert {"0", "2"} <= set(memopt.apply_activation_checkpointing(model, batch=x))


def test_a_second_call_chooses_the_same() -> None:
    model = nn.Sequential(Wide(4), Norm(), Wide(4))
    names = memopt.apply_activation_checkpointing(model, batch=batch())
    assert memopt.apply_activation_checkpointing(model, batch=batch()) == names == ["0", "2"]


def test_two_sequentials_are_regions_with_a_batch_and_without() -> None:
    """Their lists show no blocks, but they are of one class."""

    class Coder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))
            self.decoder = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))

        def forward(self, x: Tensor) -> Tensor:
            return self.decoder(self.encoder(x)).square().mean()

    names = memopt.apply_activation_checkpointing(Coder(), batch=batch())
    assert names == memopt.apply_activation_checkpointing(Coder()) == ["encoder", "decoder"]
    plan = memopt.plan(Coder(), batch(), "1GiB", measure=False)
    assert {block.path for block in plan.blocks} == {"encoder", "decoder"}


def test_blocks_that_are_given_to_a_plan_must_run_with_gradients() -> None:
    model = nn.Sequential(Target(Wide(2), Wide(2)), Wide(2))
    model.spare = Wide(2)
    model.forward = lambda x: model[1](model[0](x)).sum()  # type: ignore[method-assign]
    for path, why in (("spare", "never calls"), ("0.frozen", "calls without gradients alone")):
        with pytest.raises(ValueError, match=rf"^plan: blocks must .*{path}.*batch {why}"):
            memopt.plan(model, batch(), "1GiB", blocks=["0.part", path], measure=False)


def test_transformers_checkpointing_keeps_no_less() -> None:
    """In a model of few layers finer regions would have less of a peak, and keep more."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64,
    )  # fmt: skip
    model = transformers.BertModel(config).train()
    tokens = {"input_ids": torch.randint(0, 50, (2, 32))}
    model.gradient_checkpointing_enable()
    own = memopt.saved_bytes(model, **tokens)
    model.gradient_checkpointing_disable()
    assert memopt.apply_activation_checkpointing(model, batch=tokens)
    assert memopt.saved_bytes(model, **tokens) <= own


def test_regions_hold_no_more_than_the_checkpointing_of_t5() -> None:
    """Its layers hold a list of others, which backward runs again. By the allocator, which sees
    what checkpoints hold for the recompute.
    """
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=50, d_model=16, d_ff=64, d_kv=8, num_heads=2, num_layers=2,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config).train()
    ids = torch.randint(0, 50, (4, 32))
    tokens = {"input_ids": ids, "labels": ids, "use_cache": False}

    def held() -> int:
        model(**tokens)  # what is made once
        with LiveBytes() as live:
            output = model(**tokens)
        del output
        return live.left

    model.gradient_checkpointing_enable()
    own = held()
    model.gradient_checkpointing_disable()
    memopt.apply_activation_checkpointing(model, batch=tokens)
    assert held() <= own


def test_of_three_thousand_modules_each_is_looked_at_once_for_each_bound() -> None:
    """The choice is a sum over the tree for all bounds at once; the regions are alike."""
    calls = [call_of("", -1, 0), *(call_of(str(n), 0, 1000) for n in range(3000))]
    tree = CallTree(tuple(calls), (), 0, ())
    found = best_cut(tree)
    assert len(found.paths) == 3000
    assert found.stays == 0


def call_of(path: str, parent: int, own: int) -> ModuleCall:
    return ModuleCall(
        path,
        parent,
        True,
        (),
        (),
        0,
        0,
        own,
        own,
        2 * own,
        2 * own,
        0,
        0,
        1,
        False,
        False,
        False,
    )


def test_transformers_checkpointing_of_a_model_that_looks_at_values() -> None:
    """A router asks which tokens an expert gets. The model's own checkpointing is off again."""
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, intermediate_size=64, num_local_experts=2, use_cache=False,
    )  # fmt: skip
    model = transformers.MixtralModel(config).train()
    tokens = {"input_ids": torch.randint(0, 50, (2, 32))}
    before = looks(model)
    model.gradient_checkpointing_enable()
    own = memopt.saved_bytes(model, **tokens)
    model.gradient_checkpointing_disable()
    assert memopt.apply_activation_checkpointing(model, batch=tokens)
    assert memopt.saved_bytes(model, **tokens) <= own
    memopt.unwrap(model)
    assert looks(model).keys() == before.keys()
