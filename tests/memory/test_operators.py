"""Proves that no operator's memory on a CPU is predicted too low: for each one that a case calls in
forward and backward, its results and scratch by prediction against what the allocator gave out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from memopt.memory.allocator import LiveBytes
from memopt.memory.predicted.hollow import _allocated
from memopt.memory.predicted.outcome import is_made, outcome_of
from memopt.memory.scratch.rules import scratch_of
from memopt.memory.storages import storages, tensors_in

ROUNDING = 600
"""Bytes of numbers, counts and states."""

Formats = tuple[str, ...]
Call = Callable[..., Any]


class Found(NamedTuple):
    """What one call of an operator took, by the allocator and by prediction."""

    name: str
    real: int
    known: int
    margin: int


class Compare(TorchDispatchMode):
    """A mode that runs each operator, and predicts what it needs."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Found] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.is_view:
            return func(*args, **kwargs)
        given = tensors_in((args, kwargs))
        before = storages(given)
        outcome = outcome_of(func, args, kwargs, True)
        results = [_allocated(leaf, given) for leaf in outcome.leaves if is_made(leaf)]
        new = {key: size for key, size in storages(results).items() if key not in before}
        scratch = scratch_of(func, args, given, results, kwargs)
        with LiveBytes() as live:
            result = func(*args, **kwargs)
        predicted = sum(new.values()) + scratch.known + scratch.measured
        self.found.append(Found(str(func), live.most_with_scratch, predicted, scratch.margin))
        return result


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    if layout == "channels last" and tensor.dim() > 3:
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        return tensor.to(memory_format=formats[tensor.dim()])
    if layout == "transposed" and tensor.dim() > 1:
        return tensor.mT.contiguous().mT
    return tensor


def compared(call: Call, inputs: list[Tensor], gradients: Formats) -> list[Found]:
    """What each operator of forward took, and of backward with a gradient in each layout."""
    with Compare() as mode:
        result = call(*inputs)
    leaves = [each for each in inputs if each.requires_grad]
    for layout in gradients:
        ones = torch.ones_like(result, memory_format=torch.contiguous_format)
        gradient = (
            laid_out(ones, layout) if layout != "expanded" else ones.mean().expand(ones.shape)
        )
        with mode:
            torch.autograd.grad(result, leaves, gradient, retain_graph=True, allow_unused=True)
    return mode.found


def check(
    call: Call, inputs: list[Tensor], gradients: Formats = ("contiguous",), library: float = 0.0
) -> None:
    """`library`: the share of an operator's memory that LAPACK's and oneDNN's builds for other
    processors may take more, or less, than here.
    """
    for found in compared(call, inputs, gradients):
        more = ROUNDING + library * found.real
        assert found.real <= found.known + found.margin + more, found
        assert found.known <= found.real + more, found


def image(*shape: int, dtype: torch.dtype = torch.float32, layout: str = "contiguous") -> Tensor:
    return laid_out(torch.rand(shape).to(dtype), layout).detach().requires_grad_()


LAYOUTS = ("contiguous", "channels last", "transposed")
MAPS: dict[str, tuple[Call, tuple[int, ...]]] = {
    "max_pool2d": (lambda x: F.max_pool2d(x, 3, 1, 1), (4, 12, 20, 18)),
    "max_pool3d": (lambda x: F.max_pool3d(x, 2), (2, 12, 8, 10, 12)),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 2), (4, 12, 20, 18)),
    "avg_pool3d": (lambda x: F.avg_pool3d(x, 2), (2, 12, 8, 10, 12)),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, 7), (4, 12, 20, 18)),
    "adaptive_max_pool2d": (lambda x: F.adaptive_max_pool2d(x, 7), (4, 12, 20, 18)),
    "adaptive_max_pool3d": (lambda x: F.adaptive_max_pool3d(x, 3), (2, 12, 8, 10, 12)),
    "fractional_max_pool2d": (lambda x: F.fractional_max_pool2d(x, 2, 7), (4, 12, 20, 18)),
    "reflection_pad1d": (lambda x: F.pad(x, (2, 2), "reflect"), (4, 12, 200)),
    "reflection_pad2d": (lambda x: F.pad(x, (2, 2, 2, 2), "reflect"), (4, 12, 20, 18)),
    "replication_pad3d": (lambda x: F.pad(x, (1,) * 6, "replicate"), (2, 12, 8, 10, 12)),
    "nearest": (lambda x: F.interpolate(x, scale_factor=2), (4, 12, 20, 18)),
    "nearest, exact": (
        lambda x: F.interpolate(x, scale_factor=2, mode="nearest-exact"),
        (4, 12, 20, 18),
    ),
    "nearest, of volumes": (lambda x: F.interpolate(x, scale_factor=2), (2, 12, 8, 6, 5)),
    "bicubic": (lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"), (4, 12, 20, 18)),
    "antialiased": (
        lambda x: F.interpolate(x, size=(9, 7), mode="bilinear", antialias=True),
        (4, 12, 20, 18),
    ),
    "pixel_shuffle": (lambda x: F.pixel_shuffle(x, 2), (4, 12, 20, 18)),
    "pixel_unshuffle": (lambda x: F.pixel_unshuffle(x, 2), (4, 12, 20, 18)),
    "channel_shuffle": (lambda x: F.channel_shuffle(x, 2), (4, 12, 20, 18)),
    "fold": (lambda x: F.fold(x, (12, 12), 3, padding=1), (4, 90, 144)),
    "unfold": (lambda x: F.unfold(x, 3, padding=1), (4, 12, 20, 18)),
    "softmax": (lambda x: x.softmax(1), (4, 12, 20, 18)),
    "log_softmax": (lambda x: x.log_softmax(1), (4, 12, 20, 18)),
    "batch_norm": (lambda x: F.batch_norm(x, None, None, training=True), (4, 12, 20, 18)),
    "group_norm": (lambda x: F.group_norm(x, 4), (4, 12, 20, 18)),
    "logsigmoid": (F.logsigmoid, (4, 12, 20, 18)),
    "gelu": (F.gelu, (4, 12, 20, 18)),
    "roll": (lambda x: x.roll((1, 2, 3), (0, 1, 2)), (4, 12, 20, 18)),
    "tril": (torch.tril, (5, 60, 50)),
    "tril of one matrix": (lambda x: torch.tril(x[:, :50]), (60, 70)),
    "logsumexp": (lambda x: x.logsumexp((0, 1)), (40, 30, 20)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", MAPS)
def test_maps(case: str, layout: str) -> None:
    """The gradient's layout is the one of the layer behind."""
    call, shape = MAPS[case]
    check(call, [image(*shape, layout=layout)], (*LAYOUTS, "expanded"))


@pytest.mark.parametrize("case", ["max_pool2d", "avg_pool2d", "bicubic", "softmax", "logsumexp"])
def test_maps_of_16_bits(case: str) -> None:
    call, shape = MAPS[case]
    inputs = [image(*shape, dtype=torch.bfloat16, layout="channels last")]
    check(call, inputs, LAYOUTS)


LOSSES: dict[str, Call] = {
    "mse_loss": F.mse_loss,
    "smooth_l1_loss": F.smooth_l1_loss,
    "huber_loss": F.huber_loss,
    "l1_loss": F.l1_loss,
    "soft_margin_loss": F.soft_margin_loss,
    "binary_cross_entropy": F.binary_cross_entropy,
    "binary_cross_entropy_with_logits": F.binary_cross_entropy_with_logits,
    "kl_div": F.kl_div,
    "poisson_nll_loss": F.poisson_nll_loss,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("case", LOSSES)
def test_losses(case: str, reduction: str, dtype: torch.dtype) -> None:
    target = torch.rand(50, 41).to(dtype)
    check(
        lambda x: LOSSES[case](x, target, reduction=reduction) * 3,
        [image(50, 41, dtype=dtype)],
    )


@pytest.mark.parametrize("case", ["mse_loss", "smooth_l1_loss"])
def test_losses_of_two_dtypes(case: str) -> None:
    target = torch.rand(50, 41)
    check(lambda x: LOSSES[case](x, target), [image(50, 41, dtype=torch.bfloat16)])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_of_images(layout: str, smoothing: float) -> None:
    classes, chances = torch.randint(0, 12, (4, 20, 18)), torch.rand(4, 12, 20, 18)
    for target in (classes, chances):
        check(
            lambda x, target=target: F.cross_entropy(x, target, label_smoothing=smoothing),
            [image(4, 12, 20, 18, layout=layout)],
        )


PLACES = torch.arange(3000).view(60, 50) % 60
INDICES: dict[str, Call] = {
    "gather": lambda x: x.gather(0, PLACES),
    "scatter": lambda x: x.scatter(0, PLACES, x),
    "scatter_add": lambda x: x.scatter_add(0, PLACES, x),
    "scatter_reduce": lambda x: x.scatter_reduce(0, PLACES, x, "mean"),
    "index_add": lambda x: x.index_add(0, PLACES[0], x[:50]),
    "index_reduce": lambda x: x.index_reduce(0, PLACES[0], x[:50], "mean"),
    "kthvalue": lambda x: x.kthvalue(3, 0)[0],
    "median": lambda x: x.median(0)[0],
    "nanmedian": lambda x: x.nanmedian(0)[0],
    "mode": lambda x: x.mode(0)[0],
    "max": lambda x: x.max(0)[0],
    "topk": lambda x: x.topk(3, 0)[0],
    "sort": lambda x: x.sort(0)[0],
    "cumsum": lambda x: x.cumsum(0),
    "max of all": lambda x: x.max(),
    "sum of two dimensions": lambda x: x.view(60, 5, 10).sum((0, 2)),
    "renorm": lambda x: x.renorm(2, 0, 1.0),
    "norm in float32": lambda x: torch.linalg.vector_norm(x, dtype=torch.float32),
}


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", INDICES)
def test_places(case: str, dtype: torch.dtype, layout: str) -> None:
    if layout == "transposed" and "two" in case:
        pytest.skip("a view of what is contiguous")
    inputs = [image(60, 50, dtype=dtype, layout=layout)]
    check(INDICES[case], inputs, ("contiguous", "expanded"))


FLAGS = torch.arange(6000).view(100, 60) % 3 > 0
WEIGHTS = torch.arange(60.0)
NEAR: dict[str, tuple[Call, tuple[int, ...]]] = {
    "median": (lambda x: x.median(0)[0], (100, 60)),
    "median of a row": (lambda x: x.median(1)[0], (100, 60)),
    "median of all": (torch.median, (100, 60)),
    "masked_scatter": (lambda x: x.masked_scatter(FLAGS, x), (100, 60)),
    "histc": (lambda x: x * x.detach().float().histc(7000).sum(), (100, 60)),
    "group_norm": (lambda x: F.group_norm(x, 5), (100, 60)),
    "weighted logits": (
        lambda x: F.binary_cross_entropy_with_logits(
            x, FLAGS.to(x.dtype), pos_weight=WEIGHTS.to(x.dtype)
        ),
        (100, 60),
    ),
    "logits of two dtypes": (
        lambda x: F.binary_cross_entropy_with_logits(x, FLAGS.bfloat16()),
        (100, 60),
    ),
    "euclidean cdist": (lambda x: torch.cdist(x.float(), x[:60].float()), (100, 60)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", NEAR)
def test_bounds_are_near(case: str, dtype: torch.dtype) -> None:
    """By one thread, whose buffers alone these kernels have."""
    call, shape = NEAR[case]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = compared(call, [image(*shape, dtype=dtype)], ("contiguous",))
    finally:
        torch.set_num_threads(threads)
    for each in found:
        assert each.real <= each.known + each.margin + ROUNDING, each
        assert each.known <= each.real + ROUNDING, each
        assert each.known + each.margin <= 1.2 * each.real + ROUNDING, each


OF_VALUES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "masked_select": (torch.ops.aten.masked_select.default, (FLAGS,)),
    "unique": (torch.ops.aten._unique2.default, (True, True, True)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", OF_VALUES)
def test_shapes_that_depend_on_values(case: str, dtype: torch.dtype) -> None:
    """No prediction has them. A step that is measured asks for the scratch."""
    func, others = OF_VALUES[case]
    args = (torch.arange(6000).view(100, 60).to(dtype), *others)
    with LiveBytes() as live:
        results = tensors_in(func(*args))
    scratch = scratch_of(func, args, tensors_in(args), results)
    most = sum(storages(results).values()) + scratch.known + scratch.margin
    assert live.most_with_scratch <= most + ROUNDING


MATRICES: dict[str, Call] = {
    "eigh": lambda x: torch.linalg.eigh(x)[1],
    "eigvalsh": torch.linalg.eigvalsh,
    "svd": lambda x: torch.linalg.svd(x)[0],
    "qr": lambda x: torch.linalg.qr(x)[0],
    "triangle of qr": lambda x: torch.linalg.qr(x, "r")[1].detach() @ x,
    "inv": torch.linalg.inv,
    "pinv": torch.linalg.pinv,
    "det": torch.linalg.det,
    "solve": lambda x: torch.linalg.solve(x, x),
    "cholesky_solve": lambda x: torch.cholesky_solve(x, torch.linalg.cholesky(x)),
    "householder_product": lambda x: (
        torch.linalg.householder_product(x, x[..., 0].detach().contiguous()).detach() @ x
    ),
    "lu": lambda x: torch.linalg.lu(x)[1],
    "cdist": lambda x: torch.cdist(x, x, 1.0),
    "euclidean cdist": torch.cdist,
}


@pytest.mark.parametrize("size", [40, 100])
@pytest.mark.parametrize("shape", [(), (3,)])
@pytest.mark.parametrize("case", MATRICES)
def test_matrices(case: str, shape: tuple[int, ...], size: int) -> None:
    """LAPACK's libraries take more or less; what is copied for them is known."""
    root = torch.randn(*shape, size, size, dtype=torch.float64)
    matrix = (root @ root.mT / size + torch.eye(size)).requires_grad_()
    call = MATRICES[case]
    check(call if case != "euclidean cdist" else lambda x: torch.cdist(x, x), [matrix], library=0.3)


def test_products() -> None:
    """Of matrices in strides that BLAS does not know, and three tensors at once."""
    one, other, weight = image(60, 20), image(60, 25), image(15, 20, 25)
    check(F.bilinear, [one, other, weight], ("contiguous", "expanded"))
    check(lambda x, y: x[:, ::2] @ y[:10], [one, image(20)])
    check(lambda x: torch.addmm(x.t(), x.t(), x), [image(70, 70)])
    check(lambda x: F.affine_grid(x, [4, 3, 40, 40]), [image(4, 2, 3)])


def test_convolutions_in_groups_of_channels_last() -> None:
    source, weight = (
        image(*shape, dtype=torch.bfloat16, layout="channels last")
        for shape in ((2, 12, 8, 9, 10), (24, 1, 3, 3, 3))
    )
    check(
        lambda x, w: F.conv3d(x, w, stride=2, padding=1, groups=12), [source, weight], LAYOUTS, 0.3
    )


def test_a_fold_keeps_the_memory_of_its_windows() -> None:
    """Windows are added up in a tensor that was made as large as they are."""
    found = compared(lambda x: F.fold(x, (12, 12), 3, padding=1), [image(8, 90, 144)], ())
    assert found[0].known == found[0].real == 9 * 8 * 10 * 144 * 4


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batch_norm_of_rows_of_features(dtype: torch.dtype, layout: str) -> None:
    """In float32 no more than sums for each channel is a bound."""
    rows, channels = 300, 60

    def call(x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, training=True)

    inputs = [image(rows, channels, dtype=dtype, layout=layout)]
    check(call, inputs, LAYOUTS)
    if dtype is torch.float32:
        found = compared(call, inputs, LAYOUTS)
        assert max(each.margin for each in found) <= 32 * channels
