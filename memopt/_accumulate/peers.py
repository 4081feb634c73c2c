"""The processes of a model that FSDP2 shards, in step with each other.

Each forward and backward of such a model is a row of collectives, in which all processes must take
part. If memory runs out in one process, the others wait for it in the next collective. So that
process goes on too: it runs two rows in place of its part, whose results are dropped, and leaves
out the collectives that it had begun. When the batch is done all processes are told, and begin it
again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

import memopt.nn
from memopt._compat import sharding_groups

T = TypeVar("T")

# They exchange numbers in a forward that others may not run.
_EXCHANGE = (nn.SyncBatchNorm, memopt.nn.SyncBatchNorm)


class Peers:
    """The processes that train one model.

    Raises:
        ValueError: the model cannot be brought back in step after an error.
    """

    def __init__(self, model: nn.Module) -> None:
        modules: list[Any] = [m for m in model.modules() if hasattr(m, "reshard")]
        for module in modules:  # parameters may be whole since the last backward
            module.reshard()
        meshes: list[Any] = [p.device_mesh for p in model.parameters() if hasattr(p, "device_mesh")]
        reasons = (
            ("PyTorch 2.13 or newer", hasattr(model, "reset_iter_state")),
            ("parameters sharded over one dimension", {mesh.ndim for mesh in meshes} == {1}),
            (
                "no SyncBatchNorm",
                not any(isinstance(m, _EXCHANGE) for m in model.modules()),
            ),
        )
        for wanted, is_met in reasons:
            if not is_met:
                raise ValueError(
                    'accumulate: micro_batch="auto" under FSDP must have '
                    f"{wanted}, so that all processes can go back together; give a number of rows"
                )
        self._model: Any = model
        self._group = meshes[0].get_group()
        self._device = next(model.parameters()).device
        self._comms: list[_Comm] = []
        self.failed = False
        """Whether memory ran out in this process since `counted` was entered."""

    def least(self, number: int) -> int:
        """The least number of all processes, by one small collective."""
        found = torch.tensor(number, device=self._device)
        dist.all_reduce(found, dist.ReduceOp.MIN, self._group)
        return int(found)

    def most(self, number: int) -> int:
        return -self.least(-number)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """While it is entered, the model's collectives are counted."""
        self.failed = False
        groups = sharding_groups(self._model)
        before = [(group, group._all_gather_comm, group._reduce_scatter_comm) for group in groups]
        for group, gather, scatter in before:
            group._all_gather_comm = _Comm(gather, group)
            group._reduce_scatter_comm = _Comm(scatter)
            self._comms += [group._all_gather_comm, group._reduce_scatter_comm]
        try:
            yield
        finally:
            self._comms = []
            for group, gather, scatter in before:
                group._all_gather_comm, group._reduce_scatter_comm = gather, scatter

    def run(self, part: Callable[[], T], stand_in: Callable[[], object]) -> T | None:
        """`part`, a forward and a backward; None where memory runs out, or did before. Then
        `stand_in`, which is one too, has begun the collectives that `part` had not.
        """
        if not self.failed:
            for comm in self._comms:
                comm.start()
            try:
                return part()
            except torch.OutOfMemoryError:
                self.failed = True
            # What the error held is gone here, and so are the activations.
            self._model.reset_iter_state()
            if self._device.type != "cpu":
                torch.get_device_module(self._device).empty_cache()
            for comm in self._comms:
                comm.leave_out()
        stand_in()
        return None


class _Comm:
    """Stands in for what FSDP2 calls to begin a collective: counts, and can leave some out."""

    def __init__(self, comm: Any, gathers: Any = None) -> None:
        self._comm = comm
        self._gathers = gathers
        self._begun = self._left_out = 0

    def start(self) -> None:
        """A part begins. Where parameters are whole already, the stand-in's are not, and nobody
        else gathers them.
        """
        self._begun = int(self._gathers is not None and self._gathers.is_unsharded)

    def leave_out(self) -> None:
        """Leave out as many collectives as the part has begun."""
        self._left_out = self._begun

    def allocate(self, *args: Any, **kwargs: Any) -> Any:
        return self._comm.allocate(*args, **kwargs)

    def __call__(self, output_tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if self._left_out:
            self._left_out -= 1
            output_tensor.zero_()
            return None
        begun = self._comm(output_tensor, *args, **kwargs)
        self._begun += 1
        return begun
