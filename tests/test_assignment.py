"""Proves: an assignment, put on a model, gives each module its choice, whoever made it, and taken
off leaves nothing behind. A choice may be of one module or of several that are treated as one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt._checkpoint.wrapper import settings_of
from memopt.applied import assign, assigned
from memopt.assignment import KEEP, Assignment, Choice
from memopt.whatif.fates import Fates

WIDTH = 16
REGION = Choice(checkpoint=True)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.act, self.down = nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.act(self.up(self.norm(x))))
        return out


class Stack(nn.Module):
    def __init__(self, count: int = 5) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(count)))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.blocks(self.stem(x))
        return out


def stack() -> Stack:
    torch.manual_seed(0)
    return Stack()


def batch() -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))


def gradients(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    model(batch()).square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def looks(model: nn.Module) -> list[object]:
    return [
        (path, id(module), type(module), sorted(module.__dict__), len(module._forward_hooks))
        for path, module in model.named_modules()
    ]


def same_bits(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_a_choice_is_found_by_the_path_of_a_module() -> None:
    both = Choice(recipes=True, checkpoint=True, offload=1.0)
    found = Assignment({("a",): REGION, ("b", "c"): both}, "cpu")
    assert [found.of(path) for path in "abcd"] == [REGION, both, both, KEEP]
    assert found.where(lambda choice: choice.recipes) == ("b", "c")
    assert found.staying().of("c") == Choice(recipes=True, checkpoint=True)
    assert found.staying().place is None
    without = found.without_regions(["c"])
    assert not without.of("b").checkpoint
    assert without.of("a").checkpoint
    assert without.place == "cpu"


def test_neighbours_that_share_a_region_keep_one_input() -> None:
    model = stack()
    plain, before = gradients(model), looks(model)
    alone = Assignment({f"blocks.{n}": REGION for n in range(1, 4)})
    shared = Assignment({("blocks.1", "blocks.2", "blocks.3"): REGION})
    input_bytes = batch().nbytes
    with assigned(model, alone):
        in_three = memopt.saved_bytes(model, batch())
        assert same_bits(gradients(model), plain)
    with assigned(model, shared):
        assert memopt.saved_bytes(model, batch()) == in_three - 2 * input_bytes
        assert same_bits(gradients(model), plain)
        assert same_bits(gradients(copy.deepcopy(model)), plain)
    assert looks(model) == before


def test_two_regions_of_several_in_one_chain() -> None:
    """Among blocks with choices of their own."""
    model = stack()
    plain, before = gradients(model), looks(model)
    put = assign(
        model,
        Assignment(
            {
                ("blocks.0", "blocks.1"): REGION,
                ("blocks.2",): REGION,
                ("blocks.3", "blocks.4"): REGION,
            }
        ),
    )
    assert memopt.saved_bytes(model, batch()) == 4 * batch().nbytes  # the stem's input, and three
    assert same_bits(gradients(model), plain)
    put.undo()
    assert looks(model) == before


def test_a_chain_that_has_a_block_twice() -> None:
    model = stack()
    model.blocks[1] = model.blocks[0]
    plain = gradients(model)
    with assigned(model, Assignment({("blocks.0", "blocks.1", "blocks.2"): REGION})):
        assert same_bits(gradients(model), plain)


class _Residual(nn.Sequential):
    def forward(self, input: Tensor) -> Tensor:
        for module in self:
            input = input + module(input)
        return input


@pytest.mark.parametrize(
    ("model", "at"),
    [
        (Stack(), ("blocks.0", "blocks.2")),
        (Stack(), ("blocks.1", "blocks.0")),
        (Stack(), ("stem", "blocks.0")),
        (nn.ModuleList([Block(), Block()]), ("0", "1")),
        (_Residual(Block(), Block()), ("0", "1")),
    ],
    ids=["a gap", "the wrong order", "no chain", "a list", "a chain with a forward of its own"],
)
def test_several_regions_are_of_neighbours_in_a_chain(
    model: nn.Module, at: tuple[str, ...]
) -> None:
    before = looks(model)
    several = Choice(checkpoint=True, segments="sqrt")
    with pytest.raises(ValueError, match="that share several regions must be neighbours"):
        assign(model, Assignment({at: several, ("",): Choice(recipes=True)}))
    assert looks(model) == before


@pytest.mark.parametrize(
    "at",
    [("blocks.0", "blocks.2"), ("blocks.1", "blocks.0"), ("stem", "blocks.0")],
    ids=["a gap", "the wrong order", "no chain"],
)
def test_modules_that_do_not_follow_each_other_are_regions_alone(at: tuple[str, ...]) -> None:
    model = stack()
    plain, before = gradients(model), looks(model)
    with assigned(model, Assignment({at: REGION})):
        assert same_bits(gradients(model), plain)
    assert looks(model) == before


def test_a_path_of_no_module_is_named() -> None:
    model = stack()
    before = looks(model)
    for choice in (Choice(recipes=True), REGION, KEEP):
        with pytest.raises(ValueError, match=r"assign: paths must be .* got 'blocks.99' for Stack"):
            assign(model, Assignment({"blocks.0": choice, "blocks.99": choice}))
    assert looks(model) == before


def test_segments_keep_their_inputs_where_they_are() -> None:
    chain = tuple(f"blocks.{n}" for n in range(5))
    away = Choice(checkpoint=True, offload=1.0, segments="sqrt")
    with pytest.raises(ValueError, match=r"segments must be 1 where .* offloaded, got 'sqrt'"):
        assign(stack(), Assignment({chain: away}, "cpu"))


def test_what_a_module_was_comes_back() -> None:
    """A region that it was before; also if convert came between and is reverted at last."""
    model = stack()
    block = memopt.checkpoint_wrapper(model.blocks[0], early_stop=False)
    mine = settings_of(block)
    with assigned(model, Assignment({"blocks.0": REGION, "blocks.1": REGION})):
        assert settings_of(block) != mine
    assert settings_of(block) == mine
    assert settings_of(model.blocks[1]) is None

    put = assign(model, Assignment({"blocks.0": REGION}))
    memopt.convert(model, recipes=False, offload="cpu")
    put.undo()
    assert settings_of(block) != mine
    memopt.revert(model)
    assert settings_of(block) == mine
    assert settings_of(model.blocks[1]) is None


def by_convert(model: nn.Module) -> object:
    return memopt.convert(model, checkpoint=True)


def by_fates(model: nn.Module) -> object:
    return Fates(recipes=True, checkpoint="all", who="a test").put_on(model)


def by_plan(model: nn.Module) -> object:
    plan = memopt.plan(model, batch(), 1 << 40, loss=torch.sum, measure=False)
    choice = Choice(recipes=True, checkpoint=True)
    plan.assignment = Assignment(dict.fromkeys(plan.profile.blocks, choice))
    return plan.apply(watch=False)


def test_makers_of_one_assignment_agree() -> None:
    """Recipes everywhere, and each block a region: bytes, and gradients' bits."""
    makers: list[Callable[[nn.Module], object]] = [by_convert, by_fates, by_plan]
    models = [stack() for _ in makers]
    for make, model in zip(makers, models, strict=True):
        make(model)
    assert len({memopt.saved_bytes(model, batch()) for model in models}) == 1
    first, *others = [gradients(model) for model in models]
    assert all(same_bits(other, first) for other in others)


@pytest.mark.parametrize("segments", ["sqrt", "optimal"])
def test_segments_of_a_chain(segments: str) -> None:
    model = stack()
    plain, before = gradients(model), looks(model)
    assignment = Fates(checkpoint=segments, who="a test").assignment(model)  # type: ignore[arg-type]
    assert list(assignment.choices) == [tuple(f"blocks.{n}" for n in range(5))]
    whole = memopt.saved_bytes(model, batch())
    with assigned(model, assignment):
        assert same_bits(gradients(model), plain)
        assert memopt.saved_bytes(model, batch()) < whole
    assert looks(model) == before
