"""The ways to offload that benchmarks/offload.py compares, and the blocks that they run."""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as of_torch
from torch.utils._python_dispatch import TorchDispatchMode

import memopt
from memopt.demo.model import Block, ModelSize

CHECKPOINTED, WHOLE = "checkpointed", "whole"
STACKS = (CHECKPOINTED, WHOLE)
BASELINE = "no offload"
# Python hooks leave less alone, as memopt.offload() does by default.
MIN_BYTES = 64 * 1024


@dataclass(frozen=True)
class Size:
    """The sizes of a stack of pre-LN GPT blocks and of its input."""

    width: int
    sequence: int
    batch: int
    blocks: int
    dtype: str

    @property
    def key(self) -> str:
        return f"h{self.width}/s{self.sequence}/b{self.batch}/L{self.blocks}/{self.dtype}"

    @property
    def input_bytes(self) -> int:
        """The bytes of one block's input."""
        itemsize: int = getattr(torch, self.dtype).itemsize
        return self.batch * self.sequence * self.width * itemsize

    @property
    def forward_operations(self) -> int:
        """Multiplications and additions of one block's products; causal attention has half of the
        pairs.
        """
        h, s = self.width, self.sequence
        return self.batch * s * (24 * h * h + 2 * s * h)


@dataclass(frozen=True)
class Way:
    """One way to run a stack: what each block becomes, and a context around the forward."""

    name: str
    wrap: Callable[[nn.Module], nn.Module]
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    files: FileHooks | None = None
    """The hooks that `around` returns, where they count their own bytes."""
    is_peer: bool = True


class Stack:
    """Blocks with gradients, and a step of theirs: forward, and backward from a weighted sum."""

    def __init__(self, size: Size, device: torch.device) -> None:
        torch.manual_seed(0)
        model = ModelSize(size.blocks, size.width, max(1, size.width // 64), size.sequence)
        dtype = getattr(torch, size.dtype)
        shape = (size.batch, size.sequence, size.width)
        with device:
            self.blocks = nn.Sequential(*(Block(model) for _ in range(size.blocks))).to(dtype)
            self.x = torch.randn(shape, dtype=dtype, requires_grad=True)
            self.weights = torch.randn(shape, dtype=dtype)
        for leaf in self.leaves():
            leaf.grad = torch.zeros_like(leaf)

    def leaves(self) -> list[Tensor]:
        return [self.x, *self.blocks.parameters()]

    def step_of(self, way: Way) -> Callable[[], Tensor]:
        """The step in this way, which returns its loss. Its blocks share the parameters."""
        shared = {id(parameter): parameter for parameter in self.blocks.parameters()}
        blocks = [way.wrap(block) for block in copy.deepcopy(self.blocks, shared)]

        def step() -> Tensor:
            with way.around():
                # A copy, as what an embedding gives: nothing else holds it.
                y = through(blocks, self.x.clone())
            loss = (y * self.weights).sum(dtype=torch.float32)
            loss.backward()
            return loss.detach()

        return step

    def results_of(self, step: Callable[[], Tensor]) -> list[Tensor]:
        """The loss and the gradients of one step."""
        for leaf in self.leaves():
            assert leaf.grad is not None
            leaf.grad.zero_()
        loss = step()
        return [loss, *(leaf.grad.clone() for leaf in self.leaves())]


def through(blocks: Iterable[nn.Module], x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


def unchanged(block: nn.Module) -> nn.Module:
    return block


def ways(
    stack: str,
    device: torch.device,
    directory: Path,
    fraction: float,
    parameters: Iterable[Tensor],
) -> list[Way]:
    """The ways to run a stack, the baseline first. `fraction` is what the link hides of the bytes
    that the whole stack saves; `directory` is where files go on a CPU.
    """
    on_cpu = device.type == "cpu"
    if stack == CHECKPOINTED:
        place: Any = directory if on_cpu else "cpu"
        found = [
            Way(BASELINE, memopt.checkpoint_wrapper, is_peer=False),
            Way(
                "memopt.checkpoint_wrapper(offload=)",
                lambda block: memopt.checkpoint_wrapper(block, offload=place),
                is_peer=False,
            ),
        ]
    else:
        found = [Way(BASELINE, unchanged, is_peer=False)]
        for share in sorted({1.0, fraction}, reverse=True):
            around = _offload(device, directory, share)
            found.append(Way(offload_name(share), unchanged, around, is_peer=False))
    wrap = of_torch.checkpoint_wrapper if stack == CHECKPOINTED else unchanged
    if on_cpu:
        for name, sync in (("hooks: tofile", False), ("hooks: tofile, fsync", True)):
            hooks = FileHooks(directory, sync, parameters)
            found.append(Way(name, wrap, lambda hooks=hooks: hooks, hooks))
        return found
    found.append(
        Way(
            "torch save_on_cpu", wrap, lambda: save_on_cpu(pin_memory=True, device_type=device.type)
        )
    )
    if stack == CHECKPOINTED:
        found.append(
            Way("torch offload_wrapper", lambda block: of_torch.offload_wrapper(wrap(block)))
        )
    return found


def offload_name(fraction: float) -> str:
    return f"memopt.offload(fraction={fraction:g})"


def _offload(
    device: torch.device, directory: Path, fraction: float
) -> Callable[[], AbstractContextManager[None]]:
    if device.type == "cpu":
        return lambda: memopt.offload("disk", directory=directory, fraction=fraction)
    return lambda: memopt.offload("cpu", fraction=fraction)


class FileHooks(saved_tensors_hooks):
    """Hooks as one writes them oneself: each saved tensor goes to a file in forward, and comes back
    in backward.

    With `sync` a file is on the disk, and not in the page cache alone, when its write is over.
    Small tensors stay, and so do parameters and views of them.
    """

    def __init__(self, directory: Path, sync: bool, parameters: Iterable[Tensor]) -> None:
        self.out = self.back = 0  # bytes
        names = itertools.count()
        kept = {parameter.untyped_storage().data_ptr() for parameter in parameters}

        def pack(tensor: Tensor) -> Any:
            if tensor.nbytes < MIN_BYTES or tensor.untyped_storage().data_ptr() in kept:
                return tensor
            path = directory / f"{next(names)}.bin"
            with open(path, "wb") as file:
                tensor.detach().contiguous().view(torch.uint8).numpy().tofile(file)
                if sync:
                    os.fsync(file.fileno())
            self.out += tensor.nbytes
            return path, tensor.dtype, tensor.shape

        def unpack(packed: Any) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            path, dtype, shape = packed
            found = torch.from_numpy(np.fromfile(path, dtype=np.uint8)).view(dtype).view(shape)
            path.unlink()
            self.back += found.nbytes
            return found

        super().__init__(pack, unpack)


class Transfers(TorchDispatchMode):
    """Counts the bytes that PyTorch's ops copy between a device and the host."""

    def __init__(self) -> None:
        super().__init__()
        self.out = self.back = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("copy_", "_to_copy"):
            source = args[1] if name == "copy_" else args[0]
            if source.is_cpu and not result.is_cpu:
                self.back += source.nbytes
            elif not source.is_cpu and result.is_cpu:
                self.out += source.nbytes
        return result
