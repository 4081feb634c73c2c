"""Proves: a step that is compiled as a whole makes no logits where nothing but losses reads them.
Its head is memopt's op in chunks of rows, with gradients that are as right as PyTorch's, in fewer
bytes by the allocator; graphs that need the logits, and options of others, stay as they were.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor import config as inductor_config

import memopt
from memopt._compile import _inductor_head
from tests.compile.support import gradients, op_by_op, step_bytes
from tests.support.losses import assert_as_right_as_pytorch

WIDTH, ROWS, LENGTH = 16, 4, 64
SMALL, LARGE = 512, 24_576
"""Numbers of words: with the second the logits of these rows are two chunks."""

LOGITS = ROWS * LENGTH * LARGE * 4

Loss = Callable[[Tensor, Tensor], Tensor]


class Model(nn.Module):
    def __init__(self, bias: bool = False, tied: bool = False, size: int = SMALL) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(size, WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, size, bias=bias)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        logits: Tensor = self.head(self.inner(self.embed(words)).tanh())
        return logits


def words(rows: int = ROWS, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(SMALL, (rows, LENGTH), generator=generator)


def flat(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), target.view(-1))


def shifted(logits: Tensor, target: Tensor) -> Tensor:
    """Of transformers and nanoGPT."""
    rows = logits[..., :-1, :].contiguous().float()
    return F.cross_entropy(
        rows.view(-1, rows.shape[-1]), target[..., 1:].reshape(-1), ignore_index=3
    )


def smoothed(logits: Tensor, target: Tensor) -> Tensor:
    rows = (logits / 2).transpose(1, 2)
    return F.cross_entropy(rows, target, reduction="sum", label_smoothing=0.1)


def of_logs(logits: Tensor, target: Tensor) -> Tensor:
    logs = logits.log_softmax(-1)
    return F.nll_loss(logs.flatten(0, 1), target.flatten())


def policy(logits: Tensor, target: Tensor) -> Tensor:
    """The log-probabilities of the words, as DPO and GRPO want them."""
    logs = torch.log_softmax(logits, -1).gather(-1, target[..., None]).squeeze(-1)
    return -(logs * 2).exp().mean()


def two(logits: Tensor, target: Tensor) -> Tensor:
    """With the z-loss."""
    return flat(logits, target) + 1e-3 * logits.logsumexp(-1).square().mean()


LOSSES = [flat, shifted, smoothed, of_logs, policy, two]


def traced(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Compiled in all but kernels."""
    settings = memopt.compile.options(**options)
    return torch.compile(function, backend=op_by_op(settings), fullgraph=True)


@pytest.fixture
def chunks_of_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that heads of small models are worth it."""
    monkeypatch.setattr(_inductor_head, "rows_of_a_chunk", lambda *sizes: 1)


@pytest.fixture
def heads(caplog: pytest.LogCaptureFixture) -> Callable[[], int]:
    """How many were found."""
    caplog.set_level(logging.INFO, "memopt.compile")
    return lambda: sum("head in chunks" in message for message in caplog.messages)


@pytest.mark.usefixtures("minimum_cut", "chunks_of_a_row")
@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_are_as_right_as_those_of_logits(loss: Loss, heads: Callable[[], int]) -> None:
    assert_as_right(Model(), loss)
    assert heads() == 1


@pytest.mark.usefixtures("minimum_cut", "chunks_of_a_row")
@pytest.mark.parametrize("option", ["bias", "tied"])
def test_heads_with_a_bias_or_an_embedding_s_weight(option: str, heads: Callable[[], int]) -> None:
    assert_as_right(Model(**{option: True}), flat)
    assert heads() == 1


def assert_as_right(model: nn.Module, loss: Loss) -> None:
    x, target = words(), words(seed=2)
    wide = copy.deepcopy(model).double()
    found = gradients(lambda: traced(lambda: loss(model(x), target))(), model)
    plain = gradients(lambda: loss(model(x), target), model)
    oracle = gradients(lambda: loss(wide(x), target), wide)
    assert_as_right_as_pytorch(*([of[name] for name in found] for of in (found, plain, oracle)))


@pytest.mark.usefixtures("minimum_cut")
@pytest.mark.parametrize("loss", LOSSES)
def test_logits_are_never_made(loss: Loss) -> None:
    """Else they are the most that a step of this model takes."""
    model, x, target = Model(size=LARGE), words(), words(seed=2)
    most = {}
    for head in (False, True):
        step = traced(lambda: loss(model(x), target), head=head)
        most[head] = step_bytes(step, model).most
    assert most[False] >= LOGITS
    assert most[True] < 0.8 * LOGITS


@pytest.mark.slow
def test_a_compiled_step_takes_less_than_torch_s() -> None:
    model, x, target = Model(size=LARGE), words(), words(seed=2)
    step = torch.compile(lambda: shifted(model(x), target))
    ours = memopt.compile(lambda: shifted(model(x), target))
    theirs, most = step_bytes(step, model).most, step_bytes(ours, model).most
    assert theirs >= LOGITS
    assert most < 0.8 * LOGITS


@pytest.mark.usefixtures("minimum_cut", "chunks_of_a_row")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast(dtype: torch.dtype, heads: Callable[[], int]) -> None:
    model, x, target = Model(), words(), words(seed=2)
    wide = copy.deepcopy(model).double()

    def step() -> Tensor:
        with torch.autocast("cpu", dtype):
            return shifted(model(x), target)

    found = gradients(traced(step), model)
    assert heads() == 1
    plain = gradients(step, model)
    oracle = gradients(lambda: shifted(wide(x), target), wide)
    assert_as_right_as_pytorch(
        *([of[name] for name in found] for of in (found, plain, oracle)), products=dtype
    )


@pytest.mark.usefixtures("minimum_cut", "chunks_of_a_row")
def test_any_number_of_rows_with_dynamic_shapes(heads: Callable[[], int]) -> None:
    model = Model(bias=True)
    settings = memopt.compile.options()
    step = torch.compile(
        lambda x, y: flat(model(x), y), backend=op_by_op(settings), fullgraph=True, dynamic=True
    )
    for rows in (7, ROWS, 5):  # a larger batch would be compiled anew
        x, target = words(rows), words(rows, seed=2)
        found = gradients(lambda x=x, y=target: step(x, y), model)
        plain = gradients(lambda x=x, y=target: flat(model(x), y), model)
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, plain[name])
    assert heads()


def _returned(model: nn.Module, x: Tensor, target: Tensor) -> Any:
    logits = model(x)
    return flat(logits, target), logits


def _looked_at(model: nn.Module, x: Tensor, target: Tensor) -> Any:
    logits = model(x)
    return flat(logits, target), logits.argmax(-1)


def _writing(write: Callable[[Tensor], object]) -> Callable[..., Any]:
    """A step that writes the head's input after the product. PyTorch allows it where the weight is
    frozen.
    """

    def step(model: Any, x: Tensor, target: Tensor) -> Any:
        inner = model.inner(model.embed(x))
        logits = F.linear(inner, model.head.weight.detach())
        write(inner)
        return (flat(logits, target),)

    return step


def _set_row(inner: Tensor) -> None:
    inner[0] = 1.0


WRITES: dict[str, Callable[[Tensor], object]] = {
    "method": lambda inner: inner.detach().mul_(2),
    "slice": _set_row,
    "function": lambda inner: F.silu(inner, inplace=True),
    "list": lambda inner: torch._foreach_mul_([inner], 2.0),
}


def _few_rows(model: nn.Module, x: Tensor, target: Tensor) -> Any:
    """Their gradient takes less than the weight's."""
    return (flat(model(x[:, :1]), target[:, :1]),)


def test_logits_of_less_than_two_chunks_are_made(heads: Callable[[], int]) -> None:
    model, x, target = Model(), words(), words(seed=2)
    traced(lambda: flat(model(x), target))()
    assert heads() == 0


@pytest.mark.usefixtures("minimum_cut", "chunks_of_a_row")
@pytest.mark.parametrize("step", [_returned, _looked_at, _few_rows])
def test_logits_that_are_wanted_or_small_are_made(
    step: Callable[..., Any], heads: Callable[[], int]
) -> None:
    assert_logits_are_made(step, heads)


@pytest.mark.usefixtures("minimum_cut", "chunks_of_a_row")
@pytest.mark.parametrize("write", WRITES)
def test_logits_of_what_is_written_are_made(write: str, heads: Callable[[], int]) -> None:
    assert_logits_are_made(_writing(WRITES[write]), heads)


def assert_logits_are_made(step: Callable[..., Any], heads: Callable[[], int]) -> None:
    model, x, target = Model(), words(), words(seed=2)
    found = traced(lambda: step(model, x, target))()
    assert heads() == 0
    torch.testing.assert_close(found, step(model, x, target))


@pytest.mark.usefixtures("minimum_cut", "chunks_of_a_row")
def test_a_linear_is_known_by_the_names_of_its_arguments(heads: Callable[[], int]) -> None:
    model, x, target = Model(), words(), words(seed=2)

    def step() -> Tensor:
        inner = model.inner(model.embed(x))
        return flat(F.linear(weight=model.head.weight, input=inner), target)

    found = gradients(traced(step), model)
    assert heads() == 1
    plain = gradients(step, model)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, plain[name])


@pytest.mark.usefixtures("minimum_cut", "chunks_of_a_row")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_loss_is_that_of_logits(mode: Callable[[], Any]) -> None:
    model, x, target = Model(), words(), words(seed=2)
    with mode():
        found = traced(lambda: shifted(model(x), target))()
    assert not found.requires_grad
    torch.testing.assert_close(found, shifted(model(x), target).detach())


@pytest.mark.usefixtures("minimum_cut", "chunks_of_a_row")
def test_tensors_without_ops_make_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those on a GPU where memopt was built without CUDA."""
    model, x, target = Model(), words(), words(seed=2)
    monkeypatch.setattr(_inductor_head._C, "device_types", lambda: ("cuda",))
    monkeypatch.setattr(_inductor_head, "lazy_logits", None)
    found = gradients(traced(lambda: flat(model(x), target)), model)
    plain = gradients(lambda: flat(model(x), target), model)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, plain[name])


@pytest.mark.usefixtures("minimum_cut", "chunks_of_a_row")
def test_a_frozen_head_has_no_gradient(heads: Callable[[], int]) -> None:
    model, x, target = Model(), words(), words(seed=2)
    model.head.requires_grad_(False)
    found = gradients(traced(lambda: flat(model(x), target)), model)
    assert heads() == 1
    plain = gradients(lambda: flat(model(x), target), model)
    assert found.keys() == plain.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, plain[name])


@pytest.mark.usefixtures("minimum_cut", "chunks_of_a_row")
def test_passes_of_others_run_as_well(heads: Callable[[], int]) -> None:
    """One that is set for all graphs, or in the options of this one."""
    seen = []
    model, x, target = Model(), words(), words(seed=2)
    with inductor_config.patch(pre_grad_custom_pass=lambda graph: seen.append("all")):
        traced(lambda: flat(model(x), target))()
    assert (seen, heads()) == (["all"], 1)
    own = {"pre_grad_custom_pass": lambda graph: seen.append("own")}
    made = _inductor_head.with_heads(own)
    torch.compiler.reset()
    torch.compile(lambda: flat(model(x), target), backend=op_by_op(made))()
    assert (seen, heads()) == (["all", "own"], 2)


def test_passes_are_told_apart_by_those_that_run_first() -> None:
    """So that a cache of compiled graphs does not mix them."""

    class Numbered(_inductor_head.CustomGraphPass):
        def __init__(self, number: int) -> None:
            self.number = number

        def __call__(self, graph: Any) -> None:
            pass

        def uuid(self) -> int:
            return self.number

    alone, one, two = (
        _inductor_head.HeadsInChunks(first) for first in (None, Numbered(1), Numbered(2))
    )
    assert len({str(each.uuid()) for each in (alone, one, two)}) == 3
    assert alone.uuid() == _inductor_head.HeadsInChunks().uuid() is not None
    assert _inductor_head.HeadsInChunks(print).uuid() is None


@pytest.mark.parametrize("head", ["no", None, 1])
def test_head_is_true_or_false(head: Any) -> None:
    for call in (memopt.compile, memopt.compile.options):
        with pytest.raises(TypeError, match=r"^compile: head must be True or False, got"):
            call(head=head)
