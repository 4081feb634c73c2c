"""Proves: linear_log_probs gives log_softmax at the targets and the entropy, and their gradients,
as right as PyTorch's composition by float64, in chunks; losses that users write on them (DPO, GRPO,
distillation) have the composition's gradients.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from memopt.functional import linear_log_probs
from memopt.memory.saved import SavedTensors
from tests.support.allocator import allocated_by
from tests.support.bits import assert_same_bits
from tests.support.losses import classes_of, error, head, limit_of
from tests.support.opchecks import opcheck


def composed(input: Tensor, weight: Tensor, bias: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    log_p = F.linear(input, weight, bias).log_softmax(-1)
    counts = target != -100
    chosen = log_p.gather(-1, target.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return chosen * counts, entropy * counts


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str
)
@pytest.mark.parametrize("entropy", [False, True])
def test_as_right_as_the_composition(
    dtype: torch.dtype, entropy: bool, device: torch.device
) -> None:
    tensors = head(29, 16, 129, dtype, device)
    target = classes_of(29, 129, device)
    doubles = [t.detach().cpu().double().requires_grad_() for t in tensors.values()]

    def results(wanted: list[Tensor], pair: tuple[Tensor, ...]) -> list[Tensor]:
        loss = pair[0].sin().sum() + (pair[1].square().sum() if entropy else 0)
        return [*pair, *torch.autograd.grad(loss, wanted)]

    wanted = list(tensors.values())
    made = linear_log_probs(
        wanted[0], wanted[1], target, linear_bias=wanted[2], entropy=entropy, chunk=8
    )
    mine = results(wanted, made if isinstance(made, tuple) else (made,))
    theirs = results(wanted, composed(*wanted, target)[: 1 + entropy])
    exact = results(doubles, composed(*doubles, target.cpu())[: 1 + entropy])
    for ours, torchs, reference in zip(mine, theirs, exact, strict=True):
        limit = limit_of(error(torchs, reference), dtype)
        assert error(ours, reference) <= limit
    assert mine[0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert not mine[0][target == -100].any()


def test_losses_that_users_write(device: torch.device) -> None:
    """DPO's sum over a sequence, GRPO's ratio, a distillation's KL of two heads' choices."""
    tensors = head(24, 8, 65, torch.float64, device)
    x, weight, bias = tensors.values()
    target = classes_of(24, 65, device).reshape(4, 6)
    sequences = x.reshape(4, 6, 8)
    old = torch.randn(4, 6, device=device, dtype=torch.float64)

    def dpo(log_probs: Tensor, entropy: Tensor) -> Tensor:
        chosen, rejected = log_probs.sum(-1).chunk(2)
        return -F.logsigmoid(0.1 * (chosen - rejected)).mean()

    def grpo(log_probs: Tensor, entropy: Tensor) -> Tensor:
        ratio = (log_probs - old).exp()
        return -torch.minimum(ratio, ratio.clamp(0.8, 1.2)).mean() - 0.01 * entropy.mean()

    def distillation(log_probs: Tensor, entropy: Tensor) -> Tensor:
        return (old.exp() * (old - log_probs)).mean()

    for loss in (dpo, grpo, distillation):
        ours = linear_log_probs(sequences, weight, target, linear_bias=bias, entropy=True, chunk=5)
        mine = torch.autograd.grad(loss(*ours), [x, weight, bias])
        theirs = torch.autograd.grad(
            loss(*composed(sequences, weight, bias, target)), [x, weight, bias]
        )
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b)


def test_without_gradients_nothing_but_the_results_is_held() -> None:
    """A reference model's pass."""
    tensors = head(256, 8, 4096)
    target = classes_of(256, 4096)

    def step() -> None:
        with torch.no_grad():
            linear_log_probs(tensors["input"], tensors["weight"], target, chunk=16)

    assert allocated_by(step) <= 4 * 16 * 4096 + 16 * 256


def test_saves_four_bytes_a_row_and_eight_with_the_entropy() -> None:
    tensors = head(40, 8, 64)
    target = classes_of(40, 64)
    for entropy, each in ((False, 4), (True, 8)):
        with SavedTensors(exclude=[target, *tensors.values()]) as saved:
            linear_log_probs(tensors["input"], tensors["weight"], target, entropy=entropy)
        assert saved.bytes == each * 40


def test_entropy_alone_and_log_probs_alone(device: torch.device) -> None:
    """A result without a gradient counts as zero."""
    tensors = head(9, 4, 20, torch.float64, device)
    x, weight, bias = tensors.values()
    target = classes_of(9, 20, device)
    for place in (0, 1):
        mine = linear_log_probs(x, weight, target, linear_bias=bias, entropy=True)[place].sum()
        theirs = composed(x, weight, bias, target)[place].sum()
        for a, b in zip(
            torch.autograd.grad(mine, [x, weight, bias]),
            torch.autograd.grad(theirs, [x, weight, bias]),
            strict=True,
        ):
            torch.testing.assert_close(a, b)


def test_double_backward(device: torch.device) -> None:
    tensors = head(5, 3, 7, torch.float64, device)
    target = classes_of(5, 7, device, ignored=3)

    def loss(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return linear_log_probs(
            x, weight, target, linear_bias=bias, entropy=True, softcap=2.0, chunk=2
        )

    assert torch.autograd.gradcheck(loss, tuple(tensors.values()))
    assert torch.autograd.gradgradcheck(loss, tuple(tensors.values()))


def test_opcheck_autocast_and_one_graph(device: torch.device) -> None:
    tensors = head(9, 8, 20, torch.float32, device)
    x, weight = tensors["input"], tensors["weight"]
    target = classes_of(9, 20, device)
    for op in (torch.ops.memopt.linear_log_probs, torch.ops.memopt.linear_log_probs_and_entropy):
        opcheck(op, (x, weight, target), {"chunk": 4}, random=False)
    with torch.autocast(device.type, torch.bfloat16):
        low = linear_log_probs(x, weight, target)
    assert low.dtype == torch.float32
    assert_same_bits(low, linear_log_probs(x.bfloat16(), weight.bfloat16(), target))
    torch.compiler.reset()
    compiled = torch.compile(linear_log_probs, backend="aot_eager", fullgraph=True)
    assert_same_bits(
        compiled(x, weight, target, entropy=True), linear_log_probs(x, weight, target, entropy=True)
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": torch.tensor([0, 9])}, r"target must be in \[0, 5\) .* got 9 in row 1"),
        ({"target": torch.ones(2, 5)}, "target must be class indices"),
        ({"target": torch.tensor([0])}, "target must have shape"),
        ({"chunk": 0}, "chunk must be at least 1"),
        ({"softcap": -1.0}, "softcap must be positive"),
        ({"linear_weight": torch.ones(5, 4)}, "linear_weight must have shape"),
    ],
)
def test_bad_input_is_named(change: dict, message: str) -> None:
    good = {
        "input": torch.ones(2, 3),
        "linear_weight": torch.ones(5, 3),
        "target": torch.tensor([0, 1]),
    }
    with pytest.raises(
        (RuntimeError, ValueError, IndexError), match="linear_log_probs: "
    ) as error_of:
        linear_log_probs(**{**good, **change})
    error_of.match(message)
