"""Proves: an error names the function that the user called, and none that this one calls; a warning
is of the line that called it.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt

BUDGET = 1 << 30
Call = Callable[..., Any]


class Rows(nn.Module):
    """A loss of rows of any length, by two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x[..., None].expand(*x.shape, 4)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


X = torch.ones(4, 4)

# What each is called with, and the name that its errors begin with.
CALLS: dict[str, Call] = {
    "plan": lambda model, batch=X, **options: memopt.plan(
        model, batch, **{"budget": BUDGET, "measure": False, **options}
    ),
    "plan, compiled": lambda model, batch=X, **options: memopt.plan(
        model, batch, **{"budget": BUDGET, "compiled": True, **options}
    ),
    "anatomy": lambda model, batch=X, **options: memopt.anatomy(model, batch, **options),
    "accumulate": lambda model, batch=X, **options: memopt.accumulate(
        model, batch, **{"budget": BUDGET, **options}
    ),
    "fit": lambda model, batch=X, **options: memopt.fit(
        model, batch, **{"budget": BUDGET, "optimizer": None, **options}
    ),
    "largest_batch": lambda model, batch=X, **options: memopt.largest_batch(
        model, batch, **{"budget": BUDGET, "limit": 2, **options}
    ),
    "longest_sequence": lambda model, batch=X, **options: memopt.longest_sequence(
        model, batch, **{"budget": BUDGET, "limit": 2, **options}
    ),
}
STEPS = pytest.mark.parametrize("who", CALLS)


def refused(who: str, call: Callable[[], Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError, RuntimeError)) as info:
        call()
    text, who = str(info.value), who.partition(",")[0]
    assert text.startswith(f"{who}: "), text
    assert words in text
    others = [name for name in CALLS if name != who and re.search(rf"(?<![\w.]){name}: ", text)]
    assert not others, text


@STEPS
def test_of_an_optimizer_that_is_none(who: str) -> None:
    refused(who, lambda: CALLS[who](Rows(), optimizer=3), "optimizer must be")


@STEPS
def test_of_an_optimizer_whose_step_runs_the_model(who: str) -> None:
    model = Rows()
    lbfgs = torch.optim.LBFGS(model.parameters())
    refused(who, lambda: CALLS[who](model, optimizer=lbfgs), "must step without a closure")


@STEPS
def test_of_what_is_no_model(who: str) -> None:
    refused(who, lambda: CALLS[who](3), "model must be an nn.Module")


@STEPS
def test_of_a_model_without_a_loss(who: str) -> None:
    class Words(Rows):
        def forward(self, x: Tensor) -> Any:
            super().forward(x)
            return "no loss"

    refused(who, lambda: CALLS[who](Words()), "the model must return a loss")


@STEPS
def test_of_a_loss_that_is_no_number(who: str) -> None:
    refused(who, lambda: CALLS[who](Rows(), loss=lambda loss: loss.detach()), "must be one number")


@STEPS
def test_of_a_batch_without_rows(who: str) -> None:
    refused(who, lambda: CALLS[who](Rows(), {"x": 3}), "batch must hold a tensor")


@pytest.mark.parametrize("who", ["anatomy", "largest_batch", "longest_sequence"])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"checkpoint": "most"}, "checkpoint must be"),
        ({"checkpoint": 0}, "checkpoint must be"),
        ({"checkpoint": True}, "checkpoint must be"),
        ({"checkpoint": "sqrt"}, "must have a model whose blocks are in an nn.Sequential"),
    ],
)
def test_of_a_what_if(who: str, options: dict[str, Any], words: str) -> None:
    refused(who, lambda: CALLS[who](Rows(), **options), words)


@pytest.mark.parametrize("who", ["anatomy", "largest_batch", "longest_sequence"])
@pytest.mark.parametrize("checkpoint", ["all", 2])
def test_of_a_model_without_blocks(who: str, checkpoint: Any) -> None:
    class Lone(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x[..., None]).square().mean()

    refused(who, lambda: CALLS[who](Lone(1, 4), checkpoint=checkpoint), "a model with blocks")


@pytest.mark.parametrize("who", ["anatomy", "largest_batch"])
def test_of_a_model_that_convert_does_not_take(who: str) -> None:
    class Quantised(nn.Identity):
        __module__ = "torch.ao.nn.quantized"

    model = Rows()
    model.append = Quantised()  # type: ignore[assignment]
    refused(who, lambda: CALLS[who](model, recipes=True), "model must not be quantised")


class Lazy(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = super().forward(x)
        return output.square().mean()


LAZY: dict[str, Call] = {
    **{who: CALLS[who] for who in ("plan", "anatomy", "largest_batch")},
    "apply_activation_checkpointing": lambda model: memopt.apply_activation_checkpointing(
        model, batch=X
    ),
    "convert": lambda model: memopt.convert(model, X, checkpoint=True),
}


@pytest.mark.parametrize("who", LAZY)
def test_of_parameters_that_have_no_shape_yet(who: str) -> None:
    model = Lazy(*(nn.Sequential(nn.LazyLinear(8), nn.LazyLinear(4)) for _ in range(2)))
    refused(who, lambda: LAZY[who](model), "got '0.0.weight', which takes it from the model's")
    model(X)
    LAZY[who](model)


@pytest.mark.parametrize("who", ["plan", "fit"])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"blocks": ["nowhere"]}, "blocks must be paths"),
        ({"blocks": 3}, "blocks must be a function"),
        ({"budget": "much"}, "budget must be bytes"),
        ({"budget": 1}, "budget must"),
    ],
)
def test_of_a_plan(who: str, options: dict[str, Any], words: str) -> None:
    model = Rows()
    refused(who, lambda: CALLS[who](model, optimizer=sgd(model), **options), words)


@pytest.mark.parametrize("who", ["plan", "plan, compiled", "fit"])
def test_of_a_model_that_is_converted_already(who: str) -> None:
    model = Rows()
    memopt.convert(model)
    refused(who, lambda: CALLS[who](model, optimizer=sgd(model)), "model must be without regions")


def test_of_a_plan_that_is_there() -> None:
    model = Rows()
    plan = CALLS["plan"](model, optimizer=None)
    refused("Plan.within", lambda: plan.within(1), "budget must be at least")
    refused("Plan.largest_batch", lambda: plan.largest_batch("much"), "budget must be bytes")
    refused("Plan.apply", lambda: plan.apply(3), "model must be an nn.Module")


def test_of_a_batch_that_a_fitted_model_gets() -> None:
    fitted = CALLS["fit"](model := Rows(), optimizer=sgd(model), steps=1)
    refused("Fitted", lambda: fitted({"x": 3}), "batch must hold a tensor")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: memopt.saved_bytes(3), "fn must be"),  # type: ignore[arg-type]
        (lambda: torch.inference_mode()(memopt.saved_bytes)(Rows(), X), "got inference mode on"),
    ],
)
def test_of_saved_bytes(call: Callable[[], Any], words: str) -> None:
    refused("saved_bytes", call, words)


def test_what_the_model_raises_is_its_own() -> None:
    class Broken(Rows):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("rows: convert must be something else")

    for who in set(CALLS) - {"fit"}:  # it says that the model takes no fewer rows
        with pytest.raises(ValueError, match=r"^rows: convert must be"):
            CALLS[who](Broken(), optimizer=None)


class Words(Rows):
    """Rows of an embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.embedding(x)[..., 0])


def test_of_a_step_whose_default_optimizer_does_not_take_its_gradients() -> None:
    with pytest.raises(RuntimeError, match="does not support sparse gradients") as info:
        memopt.anatomy(Words(), torch.tensor([[0, 1]]))
    notes = info.value.__notes__  # type: ignore[attr-defined]
    assert "anatomy: the step of AdamW raised this; optimizer= takes others" in notes
    memopt.anatomy(Words(), torch.tensor([[0, 1]]), optimizer=torch.optim.SGD)


@pytest.mark.parametrize("who", ["largest_batch", "longest_sequence"])
def test_of_a_step_that_cannot_be_predicted(who: str) -> None:
    refused(who, lambda: CALLS[who](Words(), torch.tensor([[0, 1]])), "is torch.sparse_coo")


class Mixing(nn.Module):
    """No module of it works on each row alone, and a warning says so where chunks are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(MixedRows(), MixedRows())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x).square().mean()
        return out


class MixedRows(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x - x.mean(0))
        return out


@pytest.mark.parametrize(
    "call",
    [
        lambda model, x: memopt.apply_activation_checkpointing(model, batch=x, chunks=2),
        lambda model, x: memopt.accumulate(model, x, micro_batch=1, weight=lambda batch: 1.0),
    ],
    ids=["apply_activation_checkpointing", "accumulate"],
)
def test_a_warning_is_of_the_line_that_called_and_comes_once(call: Any) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        call(Mixing(), torch.randn(2, 4))
    assert [(one.filename, one.lineno) for one in seen] == [
        (__file__, call.__code__.co_firstlineno)
    ]


def test_a_plan_says_nothing_of_regions_that_are_not_its_own() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(memopt.BudgetTooSmall):
            memopt.plan(Mixing(), torch.randn(2, 4), 500, measure=False)


def test_messages_name_a_function_without_memopt() -> None:
    """As PyTorch's ops do, and memopt's: "layer_norm: weight must have ...", "plan: budget ..."."""
    calls = [
        (path, call)
        for path in Path(memopt.__file__).parent.rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call)
    ]
    texts = [
        (path, text.value)
        for path, call in calls
        for argument in (*call.args, *(keyword.value for keyword in call.keywords))
        for text in ast.walk(argument)
        if isinstance(text, ast.Constant) and isinstance(text.value, str)
    ]
    assert sum(text.startswith("plan: ") for _, text in texts) > 10
    assert not [one for one in texts if re.match(r"memopt\.[\w.]+: ", one[1])]
