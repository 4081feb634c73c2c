"""Deep copies of what a step uses, whatever else it holds."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import nn

from memopt.memory.iterators import may_be_copied

T = TypeVar("T")


def copied(value: T, memo: Mapping[int, Any]) -> tuple[T, list[tuple[Any, Any]]]:
    """A deep copy that shares with `value` what Python cannot copy: locks, modules of Python, open
    files, generators. A step runs with these as with its own.

    Args:
        memo: the copies that are there already, by the id of the original.

    Returns the copy, and each object inside that was copied with its copy, without those of `memo`.

    Raises:
        Whatever copying raises, where a module or an optimizer refuses.
    """
    shared: dict[int, Any] = {}
    while True:
        made = {**memo, **shared}
        try:
            with may_be_copied():
                copy_ = copy.deepcopy(value, made)
                _with_attributes(made)
        except Exception as error:
            refused = _refused(error)
            if refused is None or id(refused) in shared or isinstance(refused, _WITH_PARAMETERS):
                raise
            shared[id(refused)] = refused
        else:
            originals = made.get(id(made), [])  # where deepcopy holds them
            pairs = [(one, made[id(one)]) for one in originals if id(one) in made]
            for _, one in pairs:
                if isinstance(one, torch.jit.ScriptModule):
                    _with_leaves(one)
            return copy_, pairs


# Shared ones would run with the user's parameters.
_WITH_PARAMETERS = (nn.Module, torch.optim.Optimizer)


def _with_attributes(made: dict[int, Any]) -> None:
    """Gives optimizers that were copied the attributes of their own. PyTorch's state of an
    optimizer, which a deep copy takes, has groups and states alone, and a class of others may hold
    more that its step reads. What can be called is left out: a scheduler's `step` runs the user's.
    """
    own = torch.optim.Optimizer.__getstate__
    for one in list(made.get(id(made), [])):
        if isinstance(one, torch.optim.Optimizer) and type(one).__getstate__ is own:
            there = vars(made[id(one)])
            for name, value in vars(one).items():
                if name not in there and not callable(value):
                    there[name] = copy.deepcopy(value, made)


def _with_leaves(module: nn.Module) -> None:
    """Makes parameters of their own of what TorchScript copies in the view of autograd."""
    for parameter in module.parameters():
        if not parameter.is_leaf:
            parameter.detach_().requires_grad_()


def _refused(error: Exception) -> Any:
    """The object that was being copied when an error was raised; None if there is none."""
    found = None
    trace = error.__traceback__
    while trace is not None:
        if _is_copying(trace.tb_frame):
            found = trace.tb_frame.f_locals.get("x")
        trace = trace.tb_next
    return found


def _is_copying(frame: FrameType) -> bool:
    return frame.f_code is copy.deepcopy.__code__
