"""Cross entropy's CUDA kernels, run by the interpreter.

Losses, statistics and gradients are float64's within rounding and the CPU kernel's, for every type,
width and target, over the logits too, in every order of threads; a second call with the first one's
statistics has its bits; a class out of range reads nothing; sums in two arrays have the CPU's bits.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.bits import assert_same_bits
from tests.support.losses import classes_of, error, exactly
from tests.support.tolerances import sums_dtype

from .cross_entropy import run, run_split_sum
from .device import Attribute, Device
from .drivers.run import STREAM, Layout
from .kernels import in_every_order

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.2},
    "class weights": {"class_weight": True},
    "softcap": {"softcap": 4.0, "logit_scale": 2.0},
    "all": {"label_smoothing": 0.2, "class_weight": True, "z_loss": 1e-2, "softcap": 4.0},
}


def logits_of(rows: int, cols: int, dtype: torch.dtype) -> Tensor:
    torch.manual_seed(cols)
    return (3 * torch.randn(rows, cols)).to(dtype)


def exact(logits: Tensor, target: Tensor, dloss: Tensor, **settings: Any) -> list[Tensor]:
    """Losses and the gradient, by a linear with an identity for its weight."""
    cols = logits.shape[1]
    tensors = {"input": logits, "weight": torch.eye(cols), "bias": torch.zeros(cols)}
    return exactly(tensors, target, dloss, reduction="none", **settings)[:2]


@every_dtype
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("cols", [1, 3, 129])
@pytest.mark.parametrize("probabilities", [False, True])
def test_right_in_every_order(
    simt: Device, dtype: torch.dtype, setting: str, cols: int, probabilities: bool
) -> None:
    settings = dict(SETTINGS[setting])
    sums = sums_dtype(dtype)
    if "class_weight" in settings:
        settings["class_weight"] = torch.linspace(0.1, 1.5, cols, dtype=sums)
    logits, target = logits_of(3, cols, dtype), classes_of(3, cols, ignored=2)
    if probabilities:
        target = torch.rand(3, cols, dtype=sums).softmax(1)
    dloss = torch.tensor([0.5, 1.0, -2.0], dtype=sums)
    results = in_every_order(simt, lambda: run(simt, logits, target, dloss=dloss, **settings))
    loss, gradient = exact(logits, target, dloss, **settings)
    assert error(results["loss"], loss) <= 8 * torch.finfo(sums).eps * max(1, cols**0.5)
    assert error(results["gradient"], gradient) <= 16 * torch.finfo(dtype).eps or cols == 1
    again = run(
        simt, logits, target, dloss=dloss, log_sum=results["log_sum"], in_place=True, **settings
    )
    assert_same_bits(again["gradient"], results["gradient"], "over the logits, in a second call")


@every_dtype
@pytest.mark.parametrize("cols", [1024, 9001])
def test_agrees_with_the_cpu_kernel(simt: Device, dtype: torch.dtype, cols: int) -> None:
    """Long rows, on both sides of a tile; rows that a grid strides over."""
    simt.set_attribute(Attribute.MULTIPROCESSORS, 1)
    logits, target = logits_of(5, cols, dtype), classes_of(5, cols, ignored=4)
    ours = run(simt, logits, target)
    loss, log_sum = torch.ops.memopt._cross_entropy_forward(
        logits, target, None, ignore_index=-100, label_smoothing=0.0
    )[1:]
    one = torch.ones((), dtype=loss.dtype)
    gradient = torch.ops.memopt._cross_entropy_backward(
        one, logits, log_sum, target, None, ignore_index=-100, label_smoothing=0.0
    )
    for name, cpu in (("loss", loss), ("log_sum", log_sum), ("gradient", gradient)):
        assert error(ours[name], cpu.double()) <= 4 * torch.finfo(cpu.dtype).eps, name


@pytest.mark.parametrize("offset", [1, 2])
@every_dtype
def test_same_bits_wherever_the_rows_lie(simt: Device, dtype: torch.dtype, offset: int) -> None:
    logits, target = logits_of(3, 640, dtype), classes_of(3, 640)
    aligned = run(simt, logits, target)
    for layout in (Layout(offset=offset), Layout(offset=offset, row_gap=3)):
        assert_same_bits(run(simt, logits, target, layout=layout), aligned, str(layout))


def test_entropy_and_its_gradient(simt: Device) -> None:
    logits, target = logits_of(4, 130, torch.float64), classes_of(4, 130)
    logits[:, 7] = -torch.inf
    dentropy = torch.tensor([1.0, -1.0, 0.5, 2.0], dtype=torch.float64)
    results = in_every_order(
        simt, lambda: run(simt, logits, target, dentropy=dentropy, with_entropy=True)
    )
    others = [col for col in range(130) if col != 7]
    z = logits[:, others].requires_grad_()
    log_p = z.log_softmax(1)
    entropy = -(log_p.exp() * log_p).sum(1)
    chosen = torch.tensor([others.index(word) for word in target.tolist()])
    loss = -log_p.gather(1, chosen.unsqueeze(1)).squeeze(1)
    expected = torch.zeros_like(logits)
    expected[:, others] = torch.autograd.grad((loss + dentropy * entropy).sum(), z)[0]
    torch.testing.assert_close(results["entropy"], entropy.detach())
    torch.testing.assert_close(results["gradient"], expected)
    again = run(
        simt,
        logits,
        target,
        dentropy=dentropy,
        log_sum=results["log_sum"],
        entropy=results["entropy"],
    )
    assert_same_bits(again["gradient"], results["gradient"], "again")


@every_dtype
@pytest.mark.parametrize("cols", [1, 129, 9001])
def test_without_a_target_it_is_the_logsumexp(simt: Device, dtype: torch.dtype, cols: int) -> None:
    logits, sums = logits_of(3, cols, dtype), sums_dtype(dtype)
    dloss = torch.tensor([0.5, 1.0, -2.0], dtype=sums)
    results = in_every_order(simt, lambda: run(simt, logits, None, dloss=dloss))
    z = logits.double().requires_grad_()
    exact = z.logsumexp(1)
    (gradient,) = torch.autograd.grad((exact * dloss).sum(), z)
    assert error(results["loss"], exact.detach()) <= 8 * torch.finfo(sums).eps
    assert error(results["gradient"], gradient) <= 16 * torch.finfo(dtype).eps
    again = run(simt, logits, None, dloss=dloss, log_sum=results["log_sum"], in_place=True)
    assert_same_bits(again["gradient"], results["gradient"], "over the logits, in a second call")


def test_a_class_out_of_range_reads_nothing(simt: Device) -> None:
    """The guards around the logits would report a read; the row is NaN, the others are right."""
    logits = logits_of(3, 40, torch.float32)
    good = run(simt, logits, torch.tensor([1, 2, 3]))
    for bad in (40, -1, 1 << 40):
        results = run(simt, logits, torch.tensor([1, bad, 3]))
        for name in ("loss", "log_sum", "gradient"):
            value, expected = results[name], good[name]
            assert value is not None
            assert expected is not None
            assert value[1].isnan().all()
            assert_same_bits(value[::2], expected[::2], name)


def test_nan_stays_in_its_row(simt: Device) -> None:
    logits = logits_of(2, 40, torch.float32)
    logits[0, 3] = torch.nan
    results = run(simt, logits, torch.tensor([1, 2]))
    for value in (results["loss"], results["gradient"]):
        assert value is not None
        assert value[0].isnan().all()
        assert value[1].isfinite().all()


def test_nothing_is_launched_for_no_rows(simt: Device) -> None:
    run(simt, logits_of(0, 5, torch.float32), torch.empty(0, dtype=torch.int64))
    assert simt.launches() == []
    run(simt, logits_of(2, 5, torch.float32), torch.tensor([1, 2]))
    (launch,) = simt.launches()
    assert (launch.grid, launch.block, launch.stream) == ((2, 1, 1), (512, 1, 1), STREAM)


@pytest.mark.parametrize("size", [1, 255, 257, 1000])
def test_sums_in_two_arrays(simt: Device, size: int) -> None:
    """Nearer to the exact sum than a rounding of bfloat16; infinity and NaN stay."""
    torch.manual_seed(size)
    parts = [torch.randn(size).bfloat16() for _ in range(20)]
    parts[3][0] = torch.inf
    if size > 1:
        parts[5][-1] = torch.nan
    result = in_every_order(simt, lambda: [run_split_sum(simt, parts, offset=1)])[0]
    exact_sum = torch.stack(parts).double().sum(0)
    torch.testing.assert_close(
        result.double(), exact_sum, rtol=2**-8, atol=20 * 2**-16, equal_nan=True
    )
    assert result[0] == torch.inf
