"""Probes: calls the forward of a stand-in for a module, to see what the module computes.

A stand-in has the class and the attributes of the module, but small tensors and submodules of its
own, on the CPU. So no tensor of the module is read or written, whatever its device, and its hooks
do not run.
"""

from __future__ import annotations

import inspect
import math
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from memopt._class_patch import original_class
from memopt._compat import call_forward_alone, without_dispatch_modes, without_function_modes
from memopt._convert.functions import functions_paused
from memopt._forwards import is_ours
from memopt.memory.draws import drawn_as_ever
from memopt.memory.generators import state_for_all

_MODULE_ATTRIBUTES = frozenset(nn.Module().__dict__)
_SIMPLE = (bool, int, float, str, type(None))
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
_MISSING = object()

Constants = tuple[tuple[str, Any], ...]
"""Names and values of attributes that may decide what a module computes."""


@contextmanager
def quiet() -> Iterator[None]:
    """A scope for probes: no mode of the caller is on, no warning is shown, and the random numbers
    that are drawn do not count.
    """
    with (
        torch.random.fork_rng(devices=[]),
        warnings.catch_warnings(),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        without_function_modes(),
        without_dispatch_modes(),
        functions_paused(),
        drawn_as_ever(),
    ):
        warnings.simplefilter("ignore")
        yield


@contextmanager
def in_autocast() -> Iterator[None]:
    """A scope in which autocast is on, for the CPU and as code asks that knows of CUDA alone."""
    before = torch.is_autocast_enabled("cuda")
    torch.set_autocast_enabled("cuda", True)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            yield
    finally:
        torch.set_autocast_enabled("cuda", before)


NOT_FINITE = (float("nan"), float("inf"), -float("inf"))
"""Numbers for which a module may do something else."""

CALLERS_MODES: tuple[Callable[[], Any], ...] = (in_autocast, torch.no_grad)
"""Modes of the caller in which a module may do something else."""


def random_normal(*size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Standard normal numbers on the CPU, from a generator of their own."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(size, generator=generator, dtype=torch.float64, device="cpu").to(dtype)


def stand_in(
    module: nn.Module,
    parameters: dict[str, Tensor] | None = None,
    submodules: dict[str, nn.Module] | None = None,
    attributes: dict[str, Any] | None = None,
    training: bool = True,
) -> Any:
    """A module with the class and attributes of `module`, but with these tensors and submodules."""
    twin: Any = object.__new__(original_class(type(module)))
    twin.__dict__.update({k: v for k, v in module.__dict__.items() if not is_ours(k)})
    for name, value in nn.Module().__dict__.items():
        twin.__dict__[name] = value  # no hooks, no tensors, no submodules
    wrapped = {k: nn.Parameter(v.detach().clone()) for k, v in (parameters or {}).items()}
    twin.__dict__["_parameters"] = {**dict.fromkeys(module._parameters), **wrapped}
    twin.__dict__["_modules"] = {**module._modules, **(submodules or {})}
    twin.__dict__.update(attributes or {}, training=training)
    for own in (twin, *(submodules or {}).values()):
        call_forward_alone(own)  # hooks for all modules must not see stand-ins
    return twin


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes that the module's class gave it, other than tensors and submodules."""
    return {
        name: value
        for name, value in module.__dict__.items()
        if name not in _MODULE_ATTRIBUTES and not is_ours(name)
    }


def with_size(module: nn.Module, size: int, other: int) -> dict[str, Any]:
    """The attributes of a stand-in that has `other` columns where the module has `size`: numbers
    and shapes that equal the size, and its square root or one by that.
    """
    if size == other:
        return {}

    def change(value: Any) -> Any:
        if isinstance(value, tuple):
            return type(value)(map(change, value)) if type(value) in (tuple, torch.Size) else value
        if type(value) is int and value == size:
            return other
        for power in (0.5, -0.5):
            if type(value) is float and math.isclose(value, size**power, rel_tol=1e-6):
                return other**power
        return value

    attributes = own_attributes(module)
    return {k: new for k, v in attributes.items() if (new := change(v)) is not v}


def simple_attributes(module: nn.Module) -> tuple[tuple[str, Any], ...] | None:
    """`own_attributes`, sorted and hashable. None if one is not a number, string or function,
    since the module may keep a state in it.
    """
    found = []
    for name, value in sorted(own_attributes(module).items()):
        if isinstance(value, _SIMPLE) or (isinstance(value, tuple) and _hashable(value)):
            found.append((name, value))
        elif callable(value) and not isinstance(value, (nn.Module, Tensor)):
            found.append((name, _function(value)))
        else:
            return None
    return tuple(found)


def constants_of(module: nn.Module, read: str | float = "") -> Constants:
    """The numbers, strings and functions among `own_attributes`, as they are when the module is
    probed. All but `read`, the name of one that every call looks up.
    """
    return tuple(
        (name, value)
        for name, value in sorted(own_attributes(module).items())
        if name != read and isinstance(value, (*_SIMPLE, *_FUNCTIONS))
    )


def are_constant(module: nn.Module, constants: Constants) -> bool:
    """Whether the module's attributes still have these values. Runs before every call."""
    attributes = module.__dict__
    # A loop: all() of a generator is a call for each.
    for name, value in constants:  # noqa: SIM110
        if attributes.get(name, _MISSING) != value:
            return False
    return True


def has_containers(module: nn.Module) -> bool:
    """Whether a list, dict, set or tensor is among `own_attributes`. A stand-in would share it with
    the module, and forward might keep a state in it.
    """
    return any(isinstance(v, (list, dict, set, Tensor)) for v in own_attributes(module).values())


def _function(value: Any) -> Any:
    """A key for a function: for a method, the same in all instances."""
    return getattr(value, "__func__", repr(value))


def _hashable(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def takes_one_tensor(module: nn.Module, or_more: bool = False) -> bool:
    """Whether forward has exactly one parameter in addition to self, without a default.

    Args:
        or_more: it may have *args and **kwargs besides.
    """
    try:
        parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    except (TypeError, ValueError):
        return False
    if or_more:
        variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        parameters = [parameter for parameter in parameters if parameter.kind not in variable]
    return (
        len(parameters) == 1
        and parameters[0].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        and parameters[0].default is inspect.Parameter.empty
    )


def forward_of(module: nn.Module, input: Tensor) -> Tensor | None:
    """Return the result of a stand-in's forward. None if it raises, if it returns something other
    than a tensor, if it draws random numbers, which may lead elsewhere the next time, or if it sets
    an attribute: a module that counts its calls does more than compute.
    """
    before, numbers = dict(module.__dict__), _random_numbers()
    try:
        output = type(module).forward(module, input)
    except KeyboardInterrupt:
        raise
    except BaseException:  # whatever it is, the module is not what was looked for
        return None
    if _random_numbers() != numbers:
        return None
    after = module.__dict__
    if after.keys() != before.keys() or any(after[k] is not v for k, v in before.items()):
        return None
    return output if isinstance(output, Tensor) else None


def _random_numbers() -> dict[str, object]:
    """The states of the generators that PyTorch, Python and NumPy have for all."""
    return {**state_for_all(), "torch": torch.default_generator.get_state().numpy().tobytes()}


def gradients(output: Tensor, inputs: list[Tensor], seed: int = 1) -> list[Tensor] | None:
    """The gradients of a random linear function of `output`; None if backward raises."""
    grad = random_normal(*output.shape, dtype=output.dtype, seed=seed)
    try:
        found = torch.autograd.grad(output, inputs, grad, retain_graph=True, allow_unused=True)
    except Exception:
        return None
    if any(g is None for g in found):
        return None
    return [g for g in found if g is not None]
