"""A region's input that waits for backward in host memory.

Both copies are asynchronous for the host and run on the stream that computes: memory that either
side gives back is reused in stream order, so no stream has to be told about it (`record_stream`)
and nothing has to be held until a copy has finished. The recompute may run on another stream than
forward did; an event orders it after the copy to the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(eq=False)
class HostCopy:
    """The values of a device tensor in host memory, and what it takes to make the tensor again."""

    values: Tensor
    device: torch.device
    stride: tuple[int, ...]
    requires_grad: bool
    copied: torch.Event | None
    """When the copy to the host has finished; None where the device has no streams."""

    def restore(self) -> Tensor:
        """The tensor again, a leaf with the same values, strides and requires_grad."""
        if self.copied is not None:
            torch.accelerator.current_stream(self.device).wait_event(self.copied)
        tensor = torch.empty_strided(
            self.values.size(), self.stride, dtype=self.values.dtype, device=self.device
        )
        tensor.copy_(self.values, non_blocking=True)
        return tensor.requires_grad_(self.requires_grad)


def is_worth_offloading(tensor: Tensor) -> bool:
    """Whether keeping `tensor` in host memory frees device memory and gives the same tensor back.

    Parameters stay on the device anyway, and so do expanded tensors, which are views of smaller
    ones. Subclasses and layouts other than strided have no values that a plain copy could keep.
    """
    return (
        is_on_accelerator(tensor)
        and type(tensor) is Tensor
        and tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_nested)
        and all(
            stride or size <= 1 for size, stride in zip(tensor.size(), tensor.stride(), strict=True)
        )
    )


def is_on_accelerator(tensor: Tensor) -> bool:
    return tensor.device.type not in ("cpu", "meta")


def copy_to_host(tensor: Tensor) -> HostCopy:
    device = tensor.device
    values = torch.empty_like(tensor, device="cpu", pin_memory=device.type != "cpu")
    values.copy_(tensor.detach(), non_blocking=True)
    copied = None
    if device.type != "cpu":
        copied = torch.Event(device)
        copied.record(torch.accelerator.current_stream(device))
    return HostCopy(values, device, tensor.stride(), tensor.requires_grad, copied)
