"""Proves: chunks are refused by name for calls that do not work on each row alone, be it by batch
statistics, attention, convolution, routing, positions, capacities, state or a gradient that crosses
rows; calls that do are found on any class, and everything is as it was after the probe. convert and
apply_activation_checkpointing find the MLPs of blocks, and only these.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memopt
from memopt._checkpoint import checkpoint, checkpoint_wrapper, is_checkpointing
from memopt._checkpoint.rows import why_not_rows
from memopt._checkpoint.wrapper import settings_of
from tests.checkpoint.support import CountCalls
from tests.support.bits import assert_same_bits
from tests.support.tiny_transformers import loss_of, tiny

H = 8


class Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


class Causal(nn.Module):
    """Attention whose last rows alone depend on others much."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(H, H)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).unsqueeze(-3)
        return x + F.scaled_dot_product_attention(y, y, y, is_causal=True).squeeze(-3)


class CrossGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.mean(0, keepdim=True).expand_as(grad)


class Counts(nn.Module):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x.exp()


class KeepsFeatures(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        self.features = x.exp()
        return self.features * 2


class Capacity(nn.Module):
    """A switch whose experts take the first ten rows: no small sample reaches that."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(H, 2)

    def forward(self, x: Tensor) -> Tensor:
        chosen = F.one_hot(self.router(x).argmax(-1), 2)
        taken = chosen.cumsum(0) <= 10
        return x * (chosen * taken).sum(-1, keepdim=True)


def routed(x: Tensor) -> Tensor:
    result = torch.zeros_like(x)
    rows = (x.sum(-1) > 0).nonzero().squeeze(-1)
    return result.index_add(0, rows, x[rows].exp())


REFUSED: dict[str, tuple[nn.Module, str]] = {
    "batch norm": (nn.BatchNorm1d(H), "what it returns of one row depends on other rows"),
    "attention": (nn.TransformerEncoderLayer(H, 2, 16), "of one row depends on other rows"),
    "causal attention": (Causal(), "of one row depends on other rows"),
    "convolution": (
        nn.Sequential(nn.Unflatten(0, (1, -1)), nn.Conv2d(1, 1, 3, padding=1), nn.Flatten(0, 1)),
        "what it returns of one row depends on other rows",
    ),
    "the row before": (Function(lambda x: x + x.roll(1, 0)), "of one row depends on other rows"),
    "two rows on": (
        Function(lambda x: x + F.pad(x, (0, 0, 0, 2))[2:]),
        "what it returns of one row depends on other rows",
    ),
    "softmax over rows": (nn.Softmax(0), "what it returns of one row depends on other rows"),
    "positions": (
        Function(lambda x: x + torch.arange(len(x)).unsqueeze(-1)),
        "what it returns of a row depends on its place, or on how many rows there are",
    ),
    "mean": (Function(lambda x: x / len(x)), "depends on its place, or on how many rows"),
    "gradients": (Function(CrossGradient.apply), "the gradient of one row depends on other rows"),
    "routing": (Function(routed), r"it sorts, counts or sums rows \(aten.nonzero\)"),
    "capacity": (Capacity(), r"it sorts, counts or sums rows \(aten.cumsum\)"),
    "sorted": (Function(lambda x: x.sort(0)[0]), r"sorts, counts or sums rows \(aten.sort\)"),
    "a counter": (Counts(), "it changes calls, which the next chunk would find"),
    "features": (KeepsFeatures(), "it changes features, which the next chunk would find"),
    "a scalar": (Function(lambda x: x.sum()), "it returns a tensor of"),
    "an object": (Function(lambda x: (x, object())), "it returns an object of object"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("way", ["checkpoint", "checkpoint_wrapper"])
def test_refused_by_name(name: str, way: str) -> None:
    module, reason = REFUSED[name]
    module = copy.deepcopy(module)
    x = torch.randn(40, H)
    state = copy.deepcopy(module.state_dict())
    call = lambda: checkpoint(module, x, chunks=4)  # noqa: E731
    if way == "checkpoint_wrapper":
        call = lambda: checkpoint_wrapper(module, chunks=4)(x)  # noqa: E731
    rule = f"^{way}: chunks needs a call that works on each row alone, got .*: .*{reason}"
    for _ in range(2):
        with pytest.raises(ValueError, match=rule):
            call()
    for key, value in module.state_dict().items():
        assert_same_bits([value], [state[key]])
    assert module.training


class ToOthers(nn.Module):
    """Attention of a part's rows to what is beside them: of which part is told by the place."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(H, H)
        self.dropout = dropout

    def forward(self, x: Tensor, others: Tensor) -> Tensor:
        y = self.linear(x)
        # As where heads and parts of a batch become one dim.
        parts = y.reshape(-1, 1, *y.shape[-2:]) + others[:, None, :1] * 0
        keys = others.unsqueeze(1)
        return F.scaled_dot_product_attention(parts, keys, keys, dropout_p=self.dropout).squeeze(1)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_attention_to_what_is_beside_the_rows(dropout: float) -> None:
    """It draws nothing without dropout; with dropout the shapes of chunks tell."""
    module, x, others = ToOthers(dropout), torch.randn(2, 8, H), torch.randn(2, 5, H)
    assert module(x, others).shape == x.shape
    with pytest.raises(ValueError, match=r"got .*ToOthers.*: for rows of \[1, 3\] it returns a t"):
        checkpoint(module, x, others, chunks=4)


ACCEPTED: dict[str, Callable[[], nn.Module]] = {
    "a norm and its MLP": lambda: nn.Sequential(
        nn.LayerNorm(H), nn.Linear(H, 16), nn.GELU(), nn.Dropout(0.5), nn.Linear(16, H)
    ),
    "batch norm in eval": lambda: nn.BatchNorm1d(H).eval(),
    "sorting in a row": lambda: Function(lambda x: x.sort(-1)[0].cumsum(-1)),
    "functional dropout": lambda: Function(lambda x: F.dropout(F.linear(x, x.new_ones(3, H)), 0.4)),
    "noise": lambda: Function(lambda x: x + torch.randn_like(x)),
    "a choice per row": lambda: Function(lambda x: x.gather(-1, x.topk(2, -1)[1])),
    "an embedding": lambda: Function(lambda x: F.embedding(x.argmax(-1), x.new_ones(H, 3))),
    "no gradient": lambda: Function(lambda x: x.detach() + 1),
    "attention in a row": lambda: Function(
        lambda x: F.scaled_dot_product_attention(*[x.unflatten(-1, (2, -1))] * 3).flatten(-2)
    ),
}


@pytest.mark.parametrize("name", ACCEPTED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_accepted(name: str, dtype: torch.dtype) -> None:
    module = ACCEPTED[name]().to(dtype)
    x = torch.randn(40, H, dtype=dtype, requires_grad=True)
    torch.manual_seed(1)
    y = checkpoint(module, x, chunks=4)
    assert len(y) == 40
    if y.requires_grad:
        y.sum().backward()


def test_a_probe_changes_nothing_and_runs_once() -> None:
    count = CountCalls()
    module = nn.Sequential(nn.Linear(H, 16), count, nn.Dropout(0.5), nn.Linear(16, H))
    fresh: list[bool] = []
    module[1].register_forward_hook(lambda m, args, out: fresh.append(is_checkpointing()))
    x = torch.randn(40, H)
    random = torch.get_rng_state()
    gradients = [p.grad for p in module.parameters()]
    with pytest.raises(ValueError, match=r"it changes 1\.calls"):
        checkpoint(module, x, chunks=4)
    assert count.calls == 0
    assert torch.equal(torch.get_rng_state(), random)
    assert gradients == [p.grad for p in module.parameters()]
    assert module[2].training


def test_a_probe_puts_back_what_the_step_holds() -> None:
    """It runs the step's function, and that may write down each of its calls."""
    calls: list[Tensor] = []

    def step(model: nn.Module, x: Tensor) -> None:
        calls.append(x)
        model(x).square().mean().backward()

    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 8)))
    chosen = memopt.apply_activation_checkpointing(
        model, check_fn=nn.Sequential, batch=torch.randn(6, 8), chunks=2, step=step
    )
    assert list(chosen) == ["1"]
    assert calls == []


def test_a_module_is_probed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    probed: list[list[nn.Module]] = []

    def counted(fn: Any, rows: Any, modules: list[nn.Module], sizes: Any) -> str:
        probed.append(modules)
        return why_not_rows(fn, rows, modules, sizes)

    monkeypatch.setattr("memopt._checkpoint.rows.why_not_rows", counted)
    module = nn.Sequential(nn.Linear(H, 16), nn.Tanh())
    rows: list[int] = []
    module[1].register_forward_hook(lambda m, args, out: rows.append(len(out)))
    for _ in range(2):
        checkpoint(module, torch.randn(40, H), chunks=4)
    assert [modules[0] for modules in probed] == [module]
    assert rows == [10] * 8  # the probe's own calls left nothing


def test_another_mode_of_a_module_is_probed_again() -> None:
    module = checkpoint_wrapper(nn.BatchNorm1d(H).eval(), chunks=4)
    x = torch.randn(40, H)
    assert len(module(x)) == 40
    module.train()
    with pytest.raises(ValueError, match="depends on other rows"):
        module(x)


def test_one_function_around_two_modules_is_probed_for_each() -> None:
    x = torch.randn(40, H)
    for module, good in ((nn.Linear(H, H), True), (nn.BatchNorm1d(H), False)):

        def function(x: Tensor, module: nn.Module = module) -> Tensor:
            return module(x).exp()

        if good:
            checkpoint(function, x, chunks=4)
        else:
            with pytest.raises(ValueError, match="depends on other rows"):
                checkpoint(function, x, chunks=4)


def test_other_tensors_that_are_no_rows_must_fit_every_chunk() -> None:
    """A table of positions has the rows of no chunk."""
    x, table = torch.randn(2, 6, H), torch.randn(6, H)
    with pytest.raises(ValueError, match="with other rows it raises RuntimeError"):
        checkpoint(lambda x, table: x + table, x, table, chunks=3)


def made(family: str) -> tuple[nn.Module, dict[str, Any]]:
    return tiny(family).make().double(), tiny(family).inputs()


def step(model: nn.Module, batch: dict[str, Any]) -> list[Tensor | None]:
    torch.manual_seed(0)
    loss = loss_of(model(**batch))
    loss.backward()
    results = [loss.detach(), *(p.grad for p in model.parameters())]
    model.zero_grad()
    return results


FAMILIES = {
    "llama": ["layers.0.mlp", "layers.1.mlp"],
    "gpt2": ["h.0.mlp", "h.1.mlp"],
    "gpt_neox": ["layers.0.mlp", "layers.1.mlp"],
}


@pytest.mark.parametrize("family", FAMILIES)
def test_convert_finds_the_mlps_of_blocks(family: str) -> None:
    model, batch = made(family)
    plain = step(model.eval(), batch)
    memopt.convert(model, recipes=False)
    whole = step(model, batch)
    report = memopt.convert(model, batch, recipes=False, chunks=3)
    assert list(report.in_chunks) == FAMILIES[family]
    assert "in chunks of rows: " in str(report)
    assert report.to_dict()["in_chunks"] == FAMILIES[family]
    for path in report.in_chunks:
        settings = settings_of(model.get_submodule(path))
        assert settings is not None
        assert settings.chunks == 3
    for ours, theirs in zip(step(model, batch), whole, strict=True):
        torch.testing.assert_close(ours, theirs)
    memopt.revert(model)
    assert_same_bits(step(model, batch), plain)


def test_convert_puts_chunks_inside_the_regions_of_blocks() -> None:
    model, batch = made("llama")
    model.eval()
    regions = memopt.convert(model, batch, recipes=False, checkpoint=True)
    whole = step(model, batch)
    memopt.revert(model)
    both = memopt.convert(model, batch, recipes=False, checkpoint=True, chunks=3)
    assert {*both.checkpointed, *both.in_chunks} == set(regions.checkpointed)
    assert list(both.in_chunks) == FAMILIES["llama"]
    assert both.bytes_after == regions.bytes_after
    for ours, theirs in zip(step(model, batch), whole, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert "region in 3 chunks" in str(memopt.check(model, batch))


def test_the_modules_may_be_chosen() -> None:
    model, batch = made("llama")
    mlp = type(model.get_submodule("layers.0.mlp"))
    report = memopt.convert(model, batch, recipes=False, checkpoint=mlp, chunks=2)
    assert list(report.in_chunks) == FAMILIES["llama"]
    assert report.checkpointed == ()
    memopt.revert(model)
    attention = type(model.get_submodule("layers.0.self_attn"))
    with pytest.warns(UserWarning, match="not in chunks, since these do not work on each row alo"):
        names = memopt.apply_activation_checkpointing(
            model, check_fn=[mlp, attention], chunks=2, batch=batch
        )
    assert names == FAMILIES["llama"]
    memopt.unwrap(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        names = memopt.apply_activation_checkpointing(model, check_fn=mlp, chunks=2)
    assert names == FAMILIES["llama"]
    step(model, batch)


def test_a_batch_is_needed_to_find_them() -> None:
    model, _ = made("llama")
    for name, call in (
        ("convert", lambda: memopt.convert(model, chunks=2)),
        (
            "apply_activation_checkpointing",
            lambda: memopt.apply_activation_checkpointing(model, chunks=2),
        ),
    ):
        with pytest.raises(ValueError, match=f"{name}: chunks needs"):
            call()
    assert memopt.convert(model, recipes=False).in_chunks == ()


def test_experts_are_found_and_mixtures_are_not() -> None:
    """Those of a list, each with the rows that it is given."""

    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(H, 2)
            self.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(H, 32), nn.Tanh(), nn.Linear(32, H)) for _ in range(2)
            )

        def forward(self, x: Tensor) -> Tensor:
            flat, result = x.flatten(0, -2), torch.zeros_like(x).flatten(0, -2)
            chosen = self.router(flat).argmax(-1)
            for number, expert in enumerate(self.experts):
                rows = (chosen == number).nonzero().squeeze(-1)
                result = result.index_add(0, rows, expert(flat[rows]))
            return result.view_as(x)

    model = nn.Sequential(nn.Linear(H, H), Mixture())
    x = torch.randn(2, 20, H)
    report = memopt.convert(model, x, recipes=False, chunks=2)
    assert report.in_chunks == ("1.experts.0", "1.experts.1")
