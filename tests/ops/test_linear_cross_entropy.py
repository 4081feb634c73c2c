"""Proves: linear_cross_entropy and its module give the loss and gradients of a linear and PyTorch's
cross_entropy, as right as PyTorch's by float64, for every reduction, target and setting, whatever
the chunk and the number of threads, under autocast, in one graph and in regions.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memopt
from memopt.functional import linear_cross_entropy
from tests.support.bits import assert_same_bits
from tests.support.losses import (
    assert_as_right_as_pytorch,
    classes_of,
    eager,
    exactly,
    head,
    ours,
    pytorchs,
    with_gradients,
)
from tests.support.opchecks import opcheck

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "class weights": {"class_weight": True},
    "both": {"label_smoothing": 0.3, "class_weight": True},
    "softcap": {"softcap": 5.0},
    "scale and z-loss": {"logit_scale": 0.25, "z_loss": 1e-2},
    "all": {"softcap": 5.0, "logit_scale": 2.0, "z_loss": 1e-2, "class_weight": True},
}
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_reduction = pytest.mark.parametrize("reduction", ["mean", "sum", "none"])


def settings_of(name: str, classes: int, dtype: torch.dtype, device: Any) -> dict[str, Any]:
    settings = dict(SETTINGS[name])
    if "class_weight" in settings:
        settings["class_weight"] = torch.linspace(0.1, 1.5, classes).to(device, dtype)
    return settings


def compare(
    tensors: dict[str, Tensor], target: Tensor, chunk: int | None = 8, **settings: Any
) -> None:
    wanted = list(tensors.values())
    rows = tensors["input"].shape[0]
    upstream = None
    if settings["reduction"] == "none":
        upstream = torch.linspace(0.5, 1.5, rows).to(wanted[0].device, wanted[0].dtype)
    mine = with_gradients(lambda: ours(tensors, target, chunk=chunk, **settings), wanted, upstream)
    theirs = pytorchs(tensors, target, upstream, chunk, **settings)
    assert_as_right_as_pytorch(mine, theirs, exactly(tensors, target, upstream, **settings))


@every_dtype
@every_reduction
@pytest.mark.parametrize("setting", SETTINGS)
def test_as_right_as_a_linear_and_pytorchs_loss(
    dtype: torch.dtype, reduction: str, setting: str, device: torch.device
) -> None:
    tensors = head(29, 16, 129, dtype, device)
    target = classes_of(29, 129, device)
    compare(tensors, target, reduction=reduction, **settings_of(setting, 129, dtype, device))


@every_dtype
@every_reduction
@pytest.mark.parametrize("setting", SETTINGS)
def test_probabilities_as_targets(
    dtype: torch.dtype, reduction: str, setting: str, device: torch.device
) -> None:
    tensors = head(19, 16, 77, dtype, device)
    target = torch.rand(19, 77, device=device).softmax(1).to(dtype)
    compare(tensors, target, reduction=reduction, **settings_of(setting, 77, dtype, device))


@pytest.mark.parametrize("classes", [1, 3, 127, 129, 769, 1000, 4099])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("chunk", [1, 5, None])
def test_every_width_and_chunk(
    classes: int, dtype: torch.dtype, chunk: int | None, device: torch.device
) -> None:
    tensors = head(11, 8, classes, dtype, device)
    compare(tensors, classes_of(11, classes, device), chunk, reduction="mean")


def test_large_logits_lose_no_digits(device: torch.device) -> None:
    """Around 10^4, where a log-sum-exp in one float has three digits behind the point."""
    tensors = head(9, 8, 300, torch.float32, device)
    with torch.no_grad():
        tensors["bias"].add_(1e4)
    for reduction in ("mean", "none"):
        compare(tensors, classes_of(9, 300, device), None, reduction=reduction)


def test_masked_words_have_no_part(device: torch.device) -> None:
    """A bias of -infinity: probability 0, gradient 0."""
    tensors = head(9, 8, 50, torch.float32, device)
    with torch.no_grad():
        tensors["bias"][40:] = -torch.inf
    target = torch.arange(9, device=device)
    for reduction in ("mean", "none"):
        loss = ours(tensors, target, reduction=reduction).sum()
        gradient = torch.autograd.grad(loss, tensors["weight"])[0]
        assert loss.isfinite()
        assert gradient.isfinite().all()
        assert not gradient[40:].any()


def test_leading_dimensions_are_rows(device: torch.device) -> None:
    tensors = head(12, 8, 20, torch.float32, device)
    target = classes_of(12, 20, device)
    flat = ours(tensors, target, reduction="none", chunk=5)
    shaped = linear_cross_entropy(
        tensors["input"].reshape(3, 4, 8),
        tensors["weight"],
        target.reshape(3, 4),
        linear_bias=tensors["bias"],
        reduction="none",
        chunk=5,
    )
    assert torch.equal(shaped, flat.reshape(3, 4))
    one = linear_cross_entropy(tensors["input"][0], tensors["weight"], target[0])
    assert one.shape == ()


def test_strided_tensors(device: torch.device) -> None:
    torch.manual_seed(0)
    input = torch.randn(8, 40, device=device)[:, ::2].t().requires_grad_()
    weight = torch.randn(8, 33, device=device).t().requires_grad_()
    tensors = {"input": input, "weight": weight, "bias": torch.randn(33, requires_grad=True)}
    compare(tensors, classes_of(60, 33, device)[::3], reduction="mean")


def test_k_dimensional_weights_are_pytorchs(device: torch.device) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(5, 4, device=device), torch.randn(7, 2, 3, 4, device=device)
    target = torch.randint(7, (5, 2, 3), device=device)
    bias = torch.randn(7, 2, 3, device=device)
    expected = F.cross_entropy(
        (x @ weight.flatten(0, -2).t()).unflatten(-1, (7, 2, 3)) + bias, target
    )
    torch.testing.assert_close(linear_cross_entropy(x, weight, target, linear_bias=bias), expected)
    with pytest.raises(ValueError, match=r"linear_cross_entropy: softcap, .* two dimensions"):
        linear_cross_entropy(x, weight, target, softcap=3.0)


def test_num_items_is_what_a_mean_divides_by(device: torch.device) -> None:
    tensors = head(12, 8, 20, torch.float32, device)
    target = classes_of(12, 20, device)
    expected = with_gradients(
        lambda: ours(tensors, target, reduction="sum") / 37, list(tensors.values())
    )
    for items in (37, torch.tensor(37), torch.tensor([37.0], device=device)):
        actual = with_gradients(
            lambda items=items: ours(tensors, target, num_items=items), list(tensors.values())
        )
        for mine, wanted in zip(actual, expected, strict=True):
            torch.testing.assert_close(mine, wanted)
    with pytest.raises(ValueError, match="num_items is what a mean divides by"):
        ours(tensors, target, reduction="sum", num_items=3)


def test_no_rows_and_ignored_rows_as_pytorch(device: torch.device) -> None:
    """A mean of nothing is NaN, a sum 0; gradients are 0 either way."""
    for rows, reduction in itertools.product((0, 5), ("mean", "sum")):
        tensors = head(rows, 8, 20, torch.bfloat16, device)
        target = torch.full((rows,), -100, device=device)
        wanted = list(tensors.values())
        mine = with_gradients(
            lambda t=tensors, y=target, r=reduction: ours(t, y, reduction=r), wanted
        )
        theirs = with_gradients(
            lambda t=tensors, y=target, r=reduction: eager(**t, target=y, reduction=r), wanted
        )
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, equal_nan=True)
        assert mine[0].isnan() == (reduction == "mean")


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_bits_do_not_depend_on_the_number_of_threads(reduction: str) -> None:
    """But for those of PyTorch's products, which are exact here: small integers."""
    torch.manual_seed(0)
    x = torch.randint(-3, 4, (300, 16)).float().requires_grad_()
    weight = torch.randint(-2, 3, (515, 16)).float().requires_grad_()
    target = classes_of(300, 515)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            loss = linear_cross_entropy(x, weight, target, reduction=reduction, logit_scale=0.1)
            results.append(loss.detach())
            private = torch.ops.memopt._cross_entropy_forward(
                (x @ weight.t()).detach(), target, None, ignore_index=-100, label_smoothing=0.1
            )
            results.append(torch.cat([part.reshape(-1) for part in private]))
    finally:
        torch.set_num_threads(threads)
    assert_same_bits(results[2::2], [results[0]] * 2, "loss")
    assert_same_bits(results[3::2], [results[1]] * 2, "rows")


def test_double_backward_of_rows_losses(device: torch.device) -> None:
    tensors = {
        k: t.detach().requires_grad_() for k, t in head(7, 4, 9, torch.float64, device).items()
    }
    target = classes_of(7, 9, device)
    for settings in ({}, {"softcap": 1.5}, {"label_smoothing": 0.1, "z_loss": 0.1}):

        def loss(x: Tensor, w: Tensor, b: Tensor, settings: Any = settings) -> Tensor:
            return ours(
                {"input": x, "weight": w, "bias": b}, target, reduction="none", chunk=2, **settings
            )

        assert torch.autograd.gradcheck(loss, tuple(tensors.values()))
        assert torch.autograd.gradgradcheck(loss, tuple(tensors.values()))


def test_create_graph_of_a_mean_is_an_error() -> None:
    tensors = head(7, 4, 9)
    loss = ours(tensors, classes_of(7, 9))
    with pytest.raises(NotImplementedError, match="linear_cross_entropy: create_graph=True"):
        torch.autograd.grad(loss, tensors["input"], create_graph=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@every_reduction
def test_autocast(dtype: torch.dtype, reduction: str, device: torch.device) -> None:
    """A float32 loss of products in the autocast dtype; float32 gradients for float32 tensors."""
    tensors = head(29, 16, 129, torch.float32, device)
    target, wanted = classes_of(29, 129, device), list(tensors.values())
    upstream = torch.ones(29, device=device) if reduction == "none" else None
    with torch.autocast(device.type, dtype):
        mine = ours(tensors, target, reduction=reduction)
        theirs = eager(**tensors, target=target, reduction=reduction)
    assert_as_right_as_pytorch(
        with_gradients(lambda: mine, wanted, upstream),
        with_gradients(lambda: theirs, wanted, upstream),
        exactly(tensors, target, upstream, reduction=reduction),
        products=dtype,
    )


def test_gradients_of_float16_survive_a_loss_scale() -> None:
    """Of 1e-8 and less, which float16 does not hold: only the scaled ones are rounded."""
    tensors = head(64, 8, 4096, torch.float16)
    target = torch.zeros(64, dtype=torch.int64)
    loss = torch.ops.memopt.linear_cross_entropy(
        tensors["input"], tensors["weight"], target, linear_bias=tensors["bias"], dtype=torch.float
    )
    scaled = torch.autograd.grad(loss * 4096, tensors["weight"])[0].double()
    exact = exactly(tensors, target)[2] * 4096
    assert (scaled - exact).abs().max() <= 2e-3 * exact.abs().max()
    assert (scaled != 0).double().mean() > 0.99


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_one_graph_under_compile(reduction: str, device: torch.device) -> None:
    tensors = head(29, 16, 129, torch.float32, device)
    target = classes_of(29, 129, device)

    def loss(input: Tensor, weight: Tensor, bias: Tensor, target: Tensor) -> Tensor:
        return linear_cross_entropy(
            2 * input, weight, target, linear_bias=bias, reduction=reduction, softcap=5.0
        ).sum()

    torch.compiler.reset()
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    wanted = list(tensors.values())
    assert_same_bits(
        with_gradients(lambda: compiled(*wanted, target), wanted),
        with_gradients(lambda: loss(*wanted, target), wanted),
        "compiled",
    )


def test_opcheck(device: torch.device) -> None:
    tensors = head(9, 8, 20, torch.float32, device)
    target = classes_of(9, 20, device)
    for reduction, weight in (("mean", None), ("mean", torch.rand(20)), ("none", None)):
        keywords = {"linear_bias": tensors["bias"], "reduction": reduction, "weight": weight}
        opcheck(
            torch.ops.memopt.linear_cross_entropy,
            (tensors["input"], tensors["weight"], target),
            keywords,
            random=False,
        )
    plain = {name: tensor.detach() for name, tensor in tensors.items()}
    torch.library.opcheck(
        torch.ops.memopt._linear_cross_entropy,
        (*plain.values(), target, None, None, None, None, None),
        {"ignore_index": -100, "output_mask": [True] * 3, "chunk": 4},
    )


def test_meta_tensors_have_shapes() -> None:
    tensors = {name: t.detach().to("meta") for name, t in head(9, 8, 20, torch.bfloat16).items()}
    target = torch.empty(9, dtype=torch.int64, device="meta")
    assert ours(tensors, target).shape == ()
    assert ours(tensors, target, reduction="none").shape == (9,)


def test_inside_a_checkpointed_region() -> None:
    tensors = head(29, 16, 129)
    target, wanted = classes_of(29, 129), list(tensors.values())
    plain = with_gradients(lambda: ours(tensors, target), wanted)
    region = with_gradients(lambda: memopt.checkpoint(ours, tensors, target), wanted)
    assert_same_bits(region, plain, "region")


def test_forward_mode_is_an_error() -> None:
    tensors = head(4, 3, 6)
    with pytest.raises(RuntimeError, match="linear_cross_entropy: forward-mode"):
        torch.func.jvp(
            lambda x: linear_cross_entropy(x, tensors["weight"].detach(), classes_of(4, 6)),
            (torch.ones(4, 3),),
            (torch.ones(4, 3),),
        )


def test_the_module_has_pytorchs_keys_and_results(device: torch.device) -> None:
    weight = torch.rand(9)
    settings: dict[str, Any] = {"bias": True, "weight": weight, "label_smoothing": 0.1}
    module = memopt.nn.LinearCrossEntropy(5, 9, **settings).to(device)
    plain = nn.Sequential(copy.deepcopy(module.linear))
    x, target = torch.randn(4, 5, device=device), classes_of(4, 9, device)
    expected = F.cross_entropy(plain(x), target, weight.to(device), label_smoothing=0.1)
    torch.testing.assert_close(module(x, target), expected)
    torch.testing.assert_close(module(x, target, num_items=8) * 8, ours_sum(module, x, target))
    assert list(module.state_dict()) == ["weight", "linear.weight", "linear.bias"]
    if hasattr(nn, "LinearCrossEntropyLoss"):
        torchs = nn.LinearCrossEntropyLoss(5, 9, **settings)
        module.load_state_dict(torchs.state_dict())
    loss = nn.CrossEntropyLoss(weight.to(device), label_smoothing=0.1)
    made = memopt.nn.LinearCrossEntropy.from_modules(plain[0], loss)
    assert made.linear is plain[0]
    torch.testing.assert_close(made(x, target), expected)
    assert "label_smoothing=0.1" in repr(made)


def ours_sum(module: Any, x: Tensor, target: Tensor) -> Tensor:
    return linear_cross_entropy(
        x,
        module.linear.weight,
        target,
        linear_bias=module.linear.bias,
        weight=module.weight,
        label_smoothing=0.1,
        reduction="sum",
    )
