"""The ranks that share a region's inputs: what `partition=` of the regions names.

How a region's inputs are split and gathered is C++ (csrc/saved/partitioned.h). Here is the group:
its collective, its names, and what is known of each module's inputs.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from types import BuiltinFunctionType, MethodType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, Union

import torch.distributed as dist
from torch import Tensor, nn

from memopt._checkpoint.naming import region_name, unwrapped
from memopt._compat import all_gather_single, device_types_of_group, process_group_named
from memopt._errors import warn
from memopt._extension import _C

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class StageWork(Protocol):
    """A collective that has begun, as torch.distributed.Work."""

    def wait(self) -> Any:
        """Waits until it has ended; on an accelerator, makes the current stream wait."""

    def is_completed(self) -> bool:
        """Whether it has ended or failed. Does not wait."""


Gather: TypeAlias = Callable[[Tensor, Tensor], StageWork]
"""Begins to gather into the second tensor the first one of every rank, in the order of ranks."""

PartitionChoice: TypeAlias = Union["dist.ProcessGroup", "DeviceMesh", "Partition", bool, None]
"""The ranks that hold identical inputs of a region; True: those of the default group."""


class Partition:
    """A group of ranks, each of which keeps its part of the tensors that are identical on all.

    There is one for each process group, whatever the modules: their gathers follow one another. A
    copy of it is itself; a pickle finds the group of that name again.
    """

    def __init__(
        self, rank: int, ranks: int, devices: Sequence[str], gather: Gather, name: str = ""
    ) -> None:
        """
        Args:
            rank: this process's number in the group, from 0.
            ranks: how many there are.
            devices: the types of device whose tensors can be gathered.
            gather: the collective.
            name: of the process group.
        """
        self._name = name
        self.native = _C.Partition(
            rank=rank,
            ranks=ranks,
            devices=list(devices),
            start=gather,
            agreement_of=_Agreements(),
            differs=_warn_of_differing,
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Partition:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if not self._name:
            raise TypeError("checkpoint: partition must be of a process group to be pickled")
        return _partition_named, (self._name,)


def partition_of(who: str, choice: object) -> Partition | None:
    """The partition that `partition=` asks for; None where there is nothing to split.

    Raises:
        TypeError: it is not a group, a mesh or True.
        ValueError: there is no process group, the mesh has several dims, or this rank is not in it.
    """
    if choice is None or choice is False:
        return None
    if isinstance(choice, Partition):
        return choice
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            f"{who}: partition needs torch.distributed's process group to be initialized "
            f"(dist.init_process_group), got {choice!r} without one"
        )
    from torch.distributed.device_mesh import DeviceMesh  # which not every build has

    if choice is True:
        assert dist.group.WORLD is not None
        return _partition_of_group(dist.group.WORLD)
    if choice is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"{who}: partition must be a group that this rank is in, got another")
    if isinstance(choice, dist.ProcessGroup):
        if dist.get_rank(choice) < 0:
            raise ValueError(
                f"{who}: partition must be a group that this rank ({dist.get_rank()}) is in, got "
                f"one of ranks {dist.get_process_group_ranks(choice)}"
            )
        return _partition_of_group(choice)
    if isinstance(choice, DeviceMesh):
        if choice.ndim != 1:
            names: tuple[Any, ...] = choice.mesh_dim_names or tuple(range(choice.ndim))
            raise ValueError(
                f"{who}: partition must be a mesh of one dim, such as "
                f"mesh[{names[-1]!r}], got one of dims {names}"
            )
        if choice.get_coordinate() is None:
            raise ValueError(
                f"{who}: partition must be a mesh that this rank ({dist.get_rank()}) is in, got "
                f"one of ranks {choice.mesh.tolist()}"
            )
        return _partition_of_group(choice.get_group())
    raise TypeError(
        f"{who}: partition must be a ProcessGroup, a DeviceMesh of one dim or True, got "
        f"{type(choice).__name__}"
    )


_partitions: weakref.WeakKeyDictionary[dist.ProcessGroup, Partition] = weakref.WeakKeyDictionary()


def _partition_of_group(group: dist.ProcessGroup) -> Partition | None:
    if group.size() == 1:
        return None
    found = _partitions.get(group)
    if found is None:
        found = _partitions[group] = Partition(
            group.rank(),
            group.size(),
            sorted(device_types_of_group(group), key=lambda device: device != "cpu"),
            functools.partial(_all_gather, weakref.ref(group)),
            group.group_name,
        )
    return found


def _partition_named(name: str) -> Partition | None:
    return _partition_of_group(process_group_named(name))


def _all_gather(
    group_ref: weakref.ReferenceType[dist.ProcessGroup], part: Tensor, whole: Tensor
) -> StageWork:
    group = group_ref()
    if group is None:
        raise RuntimeError("checkpoint: the process group of partition= was destroyed")
    try:
        work: StageWork = all_gather_single(whole, part, group)
    except (NotImplementedError, RuntimeError) as error:
        if "support" not in str(error):
            raise
        # Not every backend has it; all ranks have the same one.
        gathered = dist.all_gather(
            list(whole.chunk(group.size())), part, group=group, async_op=True
        )
        assert gathered is not None
        work = gathered
    return work


class _Agreements:
    """The agreement on the inputs of each module, or of each plain function's code."""

    def __init__(self) -> None:
        self._of: weakref.WeakKeyDictionary[Any, dict[Any, _C.Agreement]]
        self._of = weakref.WeakKeyDictionary()

    def __call__(self, subject: object) -> _C.Agreement:
        owner, code = _owner_and_code(subject)
        of_owner = self._of.setdefault(owner, {})
        found = of_owner.get(code)
        if found is None:
            found = of_owner[code] = _C.Agreement()
        return found


def _owner_and_code(subject: Any) -> tuple[Any, Any]:
    """The object that lives as long as the calls that it stands for: a module (and its method), or
    a function's code. It is no closure, since each call may create another one.
    """
    subject = unwrapped(subject)
    if isinstance(subject, nn.Module):
        return subject, None
    if isinstance(subject, BuiltinFunctionType):
        return subject, None
    owner = subject.__self__ if isinstance(subject, MethodType) else None
    code = getattr(subject, "__code__", type(subject))
    return (owner, code) if isinstance(owner, nn.Module) else (code, None)


def _warn_of_differing(subject: object, arguments: list[tuple[str, float]]) -> None:
    what = ", ".join(f"{name} ({share:.0%} of the bytes)" for name, share in arguments)
    warn(
        f"checkpoint: partition: inputs of region {region_name(subject)} differ between the ranks "
        f"of the group and are kept whole: {what}. That costs what it does without partition=; "
        "where no input is identical on all ranks, leave partition= out, or name the group whose "
        "ranks hold identical inputs (of a mesh: partition=mesh['tp'])"
    )
