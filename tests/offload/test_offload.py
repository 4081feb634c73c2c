"""Proves: memopt.offload to a file gives the losses and gradients of the plain run in every bit, in
every way that a graph is used; what goes is what the options say, to the byte; and everything comes
back, whatever becomes of the graph. (The engine's schedule and its races: tests/offload/cpp.)
"""

from __future__ import annotations

import gc
import resource
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memopt
from memopt._offload.stats import PlaceStats
from tests.checkpoint.support import collector_disabled
from tests.support.bits import assert_same_bits

WIDTH, ROWS, LAYERS = 64, 96, 5
SAVED = ROWS * WIDTH * 4  # bytes of one layer's output


def stack(seed: int = 0) -> nn.Sequential:
    """A linear saves its input, which is the output that tanh saves: one storage a layer."""
    torch.manual_seed(seed)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
    return nn.Sequential(*layers)


def inputs(seed: int = 1) -> Tensor:
    torch.manual_seed(seed)
    return torch.randn(ROWS, WIDTH)


def place() -> PlaceStats:
    """What the one place that was used has counted."""
    (used,) = [p for p in memopt.offload.stats(wait=True).places if p.out.copies or p.bytes_held]
    return used


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


def test_bits_are_those_of_the_plain_run_and_copies_are_counted(directory: Path) -> None:
    model, x = stack(), inputs()
    plain = model(x).square().sum()
    with memopt.offload("disk", directory=directory, keep_last=0, min_bytes=SAVED):
        loss = model(x).square().sum()
    assert torch.equal(loss, plain)
    # The input and each layer's output.
    assert place().out.copies == LAYERS + 1
    assert place().bytes_away == place().out.bytes == (LAYERS + 1) * SAVED
    assert place().room_in_use == (LAYERS + 1) * SAVED
    assert_same_bits(gradients(model, loss), gradients(model, plain))
    del loss, plain
    now = place()
    # x, which this test holds, is given back as it is.
    assert (now.bytes_away, now.room_in_use, now.found_elsewhere_bytes) == (0, 0, SAVED)
    assert now.prefetch_hits + now.prefetch_misses + now.never_left == LAYERS


@pytest.mark.parametrize(
    ("options", "layers"),
    [
        ({"keep_last": 2}, LAYERS + 1 - 2),
        ({"keep_last": LAYERS + 1}, 0),
        ({"fraction": 0.5}, (LAYERS + 1) // 2),
        ({"fraction": 0}, 0),
        ({"max_bytes": 3 * SAVED}, 3),
        ({"min_bytes": SAVED + 1}, 0),
    ],
    ids=str,
)
def test_options_say_how_much_goes(directory: Path, options: dict[str, Any], layers: int) -> None:
    model, x = stack(), inputs()
    expected = gradients(model, model(x).square().sum())
    with memopt.offload("disk", directory=directory, **{"keep_last": 0, "min_bytes": 1} | options):
        loss = model(x).square().sum()
    stats = memopt.offload.stats(wait=True)
    assert stats.bytes_out == layers * SAVED
    assert_same_bits(gradients(model, loss), expected)


def test_what_the_memory_s_owner_would_keep_stays(directory: Path) -> None:
    """Parameters, leaves that want a gradient, their views; buffers from the second step on."""
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
    frozen = nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False)
    leaf = torch.randn(ROWS, WIDTH, requires_grad=True)
    buffer = torch.randn(ROWS, WIDTH)
    for copies in (1, 0):
        memopt.offload.stats(reset=True)
        with memopt.offload("disk", directory=directory, keep_last=0, min_bytes=1):
            loss = ((leaf @ weight) @ frozen.t()).sum() + (weight[:ROWS] @ weight.t()).sum()
            loss = loss + (leaf * buffer).sum()
        # The product and the buffer; the product again.
        assert memopt.offload.stats(wait=True).bytes_out == (copies) * buffer.nbytes
        loss.backward()


def uses() -> dict[str, Callable[[nn.Module, Callable[[], Tensor]], list[Tensor]]]:
    def retain(model: nn.Module, forward: Callable[[], Tensor]) -> list[Tensor]:
        loss = forward()
        parameters = list(model.parameters())
        first = torch.autograd.grad(loss, parameters, retain_graph=True)
        return [*first, *torch.autograd.grad(loss, parameters)]

    def partial(model: nn.Module, forward: Callable[[], Tensor]) -> list[Tensor]:
        loss = forward()
        first, *_, last = model.parameters()
        found = torch.autograd.grad(loss, [last], retain_graph=True)
        return [*found, *torch.autograd.grad(loss, [first])]

    def second(model: nn.Module, forward: Callable[[], Tensor]) -> list[Tensor]:
        parameters = list(model.parameters())
        slopes = torch.autograd.grad(forward(), parameters, create_graph=True)
        total = torch.stack([slope.square().sum() for slope in slopes]).sum()
        return list(torch.autograd.grad(total, parameters))

    def accumulate(model: nn.Module, forward: Callable[[], Tensor]) -> list[Tensor]:
        losses = [forward(), forward()]
        for loss in losses:  # not in the reverse order
            loss.backward()
        (forward() * 2).backward()
        found = [p.grad for p in model.parameters()]
        model.zero_grad()
        return [grad for grad in found if grad is not None]

    def abandon(model: nn.Module, forward: Callable[[], Tensor]) -> list[Tensor]:
        forward()  # no backward
        loss = forward()
        handle = next(iter(model.parameters())).register_hook(_fail)
        with pytest.raises(ValueError, match="planted"):
            loss.backward(retain_graph=True)
        handle.remove()
        model.zero_grad()
        return gradients(model, loss)

    def threads(model: nn.Module, forward: Callable[[], Tensor]) -> list[Tensor]:
        found: list[list[Tensor]] = [[] for _ in range(4)]

        def work(number: int) -> None:
            found[number] = gradients(model, forward())

        workers = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return [grad for grads in found for grad in grads]

    return {f.__name__: f for f in (retain, partial, second, accumulate, abandon, threads)}


def _fail(grad: Tensor) -> Tensor:
    raise ValueError("planted")


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("how", uses())
def test_every_use_of_a_graph(directory: Path, how: str, autocast: bool) -> None:
    model, x = stack(), inputs()

    def plain() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return model(x * 1).float().square().sum()

    def offloaded() -> Tensor:
        with memopt.offload("disk", directory=directory, keep_last=1, min_bytes=1):
            return plain()

    use = uses()[how]
    expected = use(model, plain)
    with collector_disabled():
        assert_same_bits(use(model, offloaded), expected)
        assert place().out.copies > 0
        # Everything is back, by reference counting alone.
        assert (place().bytes_away, place().bytes_held, place().room_in_use) == (0, 0, 0)


def test_several_models_at_once(directory: Path) -> None:
    models = [stack(seed) for seed in range(3)]
    x = inputs()
    expected = [gradients(model, model(x).square().sum()) for model in models]
    losses = []
    for _ in range(2):
        for model in models:
            with memopt.offload("disk", directory=directory, min_bytes=1):
                losses.append(model(x).square().sum())
    for number in (4, 0, 2, 5, 1, 3):
        assert_same_bits(gradients(models[number % 3], losses[number]), expected[number % 3])


def test_regions_and_recipes_inside(directory: Path) -> None:
    """Only what nothing else makes again travels: not what a region drops, not a GELU's output."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())
    model = nn.Sequential(block, nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    x = inputs()
    memopt.convert(model)
    expected = gradients(model, model(x * 1).square().sum())
    with memopt.offload("disk", directory=directory, min_bytes=SAVED, keep_last=0):
        loss = model(x * 1).square().sum()
    # x, the inputs of both GELUs, the output. LayerNorm's and GELU's outputs have recipes.
    assert place().out.bytes == 4 * SAVED
    assert_same_bits(gradients(model, loss), expected)

    memopt.offload.stats(reset=True)
    memopt.checkpoint_wrapper(block, offload=directory)
    loss = model(x * 1).square().sum()
    assert place().out.bytes == SAVED  # the region's argument
    assert_same_bits(gradients(model, loss), expected)


@pytest.mark.parametrize("face", ["function", "wrapper"])
def test_arguments_of_regions(directory: Path, face: str) -> None:
    """Nested and keyword ones, a mask that all regions get once."""
    torch.manual_seed(0)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, extra: dict[str, list[Tensor]], *, mask: Tensor) -> Tensor:
            return F.gelu(self.linear(x) + extra["rows"][0]) * mask

    blocks = nn.ModuleList(Block() for _ in range(3))
    x = inputs()

    def run(call: Callable[..., Tensor]) -> Tensor:
        y, mask, rows = x * 1, (x > 0).float(), x * 3
        for block in blocks:
            y = call(block, y, {"rows": [rows]}, mask=mask)
        return y.square().sum()

    expected = gradients(blocks, run(lambda block, *args, **kw: block(*args, **kw)))
    if face == "wrapper":
        for block in blocks:
            memopt.checkpoint_wrapper(block, offload=directory)
        loss = run(lambda block, *args, **kw: block(*args, **kw))
    else:
        loss = run(lambda f, *args, **kw: memopt.checkpoint(f, *args, offload=directory, **kw))
    assert place().out.bytes == 5 * SAVED  # three inputs, the mask, the rows
    assert_same_bits(gradients(blocks, loss), expected)


def test_a_write_after_the_copy_was_queued_raises(directory: Path) -> None:
    weight = torch.ones(ROWS, WIDTH, requires_grad=True)
    for keep_last in (0, 1):  # copied already, or not yet
        x = inputs()
        with memopt.offload("disk", directory=directory, keep_last=keep_last, min_bytes=1):
            loss = (weight * x).sum()
        x.add_(1)
        with pytest.raises(RuntimeError, match="must not be written in place"):
            loss.backward()


def test_peaks_that_lie_elsewhere_are_said(directory: Path) -> None:
    """Resident memory grows after the last tensor has come back: no offload lowers that."""
    model, x = stack(), inputs()
    with memopt.offload("disk", directory=directory, min_bytes=1):
        loss = model(x).square().sum()
    loss.backward()
    del loss
    gc.collect()
    memopt.offload.stats(wait=True)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ballast = []
    while resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + 50_000:
        ballast.append(torch.ones(100_000_000, dtype=torch.uint8))
    advice = "\n".join(memopt.offload.stats().advice)
    assert "is reached while nothing is offloaded" in advice
    del ballast


def test_no_grad_and_compile_do_nothing(directory: Path) -> None:
    model, x = stack(), inputs()
    with torch.no_grad(), memopt.offload("disk", directory=directory, min_bytes=1):
        model(x)
    assert memopt.offload.stats().bytes_out == 0


def test_a_policy_that_is_a_path_offloads_to_this_directory(directory: Path) -> None:
    x = torch.randn(64, 64, requires_grad=True)
    (expected,) = torch.autograd.grad(x.exp().sum(), x)
    with memopt.saved_tensors(directory):
        loss = x.exp().sum()
    (grad,) = torch.autograd.grad(loss, x)
    assert torch.equal(grad, expected)
    (place,) = memopt.offload.stats(wait=True).places
    assert (place.directory, place.out.bytes) == (str(directory), 64 * 64 * 4)
    with pytest.raises(OSError, match="nowhere"), memopt.saved_tensors(Path("/nowhere/at/all")):
        x.exp()
