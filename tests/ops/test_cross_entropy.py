"""Proves: cross_entropy of logits that are there gives PyTorch's results, as right by float64,
keeps the logits and four bytes a row, writes the gradient over them where nobody else has them, and
nowhere else.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from memopt.functional import cross_entropy
from memopt.memory.saved import SavedTensors
from tests.support.allocator import allocated_by
from tests.support.bits import assert_same_bits
from tests.support.losses import assert_as_right_as_pytorch, classes_of, with_gradients
from tests.support.opchecks import opcheck

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def logits_of(rows: int, classes: int, dtype: torch.dtype, device: Any = "cpu") -> Tensor:
    torch.manual_seed(0)
    return (4 * torch.randn(rows, classes)).to(device, dtype).requires_grad_()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["classes", "weighted", "probabilities"])
def test_as_right_as_pytorchs(
    dtype: torch.dtype, reduction: str, smoothing: float, kind: str, device: torch.device
) -> None:
    logits = logits_of(23, 129, dtype, device)
    target = classes_of(23, 129, device)
    if kind == "probabilities":
        target = torch.rand(23, 129, device=device).softmax(1).to(dtype)
    weight = torch.linspace(0.1, 1.0, 129, device=device).to(dtype) if kind == "weighted" else None
    upstream = torch.linspace(0.5, 1.5, 23, device=device) if reduction == "none" else None
    settings: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}

    def results(loss: Any, logits: Tensor, target: Tensor, weight: Tensor | None) -> list[Tensor]:
        return with_gradients(lambda: loss(logits, target, weight, **settings), [logits], upstream)

    wide = target.cpu() if kind != "probabilities" else target.cpu().double()
    wide_weight = None if weight is None else weight.cpu().double()
    upstream_device = upstream
    mine = results(cross_entropy, logits, target, weight)
    theirs = results(F.cross_entropy, logits, target, weight)
    upstream = None if upstream_device is None else upstream_device.cpu()
    exact = results(
        F.cross_entropy, logits.detach().cpu().double().requires_grad_(), wide, wide_weight
    )
    assert_as_right_as_pytorch(mine, theirs, exact)


def test_shapes_as_pytorch() -> None:
    x = torch.randn(7, requires_grad=True)
    for reduction in ("mean", "none"):
        ours = cross_entropy(x, torch.tensor(3), reduction=reduction)
        torchs = F.cross_entropy(x, torch.tensor(3), reduction=reduction)
        assert ours.shape == torchs.shape
        torch.testing.assert_close(ours, torchs)
    x, target = torch.randn(2, 5, 3, 4), torch.randint(5, (2, 3, 4))
    assert_same_bits(cross_entropy(x, target), F.cross_entropy(x, target))
    x, target = torch.randn(4, 5), torch.randint(5, (4,))
    assert_same_bits(
        cross_entropy(x, target, reduce=False), F.cross_entropy(x, target, reduction="none")
    )


def test_keeps_the_logits_and_four_bytes_a_row() -> None:
    logits, target = logits_of(16, 100, torch.bfloat16), classes_of(16, 100)
    with SavedTensors(exclude=[target]) as saved:
        cross_entropy(logits, target)
    assert saved.bytes == logits.nbytes + 4 * 16 + 4  # and what the mean divides by


class Observer(torch.utils._python_dispatch.TorchDispatchMode):
    """Keeps what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in (*args, result):
            if isinstance(value, Tensor) and value.shape == (6, 9):
                self.seen.append((value, value.clone()))
        return result


def peak(keep: bool) -> int:
    x = torch.randn(64, 8, requires_grad=True)
    weight, target = torch.randn(4096, 8), classes_of(64, 4096)

    def step() -> None:
        x.grad = None
        logits = F.linear(x, weight)
        loss = cross_entropy(logits, target)
        if not keep:
            del logits
        loss.backward()

    return allocated_by(step)


def test_the_gradient_is_written_over_logits_that_nobody_has() -> None:
    logits = 4 * 64 * 4096
    assert logits <= peak(keep=False) < 1.1 * logits
    assert 2 * logits <= peak(keep=True) < 2.1 * logits


@pytest.mark.parametrize("holder", ["name", "view", "hook", "retain_graph", "mode", "saved"])
def test_logits_that_somebody_has_stay_as_they_are(holder: str) -> None:
    x = torch.randn(6, 4, requires_grad=True)
    weight, target = torch.randn(9, 4), classes_of(6, 9)
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    def loss_of() -> Tensor:
        logits = F.linear(x, weight)
        copies.append(logits.detach().clone())
        if holder == "name":
            kept.append(logits)
        if holder == "view":
            kept.append(logits.view(-1))
        if holder == "saved":
            return cross_entropy(logits, target) + (logits * logits).sum()
        if holder == "hook":
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                return cross_entropy(logits, target)
        return cross_entropy(logits, target)

    copies: list[Tensor] = []
    if holder == "mode":
        with Observer() as observer:
            loss_of().backward()
        for tensor, copy in observer.seen:
            assert_same_bits(tensor, copy, "seen")
        return
    loss = loss_of()
    first = torch.autograd.grad(loss, x, retain_graph=holder == "retain_graph")[0]
    if holder == "retain_graph":
        assert_same_bits(torch.autograd.grad(loss, x)[0], first, "second backward")
    for tensor in kept:
        if tensor.numel() == copies[0].numel():
            assert_same_bits(tensor.reshape(6, 9), copies[0], holder)
    if holder == "saved":
        z = copies[0].clone().requires_grad_()
        (F.cross_entropy(z, target) + (z * z).sum()).backward()
        torch.testing.assert_close(first, z.grad @ weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_returns_float32_without_a_copy(dtype: torch.dtype, device: torch.device) -> None:
    logits, target = logits_of(16, 100, dtype, device), classes_of(16, 100, device)
    with torch.autocast(device.type, dtype):
        loss, torchs = cross_entropy(logits, target), F.cross_entropy(logits, target)
    assert loss.dtype == torchs.dtype == torch.float32
    torch.testing.assert_close(loss, torchs)
    assert torch.autograd.grad(loss, logits)[0].dtype == dtype


def test_double_backward() -> None:
    logits, target = logits_of(5, 7, torch.float64), classes_of(5, 7, ignored=2)
    for reduction in ("mean", "none"):

        def loss(logits: Tensor, reduction: str = reduction) -> Tensor:
            return cross_entropy(logits, target, reduction=reduction, label_smoothing=0.1)

        assert torch.autograd.gradcheck(loss, (logits,))
        assert torch.autograd.gradgradcheck(loss, (logits,))


def test_opcheck_and_one_graph(device: torch.device) -> None:
    logits, target = logits_of(9, 20, torch.float32, device), classes_of(9, 20, device)
    opcheck(torch.ops.memopt.cross_entropy, (logits, target), {}, random=False)
    private = (logits.detach(), target, None)
    settings = {"ignore_index": -100, "label_smoothing": 0.0}
    torch.library.opcheck(torch.ops.memopt._cross_entropy_forward, private, settings)
    log_sum = torch.ops.memopt._cross_entropy_forward(*private, **settings)[2]
    for op in ("_cross_entropy_backward", "_cross_entropy_backward_"):
        arguments = (torch.ones((), device=device), private[0].clone(), log_sum, target, None)
        torch.library.opcheck(getattr(torch.ops.memopt, op), arguments, settings)
    torch.compiler.reset()
    compiled = torch.compile(cross_entropy, backend="aot_eager", fullgraph=True)
    assert_same_bits(
        with_gradients(lambda: compiled(logits, target), [logits]),
        with_gradients(lambda: cross_entropy(logits, target), [logits]),
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": torch.tensor([0, 9])}, r"target must be in \[0, 5\) .* got 9 in row 1"),
        ({"target": torch.tensor([0])}, "target must have a class for each of 2 rows"),
        ({"target": torch.tensor([0.0, 1.0])}, "target must have dtype int64"),
        ({"target": torch.ones(2, 4)}, "target must have shape"),
        ({"weight": torch.ones(4)}, r"class weights must have shape \[5\]"),
        ({"label_smoothing": 2.0}, "label_smoothing must be between 0 and 1"),
        ({"reduction": "max"}, "reduction must be none, mean or sum"),
        ({"input": torch.ones(2, 5, dtype=torch.int64)}, "input must have dtype"),
        ({"input": torch.ones(2, 0)}, "at least one class"),
    ],
)
def test_bad_input_is_named(change: dict[str, Any], message: str) -> None:
    good = {"input": torch.ones(2, 5), "target": torch.tensor([0, 1])}
    with pytest.raises((RuntimeError, ValueError, IndexError), match="cross_entropy: ") as error:
        cross_entropy(**{**good, **change})
    error.match(message)


def test_no_rows_as_pytorch() -> None:
    logits = torch.empty(0, 5, requires_grad=True)
    target = torch.empty(0, dtype=torch.int64)
    assert cross_entropy(logits, target).isnan()
    assert cross_entropy(logits, target, reduction="sum") == 0
    cross_entropy(logits, target).backward()
    assert logits.grad is not None
    assert logits.grad.shape == (0, 5)
