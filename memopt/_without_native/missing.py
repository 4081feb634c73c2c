"""The error of what needs the native library."""

from __future__ import annotations

from typing import Any, NoReturn

# What a user called, by the name that the native library has for what it needs.
_CALLED = {
    "Buffers": "checkpoint.buffers",
    "ChunkedInput": "checkpoint(chunks=)",
    "Offload": "offload",
    "Partition": "checkpoint(partition=)",
    "SavedTensors": "saved_tensors (recipes and offload too)",
    "begin_functions": "convert.functions",
    "empty_offload_cache": "offload.empty_cache",
    "offload_copies_in_flight": "offload",
    "offload_directory": "offload",
    "check_offload_directory": "offload",
    "set_offload_limits": "offload.configure",
}


class NativeLibraryMissing(RuntimeError):
    """memopt was installed without its native library, and this needs it."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"memopt.{_CALLED.get(name, name)} needs memopt's native library, which this "
            "installation lacks: install a wheel that was built for this PyTorch, or build it in a "
            "checkout with a C++ compiler: pip install --no-build-isolation . Without it "
            "there are checkpoint, checkpoint_wrapper, apply_activation_checkpointing, plan, fit, "
            "anatomy, largest_batch, saved_bytes and check"
        )


class Ops:
    """Stands in for torch.ops.memopt: every op may be looked up, and none called."""

    def __init__(self, name: str = "") -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self if name == "default" else Ops(name)

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise NativeLibraryMissing(f"functional.{self._name}")
