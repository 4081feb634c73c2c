"""Proves: with keep_decisions a recompute takes the experts, samples and sizes that forward chose,
though its scores have come out otherwise since. Gradients are then those of the first choice; what
is kept are the integers, to the byte. A probe turns it on where a module chooses by values, and the
error of a recompute that differs names it. Mixtures of transformers, with noise that flips routes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import checkpoint as torch_checkpoint

import memopt
from memopt._checkpoint import checkpoint, checkpoint_wrapper, is_recomputing
from memopt._checkpoint.wrapper import settings_of
from memopt.memory.allocator import LiveBytes
from tests.checkpoint.support import collector_disabled, live_tensors_and_regions
from tests.support.bits import assert_same_bits
from tests.support.tiny_transformers import loss_of, tiny

ROWS = 6


def noisy(scores: Tensor) -> Tensor:
    """The scores in forward; others in the recompute."""
    return scores * (-1.0 if is_recomputing() else 1.0)


def by_host(scores: Tensor, x: Tensor) -> Tensor:
    total = scores.sum()
    return x.exp() if total > 0 else x.sin() * total.item()


def by_threshold(scores: Tensor, x: Tensor) -> Tensor:
    mask = (scores > 0.1) & (scores < 3)
    return x[mask].exp()


def by_unique(scores: Tensor, x: Tensor) -> Tensor:
    values, inverse, counts = scores.round().unique(return_inverse=True, return_counts=True)
    return x.new_zeros(len(values)).index_add(0, inverse, x.exp()) * counts * values.detach()


def by_mask_of_rows(scores: Tensor, x: Tensor) -> Tensor:
    rows = x.unsqueeze(-1) * torch.ones(3)
    return rows.exp()[scores > 0.1].sin()


CHOICES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "topk": lambda s, x: x.exp()[s.topk(3)[1]].sin(),
    "sort": lambda s, x: x.exp()[s.sort(descending=True)[1][:3]].sin(),
    "argsort": lambda s, x: x.exp()[s.argsort()[:4]].sin(),
    "argmax": lambda s, x: x.exp()[s.argmax()].sin(),
    "argmin": lambda s, x: x.exp()[s.view(2, 3).argmin(-1)].sin(),
    "max": lambda s, x: x.exp()[s.max(0)[1]].sin(),
    "min": lambda s, x: x.exp()[s.view(2, 3).min(-1, keepdim=True)[1]].sin(),
    "kthvalue": lambda s, x: x.exp()[s.kthvalue(2)[1]].sin(),
    "median": lambda s, x: x.exp()[s.median(0)[1]].sin(),
    "cummax": lambda s, x: x.exp()[s.cummax(0)[1]].sin(),
    "multinomial": lambda s, x: x.exp()[s.exp().multinomial(3)].sin(),
    "nonzero": lambda s, x: x.exp()[(s > 0).nonzero().squeeze(-1)].sin(),
    "where": lambda s, x: x.exp()[torch.where(s > 0)].sin(),
    "bincount": lambda s, x: x.exp() * (s > 0).long().bincount(minlength=ROWS)[:ROWS],
    "sizes for the host": lambda s, x: torch.cat(
        [part.exp() for part in x.split((s > 0).long().bincount(minlength=2).tolist())]
    ),
    "bucketize": lambda s, x: x.exp()[torch.bucketize(s, torch.tensor([-0.5, 0.5]))].sin(),
    "unique": by_unique,
    "a branch of the host": by_host,
    "a mask": by_threshold,
    "a mask of rows": by_mask_of_rows,
    "masked_select": lambda s, x: x.exp().masked_select(s > 0.2).sin(),
    "index_put": lambda s, x: x.exp().index_put((s > 0.2,), torch.tensor(2.0)).sin(),
}


@pytest.fixture
def scores() -> Tensor:
    return torch.tensor([0.9, -1.2, 0.4, 2.1, -0.3, 0.7])


def gradients(way: Callable[..., Any], scores: Tensor, choice: Callable[..., Tensor]) -> Any:
    torch.manual_seed(0)
    x = torch.linspace(-1, 1, ROWS).requires_grad_()
    scores = scores.clone().requires_grad_()
    y = way(lambda s, x: choice(noisy(s * 1), x), scores, x)
    y.sum().backward()
    return [y.detach(), x.grad]


@pytest.mark.parametrize("name", CHOICES)
def test_the_recompute_chooses_as_forward_did(name: str, scores: Tensor) -> None:
    plain = gradients(lambda f, *args: f(*args), scores, CHOICES[name])
    keeping = functools.partial(checkpoint, keep_decisions=True)
    assert_same_bits(gradients(keeping, scores, CHOICES[name]), plain)
    mine = functools.partial(checkpoint, context_fn=memopt.checkpoint.decision_contexts)
    assert_same_bits(gradients(mine, scores, CHOICES[name]), plain)


@pytest.mark.parametrize("name", CHOICES)
def test_without_it_the_noise_shows(name: str, scores: Tensor) -> None:
    """So that the test above proves something."""
    plain = gradients(lambda f, *args: f(*args), scores, CHOICES[name])
    try:
        ours = gradients(checkpoint, scores, CHOICES[name])
    except (RuntimeError, IndexError):
        return
    assert not torch.equal(ours[1], plain[1])


def test_values_are_picked_by_the_kept_indices() -> None:
    """Their gradient goes to the elements that forward chose; values themselves are not kept."""
    scores = torch.tensor([[0.1, 0.9, 0.5], [2.0, -1.0, 0.3]], requires_grad=True)

    def function(scores: Tensor) -> Tensor:
        values, _ = noisy(scores).topk(2)
        best, _ = noisy(scores).max(-1)
        return values.sum() * 2 + best.exp().sum() * 0 + values.square().sum() * 0

    checkpoint(function, scores, keep_decisions=True).backward()
    # In the recompute scores are negated, and so is the way of the gradient.
    assert scores.grad is not None
    assert scores.grad.ne(0).tolist() == [[False, True, True], [True, False, True]]


def kept_bytes(function: Callable[..., Tensor], *args: Tensor, **options: Any) -> int:
    with LiveBytes() as live:
        y = checkpoint(function, *args, **options)
        live.mark()
    assert y.requires_grad
    return live.marks[0].nbytes


def test_kept_are_the_integers_to_the_byte() -> None:
    def function(scores: Tensor, x: Tensor) -> Tensor:
        values, indices = scores.topk(2)
        rows = (scores[:, 0] > 0).nonzero().squeeze(-1)
        return (x.gather(-1, indices) * values).sum() + x[rows].sum() + x[scores > 0].sum()

    scores, x = torch.randn(64, 8), torch.randn(64, 8, requires_grad=True)
    options = {"keep_decisions": True}
    kept_bytes(function, scores, x, **options)  # what the first call makes and stays
    more = kept_bytes(function, scores, x, **options) - kept_bytes(function, scores, x)
    positive = int((scores[:, 0] > 0).sum())
    assert more == 64 * 2 * 8 + positive * 8 + 64 * 8 * 1


def test_decisions_go_with_the_graph() -> None:
    x = torch.randn(64, 8, requires_grad=True)

    def step(retain: bool) -> None:
        y = checkpoint(lambda x: x.exp()[x.argmax(-1)].sum(), x, keep_decisions=True)
        y.backward(retain_graph=retain)
        if retain:
            y.backward()

    step(True)
    with collector_disabled():
        before = live_tensors_and_regions()
        for retain in (False, True, False):
            step(retain)
        assert live_tensors_and_regions() == before


def test_a_retained_graph_takes_them_again(scores: Tensor) -> None:
    x = torch.linspace(-1, 1, ROWS).requires_grad_()
    y = checkpoint(
        lambda s, x: x.exp()[noisy(s).topk(3)[1]].sin(), scores, x, keep_decisions=True
    ).sum()
    first = torch.autograd.grad(y, x, retain_graph=True)
    assert_same_bits(torch.autograd.grad(y, x), first)


def test_pytorchs_own_checkpoint_takes_the_contexts(scores: Tensor) -> None:
    calls: list[None] = []

    def function(x: Tensor) -> Tensor:
        calls.append(None)
        chosen = scores if len(calls) == 1 else -scores
        return x.exp()[chosen.topk(3)[1]].sin()

    x = torch.linspace(-1, 1, ROWS).requires_grad_()
    torch_checkpoint.checkpoint(
        function, x, use_reentrant=False, context_fn=memopt.checkpoint.decision_contexts
    ).sum().backward()
    assert len(calls) == 2
    expected = torch.autograd.grad(x.exp()[scores.topk(3)[1]].sin().sum(), x)
    assert_same_bits([x.grad], expected)


def test_a_recompute_that_asks_otherwise_raises() -> None:
    x = torch.randn(4, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        index = x.argmin() if is_recomputing() else x.argmax()
        return x.exp()[index].sin()

    y = checkpoint(function, x, keep_decisions=True)
    with pytest.raises(RuntimeError, match=r"must decide as forward did, aten.argmax.default here"):
        y.backward()


def test_what_is_kept_must_not_be_written() -> None:
    x = torch.randn(4, requires_grad=True)
    y = checkpoint(lambda x: x.exp()[x.topk(2)[1].sub_(0)].sin().sum(), x, keep_decisions=True)
    with pytest.raises(RuntimeError, match="must not be written in place in a region that keeps"):
        y.backward()


def test_the_error_of_a_recompute_that_differs_names_it(scores: Tensor) -> None:
    x = torch.linspace(-1, 1, ROWS).requires_grad_()
    y = checkpoint(lambda s, x: x[noisy(s) > 0.5].exp().sin(), scores, x)
    with pytest.raises(RuntimeError, match="keep_decisions=True keeps what it chose"):
        y.sum().backward()


def test_with_a_selective_checkpoint_and_chunks(scores: Tensor) -> None:
    contexts = functools.partial(
        torch_checkpoint.create_selective_checkpoint_contexts, [torch.ops.aten.exp.default]
    )
    weight = torch.randn(3, 4, requires_grad=True)
    rows = torch.stack([scores, scores.roll(1)]).repeat(4, 1)

    def function(rows: Tensor) -> Tensor:
        return F.embedding(noisy(rows).topk(2)[1] % 3, weight).exp().sin().flatten(1)

    plain = torch.autograd.grad(function(rows).sum(), weight)
    for options in ({"context_fn": contexts}, {"chunks": 3}):
        y = checkpoint(function, rows, keep_decisions=True, **options)
        torch.testing.assert_close(torch.autograd.grad(y.sum(), weight), plain)


class FlipsRoutes:
    """Other scores in the recompute: the router's weights are so small that the scores barely
    differ, but choose other experts.
    """

    def __init__(self, model: nn.Module) -> None:
        self.on = True
        self.routers = {
            path: module
            for path, module in model.named_modules()
            if path.endswith(("gate", "router")) and list(module.parameters())
        }
        assert self.routers
        for module in self.routers.values():
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.mul_(1e-4)
            module.register_forward_pre_hook(self._flip)

    def _flip(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        return (-args[0], *args[1:]) if is_recomputing() and self.on else None

    def others(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """Parameters whose gradients do not see the router's other input."""
        mine = {p for module in self.routers.values() for p in module.parameters()}
        return {name: p for name, p in model.named_parameters() if p not in mine}


def step(model: nn.Module, batch: dict[str, Any], names: Any) -> dict[str, Tensor | None]:
    torch.manual_seed(0)
    model.zero_grad()
    loss_of(model(**batch)).backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    return {name: grads[name] for name in names}


FAMILIES = ["mixtral", "qwen3_moe", "deepseek_v3", "switch_transformers"]


@pytest.mark.parametrize("family", FAMILIES)
def test_mixtures_of_transformers_keep_their_routes(family: str) -> None:
    model, batch = tiny(family).make(), tiny(family).inputs()
    flips = FlipsRoutes(model)
    names = flips.others(model)
    plain = step(model, batch, names)
    flips.on = False
    regions = memopt.apply_activation_checkpointing(model, batch=batch)
    flips.on = True
    keeping = [
        path
        for path in regions
        if settings_of(model.get_submodule(path)).keep_decisions  # type: ignore[union-attr]
    ]
    assert keeping
    assert all(any(router.startswith(path) for router in flips.routers) for path in keeping)
    ours = step(model, batch, names)
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, plain[name], rtol=1e-3, atol=1e-5)
    for path in keeping:
        checkpoint_wrapper(model.get_submodule(path))
    try:
        without = step(model, batch, names)
    except RuntimeError as error:
        assert "keep_decisions=True" in str(error)  # noqa: PT017
    else:
        assert any(
            not torch.allclose(g, plain[name], rtol=1e-2, atol=1e-4)
            for name, g in without.items()
            if g is not None and plain[name] is not None
        )


def test_convert_says_which_keep_what_they_choose() -> None:
    model, batch = tiny("mixtral").make(), tiny("mixtral").inputs()
    report = memopt.convert(model, batch, checkpoint=True)
    assert any("what these choose by values is kept" in note for note in report.notes)
    memopt.revert(model)
    model, batch = tiny("llama").make(), tiny("llama").inputs()
    report = memopt.convert(model, batch, checkpoint=True)
    assert not any("choose by values" in note for note in report.notes)
