"""What the tests of convert share: a training step's results, an oracle, appearances."""

from __future__ import annotations

import collections
import copy
import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import memopt
from memopt.memory.saved import SavedTensors
from tests.support.record_ops import RecordOps
from tests.support.tolerances import (
    MODEL_ERROR_RATIO,
    NO_GRADIENT,
    RESULT_ERROR_RATIO,
    root_mean_square,
    roundoff,
)

Results = dict[str, Tensor]


def converted_inside(module: nn.Module, **options: Any) -> Any:
    """What stands for `module` in a model that holds it and is converted."""
    model = nn.Sequential(module)
    memopt.convert(model, **options)
    return model[0]


def kept_bytes(model: nn.Module, x: Tensor) -> int:
    """What a call keeps for backward beside its input and the model's parameters."""
    with SavedTensors(exclude=[x, *model.parameters()]) as saved:
        output = model(x)
    del output
    return saved.bytes


def step(model: nn.Module, inputs: Mapping[str, Tensor]) -> Results:
    """Logits, loss and the gradient of every parameter; the model is left without gradients."""
    model.zero_grad(set_to_none=True)
    dtype = next(model.parameters()).dtype
    output = model(**{k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()})
    output.loss.backward()
    results = {"logits": output.logits.detach(), "loss": output.loss.detach()}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            results[f"gradient of {name}"] = parameter.grad
    model.zero_grad(set_to_none=True)
    return results


def exact_step(model: nn.Module, inputs: Mapping[str, Tensor]) -> Results:
    """`step` in float64 throughout, also where the model's code asks for float32."""
    with NoNarrowing():
        return step(copy.deepcopy(model).double(), inputs)


class NoNarrowing(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            if func in (Tensor.to, Tensor.type):
                args = tuple(torch.float64 if a is torch.float32 else a for a in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


DRAWS = range(5)
"""Seeds of the weights with which errors are compared. In one draw a gradient may be what two large
numbers leave of each other; how wrong it is then depends on the processor's order of sums.
"""

Draw = tuple[Results, Results, Results]
"""A converted model's results, the unconverted one's, the oracle's."""


def assert_as_accurate(draws: Iterable[Draw]) -> None:
    """Against the oracle, the results together are at most MODEL_ERROR_RATIO times as wrong as the
    unconverted model's, and each alone RESULT_ERROR_RATIO times, or by one rounding: in the
    geometric mean over the draws.
    """
    ratios: dict[str, list[float]] = collections.defaultdict(list)
    for converted, plain, exact in draws:
        for name, (ours, theirs) in errors(converted, plain, exact).items():
            ratios[name].append(ours / theirs)
    assert ratios
    for name, of_draws in ratios.items():
        allowed = MODEL_ERROR_RATIO if name == "all" else RESULT_ERROR_RATIO
        mean = statistics.geometric_mean(of_draws)
        assert mean <= allowed, f"{name}: {mean:.3g} times as wrong, {allowed} allowed: {of_draws}"


def errors(converted: Results, plain: Results, exact: Results) -> dict[str, tuple[float, float]]:
    """Of each result, and of "all" together: the converted model's error relative to the result's
    size, and the unconverted one's.
    """
    assert list(converted) == list(plain) == list(exact)
    largest = max(root_mean_square(g) for name, g in exact.items() if "gradient" in name)
    errors = {}
    all_ours, all_theirs = 0.0, 0.0
    for name, reference in exact.items():
        ours, theirs = converted[name], plain[name]
        assert ours.dtype == theirs.dtype, name
        assert ours.shape == theirs.shape, name
        size = root_mean_square(reference)
        if size < NO_GRADIENT * largest:
            size = largest
        least = roundoff(ours.dtype) / RESULT_ERROR_RATIO  # so that one rounding is within it
        our_error = root_mean_square(ours.double() - reference) / size
        their_error = root_mean_square(theirs.double() - reference) / size
        errors[name] = max(our_error, least), max(their_error, least)
        all_ours += our_error**2
        all_theirs += their_error**2
    return errors | {"all": (math.sqrt(all_ours), math.sqrt(all_theirs))}


def assert_same(actual: Results, expected: Results) -> None:
    """To the last bit."""
    assert set(actual) == set(expected)
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


def state(model: nn.Module) -> list[tuple[type, dict[str, Any]]]:
    """Class and attributes of every module."""
    return [(type(m), dict(m.__dict__)) for m in model.modules()]


def one_step(call: Callable[[], Tensor], *tensors: Tensor) -> list[Tensor]:
    """The output, and the gradients of `tensors` for a fixed random gradient of it."""
    output = call()
    generator = torch.Generator().manual_seed(5)
    grad = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, tensors, grad)]


def memopt_ops(call: Callable[[], Any]) -> list[str]:
    """Names of the operators of memopt that a call runs, below autograd, in order."""
    with RecordOps() as record:
        call()
    names = [op._schema.name for op in record.ops]
    return [name for name in names if name.startswith("memopt::")]
