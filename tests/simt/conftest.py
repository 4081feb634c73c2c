"""The two libraries: the kernels of csrc/kernels/cuda, and the samples with planted faults."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from . import build
from .device import Device


@pytest.fixture(scope="session")
def sample_library() -> Device:
    sources = [build.HERE / "faults" / "kernels.cu"]
    return Device(build.library("samples", sources))


@pytest.fixture(scope="session")
def kernel_library() -> Device:
    sources = [*build.KERNEL_SOURCES, build.HERE / "bindings.cpp"]
    return Device(build.library("kernels", sources))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """The interpreter has one thread, and buffers this small are filled fastest by it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def samples(sample_library: Device) -> Device:
    """The device that runs the samples of faults/, freshly reset."""
    sample_library.reset()
    return sample_library


@pytest.fixture
def simt(kernel_library: Device) -> Device:
    """The device that runs memopt's kernels, freshly reset."""
    kernel_library.reset()
    return kernel_library
