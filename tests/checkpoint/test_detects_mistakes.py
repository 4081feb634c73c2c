"""Proves: what would give wrong gradients raises an error that names the region instead: arguments
written in place (saved, offloaded, nested, under hooks), saved tensors written in place, a
recompute that saves other tensors than forward; and bad calls raise errors that name the rule.
"""

from __future__ import annotations

import functools
import re

import pytest
import torch
from torch import Tensor, nn

from memopt._checkpoint import checkpoint, checkpoint_wrapper, is_recomputing, unwrap
from tests.checkpoint.support import taken_for_an_accelerator


@pytest.fixture
def x(device: torch.device) -> Tensor:
    return torch.randn(4, 4, device=device, requires_grad=True)


# Where the tensor that is going to be written stands among the arguments that follow the first.
PLACES = {
    "positional argument 1": lambda t: ((t,), {}),
    "positional argument 2": lambda t: (([None], {"a": (3, t)}), {}),
    "argument 'mask'": lambda t: ((), {"scale": [torch.ones(1)], "mask": [t]}),
}


def product(x: Tensor, *args: object, **kwargs: object) -> Tensor:
    for leaf in torch.utils._pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor):
            x = x * leaf.to(x.device)
    return x.exp()


class Product(nn.Module):
    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        return product(x, *args, **kwargs)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("offloading", [False, True])
def test_argument_written_in_place_after_forward(x: Tensor, place: str, offloading: bool) -> None:
    module = checkpoint_wrapper(Product(), offload_to_cpu=offloading)
    written = torch.ones(4, 4, device=x.device)
    args, kwargs = PLACES[place](written)
    with taken_for_an_accelerator(x.device):
        y = module(x, *args, **kwargs)
    written.add_(1)
    with pytest.raises(RuntimeError) as error:
        y.sum().backward()
    assert re.search(
        f"^checkpoint: {place} of region tests.checkpoint.test_detects_mistakes.Product must not "
        "be written in place .* version 1; .* version 0$",
        str(error.value),
    )


def test_argument_written_through_an_alias(x: Tensor) -> None:
    base = torch.ones(8, 4, device=x.device)
    y = checkpoint(product, x, base[:4])
    base[0, 0] = 3
    with pytest.raises(RuntimeError, match="positional argument 1 of region"):
        y.sum().backward()


def test_argument_written_by_the_function_itself(x: Tensor) -> None:
    def function(x: Tensor, buffer: Tensor) -> Tensor:
        buffer += 1
        return (x * buffer).exp()

    y = checkpoint(function, x, torch.ones(4, 4, device=x.device))
    with pytest.raises(RuntimeError, match=r"positional argument 1 of region .*function"):
        y.sum().backward()


def test_argument_written_under_saved_tensor_hooks(x: Tensor) -> None:
    """Hooks switch autograd's own check off."""
    written = torch.ones(4, 4, device=x.device)
    with torch.autograd.graph.save_on_cpu():
        y = checkpoint(product, x, written)
    written.add_(1)
    with pytest.raises(RuntimeError, match="positional argument 1 of region"):
        y.sum().backward()


def test_argument_of_a_nested_region_written_by_the_outer_one(x: Tensor) -> None:
    def outer(x: Tensor) -> Tensor:
        hidden = x.sin()
        y = checkpoint(torch.exp, hidden)
        hidden.add_(1)
        return y

    y = checkpoint(outer, x)
    with pytest.raises(RuntimeError, match="positional argument 0 of region"):
        y.sum().backward()


def test_argument_written_after_backward_is_fine(x: Tensor) -> None:
    written = torch.ones(4, 4, device=x.device)
    checkpoint(product, x, written).sum().backward()
    written.add_(1)
    checkpoint(product, x, written).sum().backward()
    expected = torch.exp(x.detach()) + 2 * torch.exp(2 * x.detach())
    assert torch.allclose(x.grad, expected)


def test_saved_tensor_written_in_place_by_the_function(x: Tensor) -> None:
    """The plain run raises as well; the recompute must not use the written tensor silently."""

    def function(x: Tensor) -> Tensor:
        y = x.exp()
        y.add_(1)
        return y.sin()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        function(x).sum().backward()
    with pytest.raises(
        RuntimeError, match=r"tensor 0 saved in region .*function must not be written in place"
    ):
        checkpoint(function, x).sum().backward()


def test_result_written_in_place_by_the_caller_is_fine(x: Tensor) -> None:
    """The plain run must refuse, since exp saved its result; here that is made again."""
    y = checkpoint(torch.exp, x * 1)
    y.mul_(2)
    y.sum().backward()
    assert torch.equal(x.grad, 2 * x.detach().exp())


class Differs(nn.Module):
    """Saves other tensors in the recompute than in forward."""

    def __init__(self, difference: str) -> None:
        super().__init__()
        self.difference = difference

    def forward(self, x: Tensor) -> Tensor:
        if not is_recomputing():
            return x.exp().sin()
        return {
            "fewer": lambda: x.exp(),
            "none": lambda: x * 1,
            "more": lambda: x[:1].exp().sin() + x.exp().sin(),
            "shape": lambda: x[:2].exp().sin(),
            "dtype": lambda: x.double().exp().sin(),
            "device": lambda: torch.empty(4, 4, device="meta", requires_grad=True).exp().sin(),
        }[self.difference]()


REGION = "recompute of region tests.checkpoint.test_detects_mistakes.Differs must save"
DIFFERENCES = {
    "fewer": f"{REGION} the 2 tensors that its forward saved, got 1",
    "none": f"{REGION} the 2 tensors that its forward saved, got 0",
    "more": rf"{REGION} as tensor 0 .*float32\[4, 4\] on .*, got float32\[1, 4\] on",
    "shape": rf"{REGION} as tensor 0 .*float32\[4, 4\] on .*, got float32\[2, 4\] on",
    "dtype": rf"{REGION} as tensor 0 .*float32\[4, 4\] on .*, got float64\[4, 4\] on",
    "device": rf"{REGION} as tensor 0 .*float32\[4, 4\] on .*, got float32\[4, 4\] on meta",
}


@pytest.mark.parametrize("difference", DIFFERENCES)
@pytest.mark.parametrize("wrapped", [False, True])
def test_recompute_that_differs(x: Tensor, difference: str, wrapped: bool) -> None:
    module = Differs(difference)
    y = checkpoint_wrapper(module)(x) if wrapped else checkpoint(module, x)
    with pytest.raises(RuntimeError, match=DIFFERENCES[difference]):
        y.sum().backward()


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("torch.nn.modules.activation.Tanh", nn.Tanh()),
        ("torch.nn.modules.activation.Tanh.forward", nn.Tanh().forward),
        ("tests.checkpoint.test_detects_mistakes.product", product),
        ("tests.checkpoint.test_detects_mistakes.product", functools.partial(product)),
    ],
)
def test_regions_are_named_by_what_they_call(name: str, function, x: Tensor) -> None:
    written = x * 1
    y = checkpoint(function, written)
    with torch.no_grad():
        written.add_(1)
    with pytest.raises(RuntimeError, match=f"of region {re.escape(name)} must not"):
        y.sum().backward()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Differs("fewer") for _ in range(5))


NAME = r"Model\.layers\.3 \(tests\.checkpoint\.test_detects_mistakes\.Differs\)"


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda layer, x: checkpoint_wrapper(layer)(x), NAME),
        (lambda layer, x: checkpoint(layer, x), NAME),
        (lambda layer, x: checkpoint(functools.partial(layer), x), NAME),
        (lambda layer, x: checkpoint(layer.forward, x), rf"{NAME}\.forward"),
        (lambda layer, x: checkpoint(layer, x, debug=True), NAME),
    ],
    ids=["wrapped", "module", "partial", "method", "debug"],
)
def test_modules_are_named_by_their_path_in_the_model(call, name: str, x: Tensor) -> None:
    """Of many layers of one class the message says which."""
    model = Model()
    y = call(model.layers[3], x)
    with pytest.raises(RuntimeError, match=f"^checkpoint: recompute of region {name} must save"):
        y.sum().backward()


@pytest.mark.parametrize("not_callable", [3, None, torch.ones(1), "exp"])
def test_checkpoint_refuses_what_is_not_callable(not_callable: object) -> None:
    name = type(not_callable).__name__
    with pytest.raises(TypeError, match=f"^checkpoint: fn must be callable, got {name}$"):
        checkpoint(not_callable, torch.ones(1))


@pytest.mark.parametrize("function", [checkpoint_wrapper, unwrap])
@pytest.mark.parametrize("no_module", [3, None, torch.relu, nn.Linear])
def test_wrapper_refuses_what_is_no_module(function, no_module: object) -> None:
    with pytest.raises(
        TypeError,
        match=f"^{function.__name__}: module must be an nn.Module, got {type(no_module).__name__}$",
    ):
        function(no_module)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_wrapper_refuses_script_modules() -> None:
    scripted = torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))
    with pytest.raises(TypeError, match=r"^checkpoint_wrapper: module must not be a ScriptModule"):
        checkpoint_wrapper(scripted)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("inside", [False, True])
def test_wrapped_modules_refuse_to_be_scripted(inside: bool) -> None:
    """What TorchScript compiles would be the plain forward, without anyone noticing."""
    module = checkpoint_wrapper(nn.Sequential(nn.Linear(2, 2)))
    model = nn.Sequential(nn.Tanh(), module) if inside else module
    with pytest.raises(
        TypeError, match=r"^checkpoint_wrapper: a wrapped module must not be scripted .*Sequential"
    ):
        torch.jit.script(model)
    assert module(torch.ones(1, 2)).requires_grad  # as it was
    scripted = torch.jit.script(unwrap(model))
    assert torch.equal(scripted(torch.ones(1, 2)), model(torch.ones(1, 2)))
