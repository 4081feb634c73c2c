"""Proves: under torch.compile a region becomes PyTorch's own checkpoint operator without a graph
break, and compiled functions work inside regions that run eagerly, batch norm statistics included.
"""

from __future__ import annotations

import copy
import itertools
import sys
import threading
import warnings
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.convert_frame import input_codes
from torch._dynamo.testing import EagerAndRecordGraphs
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import memopt
from memopt import _function_code
from memopt._checkpoint import checkpoint, checkpoint_wrapper, ops_worth_saving, uncompiled
from tests.checkpoint.support import mlp
from tests.support.bits import assert_same_bits


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


def gradients(fn, tensors: list[Tensor]) -> list[Tensor]:
    return torch.autograd.grad(fn(tensors[0]).square().sum(), tensors)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_regions_compile_without_graph_breaks(
    device: torch.device, backend: str, wrapped: bool
) -> None:
    module = mlp().to(device)
    tensors = [torch.randn(4, 8, device=device, requires_grad=True), *module.parameters()]
    expected = gradients(lambda x: module(x).sin(), tensors)
    if wrapped:
        checkpoint_wrapper(module)
        function = torch.compile(lambda x: module(x).sin(), backend=backend, fullgraph=True)
    else:
        function = torch.compile(
            lambda x: checkpoint(module, x).sin(), backend=backend, fullgraph=True
        )
    for actual, e in zip(gradients(function, tensors), expected, strict=True):
        torch.testing.assert_close(actual, e)


def keep_products():
    return create_selective_checkpoint_contexts(ops_worth_saving())


OPTIONS = {
    "preserve_rng_state": False,
    "early_stop": False,
    "determinism_check": "none",
    "use_reentrant": None,
    "context_fn": keep_products,
    "debug": True,
    "offload": "cpu",
    "partition": None,
}


@pytest.mark.parametrize("option", OPTIONS)
def test_the_options_of_checkpoint_compile(option: str) -> None:
    module = mlp()
    tensors = [torch.randn(4, 8, requires_grad=True), *module.parameters()]
    expected = gradients(lambda x: module(x).sin(), tensors)
    options = {option: OPTIONS[option]}
    function = torch.compile(
        lambda x: checkpoint(module, x, **options).sin(), backend="aot_eager", fullgraph=True
    )
    uncompiled._warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        actual = gradients(function, tensors)
        torch._dynamo.reset()
        function(tensors[0])
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other)
    said = [str(w.message) for w in seen if "no effect under torch.compile" in str(w.message)]
    without_effect = option in ("debug", "offload")
    assert said == [f"checkpoint: {option} has no effect under torch.compile"] * without_effect


def test_wrong_options_of_checkpoint_are_named_when_compiled() -> None:
    function = torch.compile(
        lambda x: checkpoint(torch.sin, x, determinism_check="some"), backend="eager"
    )
    with pytest.raises(ValueError, match="checkpoint: determinism_check must be one of"):
        function(torch.ones(2, requires_grad=True))


def test_the_options_of_the_wrapper_compile() -> None:
    module = checkpoint_wrapper(mlp(), offload="cpu", preserve_rng_state=False)
    uncompiled._warn_once.cache_clear()
    with pytest.warns(UserWarning, match="checkpoint_wrapper: offload has no effect"):
        torch.compile(lambda x: module(x), backend="eager", fullgraph=True)(torch.randn(4, 8))


def test_regions_become_the_checkpoint_operator() -> None:
    backend = EagerAndRecordGraphs()
    module = checkpoint_wrapper(mlp())
    torch.compile(lambda x: module(x), backend=backend, fullgraph=True)(torch.randn(4, 8))
    (graph,) = backend.graphs
    assert any("checkpoint" in str(node.target) for node in graph.graph.nodes)


class Net(nn.Module):
    """Not one of PyTorch's own modules, whose frames dynamo passes over."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm = mlp(), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.body(x)).sin()


def compile_by_function(module: nn.Module, backend) -> nn.Module:
    return torch.compile(module, backend=backend)


def compile_by_method(module: nn.Module, backend) -> nn.Module:
    module.compile(backend=backend)
    return module


@pytest.mark.parametrize(
    ("compiled", "wrapped"),
    [(compile_by_function, False), (compile_by_function, True), (compile_by_method, False)],
)
def test_compiled_modules_inside_eager_regions(
    compiled, wrapped: bool, device: torch.device
) -> None:
    backend, plain = EagerAndRecordGraphs(), Net().to(device)
    module = compiled(copy.deepcopy(plain), backend)
    x = torch.randn(4, 8, device=device, requires_grad=True)
    if wrapped:
        checkpoint_wrapper(module)
    actual = gradients(
        module if wrapped else lambda x: checkpoint(module, x), [x, *module.parameters()]
    )
    assert_same_bits(actual, gradients(plain, [x, *plain.parameters()]))
    assert_same_bits(module.buffers(), plain.buffers())
    # The module's own, and neither the region's hooks nor the module once more for the recompute.
    assert len(backend.graphs) == 1


def test_the_hooks_of_a_region_are_not_compiled(device: torch.device) -> None:
    """PyTorch's own modules are passed over when compiled, and frames below them captured."""
    backend = EagerAndRecordGraphs()
    module = compile_by_method(nn.Sequential(mlp(), nn.Tanh()).to(device), backend)
    x = torch.randn(4, 8, device=device)
    module(x).sum().backward()
    checkpoint(module, x).sum().backward()
    files = {Path(code.co_filename) for each in input_codes.seen if (code := each()) is not None}
    package = Path(memopt.__file__).parent
    # A function that asks for a region is the user's forward.
    assert [f for f in files if package in f.parents and f.name != "_function_code.py"] == []


def test_wrapped_module_that_is_compiled_moves_its_statistics_once(device: torch.device) -> None:
    module = compile_by_method(checkpoint_wrapper(Net().to(device)), "aot_eager")
    module(torch.randn(4, 8, device=device)).sum().backward()
    assert module.norm.num_batches_tracked.item() == 1


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_traced_by_jit_as_the_plain_module() -> None:
    module = checkpoint_wrapper(mlp())
    x = torch.randn(4, 8)
    traced = torch.jit.trace(module, x)
    assert torch.equal(traced(x), module(x))


@pytest.mark.parametrize("chunks", [None, 2])
@pytest.mark.parametrize("strict", [False, True])
def test_exported_as_the_plain_module(strict: bool, chunks: int | None) -> None:
    """In strict mode PyTorch's own checkpoint cannot be exported."""
    x, module = torch.randn(4, 8), mlp()
    expected = module(x)
    checkpoint_wrapper(module, chunks=chunks)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* has no effect under torch.compile")
        exported = torch.export.export(module, (x,), strict=strict).module()
    assert torch.equal(exported(x), expected)


@pytest.mark.parametrize("chunks", [None, 2])
def test_traced_by_fx_as_the_plain_module(chunks: int | None) -> None:
    x, module = torch.randn(4, 8), mlp()
    expected = module(x)
    traced = torch.fx.symbolic_trace(nn.Sequential(checkpoint_wrapper(module, chunks=chunks)))
    assert torch.equal(traced(x), expected)


def test_models_that_come_and_go_meanwhile_do_not_disturb_a_compilation() -> None:
    """The classes of others, in another thread or by the garbage collector."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)

    def come_and_go() -> None:
        for number in itertools.count():
            if ended.is_set():
                return
            forwards = {f"{number}, {place}": (lambda: None) for place in range(50)}
            there.update((name, weakref.ref(forward)) for name, forward in forwards.items())
            for name in forwards:
                there.pop(name)

    there = vars(_function_code._functions)
    ended = threading.Event()
    others = threading.Thread(target=come_and_go)
    switching = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    others.start()
    try:
        for _ in range(3):
            torch._dynamo.reset()
            region = checkpoint_wrapper(Block())
            torch.compile(region, backend="eager", fullgraph=True)(torch.ones(2, 4))
    finally:
        ended.set()
        others.join()
        sys.setswitchinterval(switching)
