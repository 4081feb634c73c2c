"""The peak of a step that runs, whatever it does."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from memopt.memory.allocator import DeviceBytes
from memopt.memory.leaves import all_tensors
from memopt.memory.ledger import Ledger
from memopt.memory.optimizers import tables_of
from memopt.memory.search import NEVER_FITS
from memopt.memory.step import Step
from memopt.memory.storages import parts_of, storages, tensors_in
from memopt.memory.totals import highs_of


def peak_of(function: Callable[[int], object], rows: int) -> int:
    """The most bytes at any time of `function(rows)`: on an accelerator what its allocator says; on
    the CPU of the tensors that it makes, and of those from before that it reads. NEVER_FITS where
    memory runs out.
    """
    try:
        device = torch.accelerator.current_accelerator(check_available=True)
        if device is not None:
            with DeviceBytes(device) as found:
                function(rows)
            return found.most
        ledger = Ledger(nn.Module())
        with ledger:
            function(rows)
    except torch.OutOfMemoryError:
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()
        return NEVER_FITS
    return max(highs_of(ledger))


def peak_of_step(step: Step, run: Callable[[int], object], rows: int) -> int:
    """The peak, as in `peak_of`, of a step's forwards and backwards and its optimizer's step."""
    missing, most = of_optimizer(step)
    peak = peak_of(run, rows)
    if not torch.accelerator.is_available():  # else its states are in that
        peak += sum(storages(_states(step)).values())
    return missing + max(peak, bytes_here(step) + most)


def bytes_here(step: Step) -> int:
    """Bytes on the device before a step: weights, gradients, optimizer states, the batch."""
    parameters = [p for _, p in step.trained]
    leaves = [*parameters, *step.model.buffers(), *_states(step)]
    leaves += [p.grad for p in parameters if p.grad is not None]
    leaves += all_tensors(step.batch)
    return sum(storages(leaves).values())


def of_optimizer(step: Step) -> tuple[int, int]:
    """Bytes of states that do not exist yet; and of gradients and temporaries while it steps.
    Both are estimated from its kind.
    """
    if step.optimizer is None:
        return 0, 0
    trained = [p for group in step.optimizer.param_groups for p in group["params"]]
    sizes = [_nbytes(parameter) for parameter in trained]
    optimizer, missing = step.optimizer, [p for p in trained if p not in step.optimizer.state]
    shares = {dims: _states_share(optimizer, dims) for dims in {p.dim() for p in missing}}
    states = sum(_nbytes(parameter) * shares[parameter.dim()] for parameter in missing)
    return int(states), sum(sizes) + 2 * max(sizes, default=0)


def _states(step: Step) -> Sequence[Tensor]:
    if step.optimizer is None:
        return ()
    states = [dict(state) for state in step.optimizer.state.values()]
    return [*tensors_in(states), *tables_of(step.optimizer)]


def _nbytes(parameter: Tensor) -> int:
    """Bytes of this rank's part of a parameter."""
    return sum(part.nbytes for part in parts_of(parameter))


def _states_share(optimizer: torch.optim.Optimizer, dims: int) -> float:
    """Bytes of state by bytes of parameters, tried on a small one of as many dimensions: Adafactor
    factors matrices alone, and Muon takes nothing else.
    """
    side = max(2, round(4096 ** (1 / max(1, dims))))
    parameter = nn.Parameter(torch.zeros((side,) * dims, device="cpu"))
    kind: Any = type(optimizer)
    known = inspect.signature(kind).parameters
    trial = kind([parameter], **{k: v for k, v in optimizer.defaults.items() if k in known})
    parameter.grad = torch.zeros_like(parameter)
    trial.step()
    states = [t for state in trial.state.values() for t in tensors_in(list(state.values()))]
    return sum(t.nbytes for t in states if t.dim()) / parameter.nbytes
