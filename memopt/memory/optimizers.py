"""Optimizers: how one is asked for, what it trains, and the states that its steps make."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from memopt.memory.parallel import is_sharded
from memopt.memory.storages import tensors_in

OptimizerLike = torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None

States = Mapping[str, Mapping[str, Any]]
"""An optimizer's states, by the names of parameters."""


def as_optimizer(
    who: str, kind: object, parameters: Sequence[nn.Parameter]
) -> torch.optim.Optimizer | None:
    """An optimizer of the parameters that require gradients, from a class or a function; None where
    a class has none to make it of.

    Raises:
        TypeError: it is none.
        ValueError: its step runs forward and backward itself.
    """
    if kind is None:
        return None
    optimizer = kind
    trained = [p for p in parameters if p.requires_grad]
    is_other = isinstance(kind, type) and not issubclass(kind, torch.optim.Optimizer)
    if not trained and isinstance(kind, type) and not is_other:
        return None  # PyTorch's make none of no parameters
    if not isinstance(kind, torch.optim.Optimizer):
        if not callable(kind):
            raise TypeError(
                f"{who}: optimizer must be a torch.optim.Optimizer, a class or function that makes "
                f"one of parameters, or None, got {type(kind).__name__}"
            )
        optimizer = None if is_other else kind(trained)
    if not isinstance(optimizer, torch.optim.Optimizer):
        made: Any = kind if is_other else type(optimizer)
        raise TypeError(f"{who}: optimizer must make a torch.optim.Optimizer, got {made.__name__}")
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{who}: optimizer must step without a closure, got {type(optimizer).__name__}, whose "
            "step runs forward and backward itself, as often as it likes; optimizer=None is for "
            "one forward and backward"
        )
    return optimizer


def trained_beside(
    model: nn.Module, loss: object, optimizer: object
) -> tuple[tuple[str, nn.Parameter], ...]:
    """Return what a step trains and the model does not have: parameters of a loss that is a module,
    and others in the optimizer's groups. A training script hands both to its optimizer. A sharded
    model has whole parameters at times, and its optimizer never.
    """
    seen = {id(p) for p in model.parameters()}
    named: list[tuple[str, nn.Parameter]] = []
    if isinstance(loss, nn.Module):
        named += [(name, p) for name, p in loss.named_parameters("loss") if p.requires_grad]
    if isinstance(optimizer, torch.optim.Optimizer) and not is_sharded(model):
        groups = (p for group in optimizer.param_groups for p in group["params"])
        named += [(f"optimizer.{place}", p) for place, p in enumerate(groups)]
    found = []
    for name, parameter in named:
        if id(parameter) not in seen:
            seen.add(id(parameter))
            found.append((name, parameter))
    return tuple(found)


def tables_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The tensors in an optimizer's own attributes, which belong to no parameter: maps of numbers
    in 8 bits.
    """
    own = {k: v for k, v in vars(optimizer).items() if k not in ("state", "param_groups")}
    return [tensor for tensor in tensors_in(own) if not isinstance(tensor, nn.Parameter)]


ALIKE = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
"""The optimizers whose steps make nothing but states: tensors like the parameter, and a count."""


class _Number(NamedTuple):
    """A tensor of one number: a count of steps."""

    value: int | float | bool
    dtype: torch.dtype


def outlined(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state without memory: its tensors are on meta, those of one number are numbers."""

    def without_memory(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return copy(value)
        return value.to("meta") if value.dim() else _Number(value.item(), value.dtype)

    return {key: without_memory(value) for key, value in state.items()}


def like(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state with memory for tensors as large as those of an outlined one."""

    def alike(value: Any) -> Any:
        if isinstance(value, _Number):
            return torch.tensor(value.value, dtype=value.dtype, device="cpu")
        return torch.zeros_like(value, device="cpu") if isinstance(value, Tensor) else copy(value)

    return {key: alike(value) for key, value in state.items()}
