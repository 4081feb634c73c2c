"""A compiled library as a device.

Set its limits and its order of threads, call functions in it, see what it launched.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from .params import make_struct, struct_type


class KernelFault(RuntimeError):
    """What the interpreter found wrong with a launch; names kernel, block and thread."""


class Attribute(IntEnum):
    """The device's limits that launchers ask for; values of cudaDeviceAttr."""

    MULTIPROCESSORS = 16
    SHARED_BYTES_PER_BLOCK = 97


class Order(NamedTuple):
    """In which order threads (and blocks) run that could all run."""

    kind: int
    seed: int = 0


# Two opposite ones and one where warps interleave at random.
ORDERS = (Order(0), Order(1), Order(2, seed=7))


class Launch(NamedTuple):
    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    stream: int


class Traffic(NamedTuple):
    """What kernels did to a buffer."""

    shape: tuple[int, ...]
    nbytes: int
    loaded: int
    """Bytes; a byte that is read twice counts twice."""
    stored: int


class _Launch(ctypes.Structure):
    """struct simt::Launch of runtime/control.h."""

    _fields_ = (
        ("kernel", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("dynamic_shared", ctypes.c_int64),
        ("stream", ctypes.c_void_p),
    )


class Device:
    """One shared library of build.library(), which holds a runtime of its own."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._library = ctypes.CDLL(str(path))
        self._library.simt_launch_count.restype = ctypes.c_int64
        self._library.simt_launch.argtypes = (ctypes.c_int64,)
        self._library.simt_launch.restype = ctypes.POINTER(_Launch)
        self._library.simt_fault_text.restype = ctypes.c_char_p
        self._library.simt_fault_kernel.restype = ctypes.c_void_p
        for function in (self._library.simt_guard, self._library.simt_unguard):
            function.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
            function.restype = None
        self._library.simt_watch.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        for function in (self._library.simt_loaded, self._library.simt_stored):
            function.argtypes = (ctypes.c_int64,)
            function.restype = ctypes.c_int64
        self.traffic: list[list[Traffic]] | None = None
        """Of each launch's buffers, since it was made a list; None: nobody counts."""

    def reset(self) -> None:
        """Default limits, ascending order, no launches, nothing counted."""
        self._library.simt_reset()
        self.traffic = None

    def set_attribute(self, attribute: Attribute, value: int) -> None:
        self._library.simt_set_attribute(int(attribute), value)

    def set_order(self, order: Order) -> None:
        self._library.simt_set_order(order.kind, order.seed)

    def call(self, name: str, *arguments: Any) -> None:
        """Calls the C function `name`, which returns a cudaError_t.

        The arguments are ctypes values. Raises KernelFault if the interpreter reported a fault or
        the function failed; a reported fault stays until reset().
        """
        self._check(name, getattr(self._library, name)(*arguments))

    def _check(self, name: str, error: int) -> None:
        text = self._library.simt_fault_text().decode()
        if text:
            kernel = self._library.simt_fault_kernel()
            raise KernelFault(f"{self._kernel_name(kernel)}: {text}" if kernel else text)
        if error != 0:
            raise KernelFault(f"{name} returned the CUDA error {error}")

    def launch(self, launcher: str, values: dict[str, Any], stream: int) -> None:
        """Calls a launcher of csrc/kernels/cuda/launchers.h with `values` in the fields of its
        Params.
        """
        address, params = self._launchers[launcher]
        function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(address)
        arguments = make_struct(params, values)
        self._check(launcher, function(ctypes.byref(arguments), stream))

    def backward_parts(self, rows: int, cols: int, dtype: int) -> int:
        """norm_backward_parts() of the launchers."""
        address, _ = self._launchers["norm_backward_parts"]
        types = (ctypes.c_int64, ctypes.c_int64, ctypes.c_int32, ctypes.c_void_p)
        parts = ctypes.c_int64()
        error = ctypes.CFUNCTYPE(ctypes.c_int, *types)(address)(
            rows, cols, dtype, ctypes.addressof(parts)
        )
        self._check("norm_backward_parts", error)
        return parts.value

    def dropout_rule(self, p: float, state: Any, seed: int, offset: int) -> ctypes.Structure:
        """memopt::kernels::dropout_rule(); state: an address, or None."""
        rule = struct_type("DropoutRule")()
        self.call(
            "simt_dropout_rule",
            *(ctypes.c_double(p), ctypes.c_void_p(state), ctypes.c_int64(seed)),
            *(ctypes.c_int64(offset), ctypes.byref(rule)),
        )
        return rule

    def launches(self) -> list[Launch]:
        """All launches since the last reset."""
        made = []
        for i in range(self._library.simt_launch_count()):
            launch = self._library.simt_launch(i).contents
            made.append(
                Launch(
                    self._kernel_name(launch.kernel),
                    tuple(launch.grid),
                    tuple(launch.block),
                    launch.dynamic_shared,
                    launch.stream or 0,
                )
            )
        return made

    def guard(self, address: int, size: int) -> None:
        """Makes any access of a kernel to this memory a fault."""
        self._library.simt_guard(address, size)

    def unguard(self, address: int, size: int) -> None:
        self._library.simt_unguard(address, size)

    @contextmanager
    def watching(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Counts what happens to them, if `traffic` is a list."""
        if self.traffic is None:
            yield
            return
        for tensor in tensors:
            self._library.simt_watch(tensor.data_ptr(), tensor.nbytes)
        try:
            yield
            self.traffic.append(
                [
                    Traffic(
                        tuple(tensor.shape),
                        tensor.nbytes,
                        self._library.simt_loaded(number),
                        self._library.simt_stored(number),
                    )
                    for number, tensor in enumerate(tensors)
                ]
            )
        finally:
            self._library.simt_unwatch()

    def function_names(self) -> set[str]:
        """The short names of all functions that the library defines."""
        return set(self._functions.values())

    def _kernel_name(self, address: int) -> str:
        return self._functions[address]

    @cached_property
    def _symbols(self) -> dict[int, str]:
        """Demangled functions by address. Kernels have internal linkage: only the symbol table
        knows them.
        """
        command = ["nm", "--demangle", "--defined-only", str(self._path)]
        table = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        symbols = [line.split(" ", 2) for line in table.splitlines()]
        offsets = {int(address, 16): name for address, kind, name in symbols if kind in "tTwW"}
        here = ctypes.cast(self._library.simt_reset, ctypes.c_void_p).value or 0
        base = here - next(offset for offset, name in offsets.items() if name == "simt_reset")
        return {base + offset: name for offset, name in offsets.items()}

    @cached_property
    def _functions(self) -> dict[int, str]:
        """Short names by address."""
        return {address: _short(name) for address, name in self._symbols.items()}

    @cached_property
    def _launchers(self) -> dict[str, tuple[int, str]]:
        """Address, and the first parameter's type, of each function that launchers.h declares."""
        pattern = re.compile(r"memopt::kernels::cuda::(\w+)\((?:memopt::kernels::)?(\w+)")
        found = ((address, pattern.match(name)) for address, name in self._symbols.items())
        return {match[1]: (address, match[2]) for address, match in found if match}


def _short(symbol: str) -> str:
    """`void a::(anonymous namespace)::kernel<a::T, (a::E)1>(a::Params)` as `kernel<T, (E)1>`."""
    name = re.sub(r"\(anonymous namespace\)::|\b\w+::", "", symbol).removeprefix("void ")
    if not name.endswith(")"):
        return name
    depth = 0
    for position in range(len(name) - 1, 0, -1):  # back over the parameters
        depth += {")": 1, "(": -1}.get(name[position], 0)
        if depth == 0:
            break
    return name[:position]
