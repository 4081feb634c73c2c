"""The step that a user asks about, with arguments checked in the name of the function called."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from memopt._arguments import check_count
from memopt.memory.batches import device_of, rows_in
from memopt.memory.leaves import all_tensors, as_dict
from memopt.memory.optimizers import OptimizerLike, as_optimizer, trained_beside
from memopt.memory.step import LossLike, Step, StepFunction


def asked_step(
    who: str,
    model: nn.Module,
    batch: Any,
    optimizer: OptimizerLike,
    loss: LossLike,
    autocast: torch.dtype | None,
    micro_batches: int,
    set_to_none: bool = True,
    function: StepFunction = None,
) -> Step:
    """Make the step of a model and a batch, which may have no values.

    Args:
        function: runs forward and backward itself; `step=` of the function that the user called.

    Raises:
        TypeError, ValueError: an argument is of another kind or out of its range, or the batch is
            on another device.
    """
    check_count(who, "micro_batches", micro_batches)
    batch = as_dict(batch)
    rows_in(who, batch)
    if not all(tensor.is_meta for tensor in all_tensors(batch)):
        device_of(who, model, batch)
    made = as_optimizer(who, optimizer, asked_parameters(model, loss))
    check_function(who, function, loss, autocast)
    return Step(
        *(model, batch, made, loss, autocast, micro_batches, set_to_none),
        function=function,
        who=who,
    )


def asked_parameters(model: nn.Module, loss: LossLike) -> list[nn.Parameter]:
    """Return those for which a class or a function makes an optimizer: the model's, and those of a
    loss that is a module.
    """
    return [*model.parameters(), *(p for _, p in trained_beside(model, loss, None))]


def check_function(who: str, function: object, loss: object, autocast: object = None) -> None:
    """Raises TypeError or ValueError where `step=` is no function of a model and a batch, `loss=`
    none of an output, or `autocast=` no dtype to compute in.
    """
    if autocast is not None and not (
        isinstance(autocast, torch.dtype) and autocast.is_floating_point
    ):
        raise TypeError(
            f"{who}: autocast must be a dtype of floating-point numbers, such as torch.bfloat16, "
            f"got {autocast!r}"
        )
    if loss is not None and not callable(loss):
        raise TypeError(
            f"{who}: loss must be a function of what the model returns, got {type(loss).__name__}"
        )
    if function is None:
        return
    if not callable(function):
        raise TypeError(
            f"{who}: step must be a function of the model and a batch, got "
            f"{type(function).__name__}"
        )
    if loss is not None:
        raise ValueError(
            f"{who}: loss must not be given with step, which makes its own, got {loss!r}"
        )
    try:
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        raise TypeError(
            f"{who}: step must be a function of the model and a batch, got one that takes "
            f"{inspect.signature(function)}"
        ) from error
    except ValueError:  # it has no signature to look at
        return


def check_module(who: str, model: object) -> None:
    """Raises TypeError where the model is none."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{who}: model must be an nn.Module, got {type(model).__name__}")


def home_of(model: nn.Module) -> torch.device:
    """Return the device of a model's parameters; without any, the CPU."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def target_of(who: str, model: nn.Module, device: object) -> str:
    """Return the type of the device that is predicted for: "cpu" or "cuda".

    Args:
        device: as it was asked for. None: the model's; of a model on meta, "cuda".
    """
    given = device.type if isinstance(device, torch.device) else device
    if given not in (None, "cpu", "cuda"):
        raise ValueError(f'{who}: device must be "cpu", "cuda" or None, got {device!r}')
    return str(given or ("cuda" if home_of(model).type in ("meta", "cuda") else "cpu"))


def is_host(model: nn.Module, target: str) -> bool:
    """Say whether a step that is predicted for `target` has the host's memory. An accelerator that
    is none of CUDA's is predicted as a CPU.
    """
    return target == "cpu" and home_of(model).type in ("cpu", "meta")


def has_values(model: nn.Module, batch: object) -> bool:
    """Say whether no tensor of the model and the batch is on the meta device."""
    return not any(t.is_meta for t in (*model.parameters(), *all_tensors(batch)))


def check_measure(who: str, measure: object) -> None:
    if not (isinstance(measure, bool) or measure == "auto"):
        raise ValueError(f'{who}: measure must be True, False or "auto", got {measure!r}')
