"""Proves: memopt.saved_bytes counts what the graph holds when forward ends, as a walk over the
graph does and the life of every storage tells: whole storages, once, without parameters. And it
changes nothing, whatever the function does.
"""

from __future__ import annotations

import copy
import gc
import json
import pickle
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memopt
from memopt._extension import _C
from memopt.demo.memory import profile_memory
from memopt.memory.saved import SavedBytes, SavedTensors
from memopt.memory.storages import storages

FLOAT = 4


class Tied(nn.Module):
    """Views, a storage saved by several nodes, and a result that is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.linear(x).chunk(3, dim=-1)
        return (q * k + v * q).exp() * v


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linears": lambda: nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)),
    "batch norm and dropout": lambda: nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 8)
    ),
    "views": Tied,
    "transformer layer": lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
    "in place": lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 8)),
}
ALL = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)


def walked_bytes(output: Tensor, exclude: list[Tensor]) -> int:
    """Bytes of the storages that the nodes of PyTorch's own operators show that they saved."""
    seen, nodes, found = set(), [output.grad_fn], {}
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [following for following, _ in node.next_functions]
        for name in dir(node):
            value = getattr(node, name) if name.startswith("_saved_") else None
            for tensor in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(tensor, Tensor):
                    found |= storages([tensor])
    return sum(nbytes for key, nbytes in found.items() if key not in storages(exclude))


@ALL
def test_equals_a_walk_over_the_graph(make) -> None:
    model, x = make(), torch.randn(4, 8, requires_grad=True)
    saved = memopt.saved_bytes(model, x)
    constant = [*model.parameters(), *model.buffers()]
    assert saved == walked_bytes(model(x), constant) > 0


def no_change(model: nn.Module) -> None:
    pass


def in_regions(model: nn.Module) -> None:
    memopt.checkpoint_wrapper(model)


@ALL
@pytest.mark.parametrize("change", [no_change, memopt.convert, in_regions])
def test_equals_the_storages_that_live_on(make, change) -> None:
    """The demo's profile follows each storage from the operator that made it until it is freed."""
    model, x = make(), torch.randn(4, 8)
    change(model)
    saved = memopt.saved_bytes(lambda x: model(x).sum(), x)
    profile = profile_memory(lambda: model(x).sum(), torch.device("cpu"))
    assert profile.saved == sum(s.nbytes for s in saved.storages if not s.is_input)
    assert profile.saved == 0 or change is not in_regions


def test_storages_count_whole_and_once() -> None:
    x = torch.randn(100, requires_grad=True)
    assert memopt.saved_bytes(lambda: x * x) == 100 * FLOAT
    assert memopt.saved_bytes(lambda: x[:10].sin() + x[10:20].sin()) == 100 * FLOAT
    assert memopt.saved_bytes(lambda: x.exp()) == 100 * FLOAT
    assert memopt.saved_bytes(lambda: x + 1) == 0
    assert memopt.saved_bytes(lambda: None) == 0


def test_what_the_number_consists_of() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU())
    saved = memopt.saved_bytes(model, input=torch.randn(4, 8, dtype=torch.float32))
    assert isinstance(saved, int)
    assert isinstance(saved, SavedBytes)
    assert [(s.shape, s.nbytes, s.is_input) for s in saved.storages] == [
        ((4, 8), 4 * 8 * FLOAT, True),
        ((4, 16), 4 * 16 * FLOAT, False),
    ]
    assert {(s.dtype, s.device.type) for s in saved.storages} == {(torch.float32, "cpu")}
    assert saved == sum(s.nbytes for s in saved.storages)
    for twin in (copy.deepcopy(saved), pickle.loads(pickle.dumps(saved))):
        assert (twin, twin.storages) == (saved, saved.storages)
    assert json.dumps({"bytes": saved}) == f'{{"bytes": {int(saved)}}}'


def test_what_was_dropped_before_the_end_is_not_held() -> None:
    x, y = torch.randn(100, requires_grad=True), torch.randn(30, requires_grad=True)

    def fn() -> Tensor:
        x.exp()
        return y.exp()

    assert memopt.saved_bytes(fn) == 30 * FLOAT
    with SavedTensors() as all_of_them:
        fn()
    assert all_of_them.bytes == 130 * FLOAT


def test_parameters_and_buffers_are_not_counted() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16).eval())
    x = torch.randn(4, 8, requires_grad=True)
    expected = 4 * 8 * FLOAT + 4 * 16 * FLOAT
    assert memopt.saved_bytes(model, x) == expected
    assert memopt.saved_bytes(model.forward, x) == expected
    assert memopt.saved_bytes(lambda: model(x)) == expected
    weight = nn.Parameter(torch.randn(16, 8))
    assert memopt.saved_bytes(lambda: F.linear(x, weight)) == x.nbytes
    assert memopt.saved_bytes(lambda: weight[:3] * x[:3]) == x.nbytes


def test_recipes_inside_count_and_recipes_around_do_not() -> None:
    norm, x = nn.LayerNorm(8), torch.randn(4, 8)
    linear = nn.Linear(8, 8)
    statistics = 2 * 4 * FLOAT

    def fn() -> Tensor:
        return linear(memopt.functional.layer_norm(x, (8,), norm.weight, norm.bias))

    assert memopt.saved_bytes(fn) == 2 * x.nbytes + statistics
    with memopt.recipes():
        assert memopt.saved_bytes(fn) == 2 * x.nbytes + statistics
    converted = nn.Sequential(norm, linear)
    memopt.convert(converted)
    assert memopt.saved_bytes(converted, x) == x.nbytes + statistics


@pytest.mark.parametrize("offload", [False, True])
def test_a_region_s_arguments_count_unless_they_are_offloaded(offload: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8))
    memopt.checkpoint_wrapper(model, offload_to_cpu=offload)
    x, scale = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8)
    _C.pretend_accelerator("cpu")
    try:
        saved = memopt.saved_bytes(lambda: model(x * scale))
    finally:
        _C.pretend_accelerator(None)
    # Of the product, the factor that x's gradient needs.
    assert saved == scale.nbytes + (0 if offload else x.nbytes)


class Hostile(nn.Module):
    """Does in forward everything that a measurement must not leave behind."""

    def __init__(self, fail: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.linear = nn.Linear(8, 8)
        self.fail = fail
        self.register_buffer("steps", torch.zeros(3))
        self.register_buffer("replaced", torch.zeros(3))
        self.register_buffer("graph", torch.eye(8).to_sparse())
        self.register_buffer("rows", torch.eye(8).to_sparse_csr())
        self.register_buffer("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(self.norm(F.dropout(x, 0.5)))
        self.steps.add_(1)
        self.steps.data[0] = float("nan")
        self.replaced = torch.ones(3)
        self.register_buffer("added", torch.ones(3))
        with torch.no_grad():
            self.graph.mul_(2)
        y = torch.sparse.mm(self.graph, y[:8].mT).mT + (self.rows @ y[:8].mT).mT
        y.sum().backward(retain_graph=True)
        self.eval()
        if self.fail:
            raise KeyError("in the middle")
        return y


@pytest.mark.parametrize("fail", [False, True])
def test_the_model_is_left_as_it_was(fail: bool) -> None:
    model = Hostile(fail)
    model.linear.weight.grad = torch.ones(8, 8)
    gradient = model.linear.weight.grad
    buffers = dict(model.named_buffers())
    values = {name: b.to_dense().clone() for name, b in buffers.items()}
    versions = {name: b._version for name, b in buffers.items()}
    generator = torch.get_rng_state()
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    if fail:
        with pytest.raises(KeyError, match="in the middle"):
            memopt.saved_bytes(model, x)
    else:
        assert memopt.saved_bytes(model, x) > 0
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(module.training for module in model.modules())
    assert model.linear.weight.grad is gradient
    assert torch.equal(gradient, torch.ones(8, 8))
    assert model.linear.bias.grad is None
    assert list(dict(model.named_buffers())) == list(buffers)
    for name, buffer in model.named_buffers():
        assert buffer is buffers[name]
        assert buffer._version == versions[name], name
        assert torch.equal(buffer.to_dense(), values[name]), name
    assert model.nothing is None
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("measure", [memopt.saved_bytes, memopt.convert])
def test_a_graph_that_was_there_before_still_has_its_backward(measure) -> None:
    """Batch norm's node saves the running statistics, which the second forward writes."""
    model, x = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8)), torch.randn(4, 8)
    output = model(x)
    measure(model, x)
    output.sum().backward()
    assert model[1].weight.grad is not None


def test_sparse_buffers_are_no_hindrance_to_convert() -> None:
    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("graph", torch.eye(8).to_sparse())
            self.norm = nn.LayerNorm(8)

        def forward(self, x: Tensor) -> Tensor:
            return torch.sparse.mm(self.graph, self.norm(x))

    report = memopt.convert(Graph(), torch.randn(8, 8))
    assert report.bytes_after == 8 * 8 * FLOAT + 2 * 8 * FLOAT


class Remembers(nn.Module):
    """Keeps in attributes what goes with its buffer, as rotary embeddings that grow do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("positions", torch.arange(2))
        self.longest = 2
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > self.longest:
            self.longest = x.shape[0]
            self.positions = torch.arange(self.longest)
        self.last = self.linear(x) + self.positions[: x.shape[0], None]
        return self.last


@pytest.mark.parametrize("measure", [memopt.saved_bytes, memopt.convert])
def test_attributes_are_left_as_they_were(measure) -> None:
    model = nn.Sequential(memopt.checkpoint_wrapper(Remembers(), maintain_forward_counter=True))
    measure(model, torch.randn(5, 8))
    assert (model[0].longest, model[0].positions.numel()) == (2, 2)
    assert not hasattr(model[0], "last")
    assert model[0]._checkpoint_fwd_counter == 0
    assert model(torch.randn(5, 8)).shape == (5, 8)


@pytest.mark.parametrize("measure", [memopt.saved_bytes, memopt.convert])
def test_the_sample_is_left_as_it_was(measure) -> None:
    class Inplace(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x.relu_()
            (x * y).sum().backward()
            return (x * y).exp()

    x, y = torch.randn(4, 8), torch.ones(4, 8, requires_grad=True)
    before, version = x.clone(), x._version
    output = y * x
    measure(Inplace(), (x, y)) if measure is memopt.convert else measure(Inplace(), x, y)
    assert torch.equal(x, before)
    assert x._version == version
    assert y.grad is None
    output.sum().backward()


def test_where_nothing_is_saved_the_report_says_why() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(8)

        @torch.inference_mode()
        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x)

    report = memopt.convert(Frozen(), torch.randn(2, 8))
    assert (report.bytes_before, report.bytes_after) == (0, 0)
    (note,) = (note for note in report.notes if "nothing was saved" in note)
    assert "torch.inference_mode" in note


def test_the_report_says_what_of_its_bytes_is_the_sample() -> None:
    x = torch.randn(4, 8)
    report = memopt.convert(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), x)
    (note,) = (note for note in report.notes if "sample's own" in note)
    assert note.endswith(f"holds anyway: {x.nbytes} B of those before, {x.nbytes} B of those after")
    report = memopt.convert(nn.Sequential(nn.Tanh(), nn.Linear(8, 8)), x)
    assert not [note for note in report.notes if "sample's own" in note]


def test_nothing_is_kept_alive() -> None:
    freed: list[int] = []

    def fn() -> Tensor:
        y = x.exp()
        weakref.finalize(y.untyped_storage(), freed.append, 1)
        return y * y

    x = torch.randn(8, requires_grad=True)
    gc.disable()
    try:
        saved = memopt.saved_bytes(fn)
        assert freed == [1]
    finally:
        gc.enable()
    assert saved == 8 * FLOAT
    assert x.grad is None


def test_gradients_inside_work() -> None:
    x = torch.randn(8, requires_grad=True)

    def penalty() -> Tensor:
        (gradient,) = torch.autograd.grad(x.exp().sum(), x, create_graph=True)
        return gradient.square().sum()

    # exp's output, which is the gradient as well, and the ones that it was multiplied with.
    assert memopt.saved_bytes(penalty) >= 8 * FLOAT
    assert penalty().requires_grad


@pytest.mark.parametrize("mode", [torch.no_grad, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_modes_around(mode) -> None:
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    with mode():
        assert memopt.saved_bytes(model, x) > 0


def test_inference_mode_is_named() -> None:
    model, x = nn.Sequential(nn.LayerNorm(8)), torch.randn(4, 8)
    with torch.inference_mode():
        for name, call in (("saved_bytes", memopt.saved_bytes), ("convert", memopt.convert)):
            with pytest.raises(
                RuntimeError, match=rf"^{name}: .* outside torch.inference_mode\(\).*, got "
            ):
                call(model, x)
    assert type(model[0]) is nn.LayerNorm


@pytest.mark.parametrize("fn", [None, 3, torch.ones(2)])
def test_what_cannot_be_called(fn: object) -> None:
    with pytest.raises(TypeError, match=rf"^saved_bytes: fn must be .*, got {type(fn).__name__}$"):
        memopt.saved_bytes(fn)


def test_keyword_arguments_have_any_name() -> None:
    def fn(fn: Tensor, exclude: Tensor) -> Tensor:
        return fn * exclude

    x, y = torch.randn(8, requires_grad=True), torch.randn(8, requires_grad=True)
    assert memopt.saved_bytes(fn, fn=x, exclude=y) == 2 * x.nbytes
