"""Proves: each thing that a run was found to leave behind, and what is like it, is put back; and a
run can be told of where nothing of it could be reached.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt.memory.predicted.predict import hollow_step
from memopt.memory.step import Step
from memopt.memory.unchanged import Written, unchanged
from tests.memory.modules import WIDTH
from tests.support.fingerprint import Fingerprint

ROOM = 1 << 30
LARGE = 300  # a square of so many is above what is copied at once


class Blocks(nn.Module):
    def __init__(self, around: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in "abc"
        )
        self.around = around

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x if self.around is None else self.around(x)


def square(y: Tensor) -> Tensor:
    return y.square().mean()


def batch() -> Tensor:
    return torch.randn(4, WIDTH)


@pytest.mark.parametrize("measure", [True, False])
def test_gradients_of_weights_that_a_loss_closes_over(measure: bool) -> None:
    """They had memory that nothing was written to: 1e37 and NaN."""
    head, before = nn.Linear(WIDTH, LARGE), torch.ones(LARGE, WIDTH)
    head.weight.grad = before.clone()
    gradient = head.weight.grad

    def loss(y: Tensor) -> Tensor:
        return square(head(y))

    model, x = Blocks(), batch()
    memopt.anatomy(model, x, loss=loss, measure=measure)
    memopt.plan(model, x, ROOM, loss=loss, measure=measure, steps=1)
    memopt.plan(model, x, ROOM, loss=loss, compiled=True)
    memopt.largest_batch(model, x, ROOM, loss=loss, limit=2)
    memopt.longest_sequence(model, torch.randn(2, 3, WIDTH), ROOM, loss=loss, limit=2)
    assert head.weight.grad is gradient
    assert torch.equal(gradient, before)
    assert head.bias.grad is None


class Hidden:
    """Holds weights where no walk over Python's objects comes to."""

    def __init__(self, weight: Tensor) -> None:
        self.pairs = (weight for _ in itertools.repeat(None))

    def __call__(self, y: Tensor) -> Tensor:
        return square(y * next(self.pairs))


def test_gradients_of_weights_that_only_the_graph_reaches() -> None:
    weight = nn.Parameter(torch.ones(WIDTH))
    loss, model, x = Hidden(weight), Blocks(), batch()
    memopt.anatomy(model, x, loss=loss, measure=True)
    memopt.plan(model, x, ROOM, loss=loss, measure=False)
    assert weight.grad is None


def test_frozen_weights_that_only_an_operator_reaches() -> None:
    """They are copied when they are written first, and are written back."""
    frozen = torch.ones(LARGE, LARGE)
    before, version = frozen.clone(), frozen._version
    hidden = (frozen[1:3] for _ in itertools.repeat(None))

    def around(y: Tensor) -> Tensor:
        with torch.no_grad():
            next(hidden).mul_(2)
        return y

    model, x = Blocks(around), batch()
    memopt.saved_bytes(model, x)
    memopt.convert(model, x)
    memopt.revert(model)
    memopt.plan(model, x, ROOM, loss=square, steps=1).apply().undo()
    assert torch.equal(frozen, before)
    assert frozen._version == version


def test_a_graph_from_before_can_be_differentiated() -> None:
    """Of buffers, whose versions batch norm moves, of a batch, and of a weight."""

    class Scales(Blocks):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(LARGE, WIDTH))
            self.norm = nn.BatchNorm1d(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.scale.mul_(0.5)
                x.mul_(0.5)
            return super().forward(self.norm(x)) * self.scale[0]

    model, x = Scales(), batch()
    weight = nn.Parameter(torch.ones(WIDTH))
    earlier = (weight * model.scale * x[0] * model.norm.running_mean.add(1)).sum()
    model.norm.eval()(weight * x).sum().backward()
    model.norm.train()
    (expected,) = torch.autograd.grad(earlier, weight, retain_graph=True)
    memopt.plan(model, x, ROOM, loss=square, steps=1).apply().undo()
    (gradient,) = torch.autograd.grad(earlier, weight)
    assert torch.equal(gradient, expected)


@pytest.mark.parametrize("together", [False, True])
def test_an_optimizer_that_steps_in_backward(together: bool) -> None:
    """Weights, its states and the gradients that it drops are those of before."""
    model, x = Blocks(), batch()
    optimizers = {p: torch.optim.AdamW([p], foreach=together) for p in model.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    square(model(x)).backward()  # so that there are states
    before = Fingerprint(model, x, step)
    memopt.plan(model, x, ROOM, loss=square, optimizer=None, steps=1).apply().undo()
    memopt.anatomy(model, x, loss=square, optimizer=None, measure=True)
    assert Fingerprint(model, x, step).differences(before) == []


def test_the_gradient_of_a_batch() -> None:
    model, x = Blocks(), batch().requires_grad_()
    memopt.plan(model, x, ROOM, loss=square, steps=1).apply().undo()
    memopt.anatomy(model, x, loss=square, measure=True)
    assert x.grad is None


class Queues(Blocks):
    """Writes to tensors that are neither parameters nor buffers, as a queue of keys does."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = torch.zeros(LARGE, LARGE)
        self.deep = {"queues": [Hidden(nn.Linear(1, 1))]}
        self.deep["queues"][0].queue = torch.zeros(LARGE, LARGE)  # type: ignore[attr-defined]
        self.slab = torch.zeros(2, LARGE, LARGE)
        self.view = self.slab[1]

    def forward(self, x: Tensor) -> Tensor:
        self.plain.data += 1
        self.deep["queues"][0].queue.add_(1)  # type: ignore[attr-defined]
        self.view.add_(1)
        return super().forward(x)


def test_large_tensors_in_plain_attributes() -> None:
    """A plan's timed steps run without a mode: predictions tell what they write."""
    model, x = Queues(), batch()
    before = Fingerprint(model)
    plan = memopt.plan(model, x, ROOM, loss=square, steps=1)
    assert Fingerprint(model).differences(before) == []
    plan.apply()
    plan.undo()
    assert Fingerprint(model).differences(before) == []


def test_the_order_of_an_ordered_dict() -> None:
    """That of the dict that it is too is another one, once something was moved."""
    recent = OrderedDict(a=1, b=2)
    recent.move_to_end("a")

    def forgets() -> None:
        recent.move_to_end("b")

    memopt.saved_bytes(forgets)
    assert list(recent) == ["b", "a"]


def test_attributes_that_a_tensor_is_given() -> None:
    x = batch()

    def names(x: Tensor) -> Tensor:
        x.label = "x"  # type: ignore[attr-defined]
        return x

    memopt.saved_bytes(names, x)
    assert not hasattr(x, "label")


def test_an_error_in_the_middle() -> None:
    """Of forward and of backward: all that was changed until then is put back."""
    log: list[Tensor] = []

    def stumbles(y: Tensor) -> Tensor:
        log.append(y)
        random.random()
        model.blocks[0][1].weight.data.mul_(2)
        model.blocks[1].register_forward_hook(print)
        if y.requires_grad:
            y.register_hook(lambda _: model.made.up)
        if in_forward:
            raise OSError("the disk is full")
        return y

    model, x = Blocks(stumbles), batch()
    for in_forward in (True, False):
        before = Fingerprint(model, x, stumbles)
        runs: tuple[Callable[[], object], ...] = (
            lambda: memopt.anatomy(model, x, loss=square, measure=False),
            lambda: memopt.plan(model, x, ROOM, loss=square),
            lambda: memopt.saved_bytes(lambda: square(model(x)).backward()),
        )
        for run in runs:
            with pytest.raises(OSError if in_forward else AttributeError):
                run()
        assert Fingerprint(model, x, stumbles).differences(before) == []


def test_a_prediction_says_what_a_step_writes() -> None:
    """Of copies it names the originals, which are copied where steps are measured with no mode."""

    class Momentum(Blocks):
        def __init__(self) -> None:
            super().__init__()
            self.slow = copy.deepcopy(self.blocks).requires_grad_(False)
            self.codes = nn.Parameter(torch.ones(LARGE, LARGE), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                for slow, fast in zip(
                    self.slow.parameters(), self.blocks.parameters(), strict=True
                ):
                    slow.lerp_(fast, 0.5)
                self.codes[:, 0] += 1
            return super().forward(x)

    model, x = Momentum(), batch()
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    found = hollow_step(Step(model, x, optimizer, square, who="a test"), None, "cpu")
    wanted = {id(model.codes), *map(id, model.slow.parameters())}
    written = {id(tensor) for tensor in found.written.tensors}
    assert wanted <= written
    assert written.isdisjoint(map(id, model.blocks.parameters()))
    before = Fingerprint(model)
    with unchanged(model, written=found.written):
        model(x)
    assert Fingerprint(model).differences(before) == []


def test_what_is_not_written_is_not_copied() -> None:
    """Above 64 KiB: a model of any size is measured without another one beside it."""
    model = nn.Linear(LARGE, LARGE)
    with unchanged(model) as before:
        model(torch.ones(1, LARGE)).sum().backward()
        assert [copy.numel() for _, copy in before._contents._copies.values()] == [4 * LARGE]
        with torch.no_grad():
            model.weight[0] = 0
        assert len(before._contents._copies) == 2
    with unchanged(model, written=Written()) as before:
        assert len(before._contents._copies) == 1


def test_lazy_modules_stay_lazy() -> None:
    model = nn.Sequential(nn.LazyLinear(WIDTH), nn.ReLU())
    before = Fingerprint(model[0].__dict__)
    memopt.saved_bytes(model, torch.ones(2, 3))
    assert Fingerprint(model[0].__dict__).differences(before) == []
    assert type(model[0]) is nn.LazyLinear
    assert model(torch.ones(2, 5)).shape == (2, WIDTH)


def test_a_lazy_module_is_to_be_called_before_its_step_is_predicted() -> None:
    model = nn.Sequential(nn.LazyLinear(WIDTH), nn.ReLU())
    with pytest.raises(ValueError, match=r"its shape, got '0\.weight'.* call the model"):
        memopt.anatomy(model, batch(), loss=square)
    assert type(model[0]) is nn.LazyLinear


def test_an_optimizer_of_nothing() -> None:
    """A frozen model may be asked about, for gradients of its input; PyTorch's AdamW refuses it."""
    model, x = Blocks().requires_grad_(False), batch().requires_grad_()
    frozen = memopt.anatomy(model, x, loss=square)
    assert frozen.peak.total == memopt.anatomy(model, x, loss=square, optimizer=None).peak.total
    with pytest.raises(ValueError, match=r"the loss must be .* requires_grad=False"):
        memopt.anatomy(model, batch(), loss=square)


@pytest.mark.parametrize("call", [memopt.anatomy, memopt.check])
def test_gradients_are_switched_off_around_the_call(call: Any) -> None:
    plain = call(Blocks(), batch(), loss=square)
    with torch.no_grad():
        assert str(call(Blocks(), batch(), loss=square)) == str(plain)
    with (
        torch.inference_mode(),
        pytest.raises(ValueError, match=r"inference_mode\(\) is on, .* call this outside"),
    ):
        call(Blocks(), batch(), loss=square)


def test_a_frozen_model_is_said_to_be_frozen() -> None:
    with pytest.raises(ValueError, match=r"weights are frozen, some must be trained"):
        memopt.anatomy(Blocks().requires_grad_(False), batch(), loss=square)


def test_settings_of_the_thread() -> None:
    def careless() -> None:
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float64)
        torch.set_autocast_enabled("cpu", True)

    memopt.saved_bytes(careless)
    assert torch.is_grad_enabled()
    assert torch.get_default_dtype() is torch.float32
    assert not torch.is_autocast_enabled("cpu")


def test_generators_in_any_container() -> None:
    """PyTorch's own, which a copy of the model cannot have."""
    generator = torch.Generator().manual_seed(3)
    held: dict[str, Any] = {"deep": [(generator,)]}

    def draws() -> Tensor:
        return torch.rand(2, generator=held["deep"][0][0]) + torch.rand(2)

    before = Fingerprint(draws)
    memopt.saved_bytes(draws)
    assert Fingerprint(draws).differences(before) == []


class Scripted(nn.Module):
    """Counts its calls, by attributes that TorchScript holds."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.sizes = 0, torch.jit.Attribute([0], list[int])

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.sizes.append(x.size(0))  # type: ignore[attr-defined]
        return x * 2


def test_attributes_of_a_scripted_module() -> None:
    script: Any = torch.jit.script(Scripted())
    model, x = Blocks(script), batch()
    memopt.saved_bytes(model, x)
    memopt.anatomy(model, x, loss=square, measure=True)
    memopt.plan(model, x, ROOM, loss=square, measure=False)
    assert (script.calls, script.sizes) == (0, [0])
