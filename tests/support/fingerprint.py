"""A fingerprint of all that some objects hold, deep inside: what a run must leave as it was.

    before = Fingerprint(model, batch, loss)
    ...
    assert Fingerprint(model, batch, loss).differences(before) == []

Everything is found by its path: attributes, slots, entries, variables that functions close over and
the globals that they name, classes, hooks, gradients. Of a tensor there are its identity, memory,
geometry, version and bytes; of a container its identity and what it holds, in order; of a generator
its state. It is written apart from memopt/memory, so that both would have to miss a thing.
"""

from __future__ import annotations

import functools
import io
import itertools
import queue
import random
import re
import threading
import types
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_ENDS = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_OWN = ("tests", "__main__", "transformers", "hypothesis_modules")


class Fingerprint:
    def __init__(self, *roots: object) -> None:
        self.entries: dict[str, object] = {
            "random": random.getstate(),
            "numpy.random": str(np.random.get_state()),
            "torch.random": torch.get_rng_state().numpy().tobytes(),
            "gradients": torch.is_grad_enabled(),
            "dtype": torch.get_default_dtype(),
        }
        self._held: dict[int, object] = {}
        todo: list[tuple[str, object]] = [(f"[{n}]", root) for n, root in enumerate(roots)]
        while todo:
            path, value = todo.pop()
            if isinstance(value, _ENDS):
                self.entries[path] = (type(value), repr(value))
                continue
            self.entries[path] = id(value)
            if id(value) not in self._held:
                self._held[id(value)] = value
                todo += self._inside(path, value)

    def differences(self, before: Fingerprint) -> list[str]:
        """Paths that were added, went away or hold something else."""
        paths = [*before.entries, *(path for path in self.entries if path not in before.entries)]
        nothing = object()
        return [
            path
            for path in paths
            if self.entries.get(path, nothing) != before.entries.get(path, nothing)
        ]

    def _inside(self, path: str, value: Any) -> Iterator[tuple[str, object]]:
        self.entries[f"{path}:class"] = type(value)
        if isinstance(value, Tensor):
            yield from self._of_tensor(path, value)
        elif isinstance(value, np.ndarray):
            self.entries[f"{path}:bytes"] = (value.shape, value.tobytes())
        elif isinstance(value, torch.Generator):
            self.entries[f"{path}:state"] = value.get_state().numpy().tobytes()
        elif isinstance(value, random.Random):
            self.entries[f"{path}:state"] = value.getstate()
        elif isinstance(value, (np.random.Generator, np.random.RandomState)):
            state = getattr(value, "bit_generator", value)
            self.entries[f"{path}:state"] = str(getattr(state, "state", None) or value.get_state())
        elif isinstance(value, (itertools.count, itertools.cycle, type(iter([])))):
            self.entries[f"{path}:place"] = re.sub(" at 0x[0-9a-f]+", "", str(value.__reduce__()))
        elif isinstance(value, (io.StringIO, io.BytesIO)):
            self.entries[f"{path}:written"] = (value.getvalue(), value.tell())
        elif isinstance(value, (queue.Queue, threading.local)):
            yield f"{path}:dict", vars(value)
        elif isinstance(value, functools._lru_cache_wrapper):
            yield f"{path}()", value.__wrapped__
        elif isinstance(value, types.FunctionType):
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                yield f"{path}<{name}>", cell.cell_contents
            yield f"{path}:defaults", value.__defaults__
            for name in value.__code__.co_names:
                found = value.__globals__.get(name)
                if value.__module__.split(".")[0] in _OWN[:2] and not isinstance(
                    found, (types.ModuleType, type, types.FunctionType)
                ):
                    yield f"{path}:global {name}", found
        elif isinstance(value, (types.MethodType, types.BuiltinMethodType)):
            yield f"{path}:self", value.__self__
        elif isinstance(value, functools.partial):
            yield f"{path}:func", value.func
            yield f"{path}:args", value.args
            yield f"{path}:keywords", value.keywords
        elif isinstance(value, weakref.ref):
            yield f"{path}*", value()
        elif isinstance(value, (weakref.WeakKeyDictionary, weakref.WeakValueDictionary)):
            self.entries[f"{path}:entries"] = [(id(k), id(v)) for k, v in value.items()]
        elif isinstance(value, dict):
            self.entries[f"{path}:keys"] = [k if isinstance(k, _ENDS) else id(k) for k in value]
            for key, entry in dict.items(value):
                yield f"{path}[{key if isinstance(key, _ENDS) else id(key)!r}]", entry
        elif isinstance(value, (list, tuple, deque)):
            self.entries[f"{path}:len"] = len(list(iter(value)))
            for number, entry in enumerate(value):
                yield f"{path}[{number}]", entry
        elif isinstance(value, (set, frozenset)):
            self.entries[f"{path}:entries"] = sorted(map(hash, value))
        elif isinstance(value, bytearray):
            self.entries[f"{path}:bytes"] = bytes(value)
        elif isinstance(value, type):
            for name, entry in vars(value).items():
                if not name.startswith("__"):
                    yield f"{path}.{name}", entry
            return
        yield from self._attributes(path, value)

    def _attributes(self, path: str, value: Any) -> Iterator[tuple[str, object]]:
        cls = type(value)
        is_open = isinstance(value, (nn.Module, torch.optim.Optimizer, types.SimpleNamespace))
        if is_open or cls.__module__.split(".")[0] in _OWN:
            attributes = value.__dict__ if hasattr(value, "__dict__") else {}
            self.entries[f"{path}:attributes"] = list(attributes)
            for name, entry in attributes.items():
                yield f"{path}.{name}", entry
            for slot in getattr(cls, "__slots__", ()):
                if hasattr(value, slot):
                    yield f"{path}.{slot}", getattr(value, slot)
        if cls.__module__.split(".")[0] in _OWN[:2]:
            yield f"{path}:of class", cls

    def _of_tensor(self, path: str, value: Tensor) -> Iterator[tuple[str, object]]:
        if isinstance(value, nn.parameter.UninitializedTensorMixin):
            return
        look: tuple[object, ...] = (value.dtype, value.shape, value.requires_grad)
        if not value.is_inference():
            look += (value._version,)
        if value.layout is torch.strided and not value.is_meta:
            storage = value.untyped_storage()
            look += (value.stride(), value.storage_offset(), storage._cdata, _contents(storage))
        elif value.layout is torch.sparse_coo:
            yield f"{path}:indices", value._indices().tolist()
            look += (str(value._values().tolist()),)
        self.entries[f"{path}:look"] = look
        if value.is_leaf or value.retains_grad:
            yield f"{path}.grad", value.grad
        yield f"{path}:hooks", value._backward_hooks
        yield f"{path}:gradient hooks", getattr(value, "_post_accumulate_grad_hooks", None)
        for name, entry in vars(value).items():
            yield f"{path}.{name}", entry


def _contents(storage: torch.UntypedStorage) -> bytes:
    """As `bytes(storage)` has, which takes each byte by itself. Of a copy: a storage that NumPy has
    seen cannot be resized any more.
    """
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device)
    whole.set_(storage, 0, (storage.nbytes(),), (1,))  # type: ignore[call-overload]
    return bytes(whole.clone().cpu().numpy().tobytes())
