"""All that a call can be seen to use: what its modules, arguments and functions hold, deep inside.

The walk goes into containers, into what functions close over, have as defaults and name as globals
of their own file, into hooks of modules and of tensors, and into objects of the user's classes and
these classes. It stops at what is the library's own: Python's, NumPy's, memopt's, and PyTorch's but
for modules, optimizers and other objects. What it finds is noted as it is at that moment.
"""

from __future__ import annotations

import array
import dis
import enum
import functools
import gc
import io
import queue
import random
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from memopt._compat import is_compiled, sharding_groups, wraps_tensors
from memopt._function_code import codes_in, others_attributes, plain_function
from memopt.memory import containers as kept
from memopt.memory.containers import Restore
from memopt.memory.garbage import no_collection
from memopt.memory.generators import kept_generator
from memopt.memory.iterators import LentIterators, is_iterator_class, reduced


@dataclass
class Reached:
    """The objects that were found."""

    tensors: list[Tensor] = field(default_factory=list)
    objects: list[Restore] = field(default_factory=list)
    generators: list[Restore] = field(default_factory=list)
    iterators: LentIterators = field(default_factory=lambda: LentIterators((), ()))
    """Iterators, which cannot be put back: a run gets copies."""
    steps_in_backward: bool = False
    """Whether a tensor has a hook that runs when its gradient is there: an optimizer may step."""
    is_sharded: bool = False
    """Whether FSDP2 fills and releases the memory of whole parameters, and remembers which are."""
    is_compiled: bool = False
    """Whether something runs without PyTorch's dispatcher seeing each operator."""


def reached(roots: Iterable[object]) -> Reached:
    """Finds these objects and all that they hold."""
    walk = _Walk()
    for root in (*roots, *kept.GLOBAL_HOOKS):
        walk.push(root)
    with no_collection():
        while walk.todo:
            walk.visit(walk.todo.pop())
        walk.leave_alone()
        walk.found.iterators = LentIterators(walk.iterators, list(walk.seen.values()))
    return walk.found


class _Walk:
    def __init__(self) -> None:
        self.found = Reached()
        self.todo: list[Any] = []
        self.seen: dict[int, object] = {}  # held, so that no id is used twice
        self.iterators: list[Any] = []
        self._dicts: dict[int, Restore] = {}
        self._left_alone: set[int] = set()

    def push(self, value: object) -> None:
        if type(value) not in _ATOMS and id(value) not in self.seen:
            self.seen[id(value)] = value
            self.todo.append(value)

    def leave_alone(self) -> None:
        """The dicts that are others' to change, which the walk may reach before it knows that."""
        others = {self._dicts[key] for key in self._left_alone if key in self._dicts}
        if others:
            self.found.objects = [one for one in self.found.objects if one not in others]

    def visit(self, value: Any) -> None:
        visit = _visit_of(type(value))  # type: ignore[arg-type]
        if visit is not None:
            visit(self, value)

    def _tensor(self, value: Tensor) -> None:
        self.found.tensors.append(value)
        self._object(value)  # any tensor may be given attributes
        if value.is_leaf or value.retains_grad:
            self.push(value.grad)
        for hooks in (value._backward_hooks, getattr(value, "_post_accumulate_grad_hooks", None)):
            if hooks:
                self.found.steps_in_backward |= value.is_leaf
                self.push(hooks)
        if wraps_tensors(value):
            for name in value.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
                self.push(getattr(value, name))

    def _container(self, value: Any) -> None:
        found = self.found.objects
        if isinstance(value, dict):
            self._dicts[id(value)] = restore = kept.kept_dict(value)
            found.append(restore)
            self._pairs(dict.items(value))
        elif isinstance(value, (bytearray, array.array)):
            found.append(kept.kept_bytes(value))
        else:
            if isinstance(value, list):
                found.append(kept.kept_list(value))
            elif isinstance(value, deque):
                found.append(kept.kept_deque(value))
            elif isinstance(value, set):
                found.append(kept.kept_set(value))
            self._all(value)
        if type(value) not in _PLAIN:  # a class of the user's, which has attributes too
            self._object(value)

    def _cell(self, cell: types.CellType) -> None:
        self.found.objects.append(kept.kept_cell(cell))
        self.push(kept.content_of(cell))

    def _method(self, value: Any) -> None:
        if not isinstance(value.__self__, types.ModuleType):
            self.push(value.__self__)
        self.push(getattr(value, "__func__", None))

    def _wrapped_method(self, value: Any) -> None:
        self.push(value.__func__)

    def _property(self, value: property) -> None:
        self._all((value.fget, value.fset, value.fdel))

    def _partial(self, value: functools.partial[Any]) -> None:
        self._all((value.func, value.args, value.keywords, vars(value)))

    def _cached(self, value: Any) -> None:
        self.found.objects.append(kept.kept_cache(value))
        self.push(value.__wrapped__)

    def _reference(self, value: weakref.ref[Any]) -> None:
        self.push(value())

    def _weak(self, value: Any) -> None:
        self.found.objects.append(kept.kept_weak(value))
        self.push(list(value) if isinstance(value, weakref.WeakSet) else dict(value))

    def _iterator(self, value: Any) -> None:
        self.iterators.append(value)
        self._all(reduced(value))

    def _of_thread(self, value: threading.local) -> None:
        self.push(vars(value))  # this thread's

    def _stream(self, value: Any) -> None:
        if not value.closed:
            self.found.objects.append(kept.kept_stream(value))

    def _proxy(self, value: types.MappingProxyType[Any, Any]) -> None:
        self._all(gc.get_referents(value))  # the mapping, which it does not hand out

    def _memory(self, value: memoryview) -> None:
        try:
            self.push(value.obj)
        except ValueError:  # released
            return

    def _numbers(self, value: Any) -> None:
        if getattr(getattr(value, "dtype", None), "hasobject", False):
            self.push(value.tolist())
        if kept.is_array(value):
            self.found.objects.append(kept.kept_array(value))
        elif (generator := kept_generator(value)) is not None:
            self.found.generators.append(generator)
        elif _is_open(type(value)):  # type: ignore[arg-type]
            self._object(value)

    def _all(self, values: Iterable[object]) -> None:
        for value in values:
            self.push(value)

    def _pairs(self, items: Iterable[tuple[object, object]]) -> None:
        for key, value in items:
            self.push(key)
            self.push(value)

    def _function(self, function: types.FunctionType) -> None:
        if (function.__module__ or "").startswith("memopt."):
            return  # hooks of a measurement that is under way
        attributes = others_attributes(function)
        plain = plain_function(function)
        if attributes or plain is not function:
            self.found.objects.append(kept.kept_attributes(function))
        if plain is not function:
            self.push(plain)
            return
        self._all(function.__closure__ or ())
        self._all((function.__defaults__, function.__kwdefaults__))
        if attributes:
            self._pairs(attributes.items())
            # What torch.compiler.disable wraps has the attribute too, and runs as it is written.
            if "_torchdynamo_orig_callable" in attributes:
                self.found.is_compiled |= not attributes.get("_torchdynamo_disable", False)
        if not _is_foreign(function.__module__ or ""):
            return
        names, assigned = _globals_of(function.__code__)
        namespace = function.__globals__
        if assigned:
            self.found.objects.append(kept.kept_names(namespace, assigned))
        for name in names:
            value = namespace.get(name)
            if type(value) not in _ATOMS and _is_state(value, namespace):
                self.push(value)

    def _class(self, cls: type) -> None:
        if not _is_foreign(cls.__module__):
            return
        self.found.objects.append(kept.kept_class(cls))
        for base in cls.__bases__:
            self.push(base)
        for name, value in vars(cls).items():
            if name not in _NAMES_OF_CLASSES:
                self.push(value)

    def _object(self, value: Any) -> None:
        is_sharded = hasattr(type(value), "_get_fsdp_state")  # FSDP2's: the user's module itself
        if type(value).__module__.startswith(_OF_RANKS) and not is_sharded:
            # A wrapper (DistributedDataParallel, FSDP) has a state in C++ that goes with its own.
            self.push(value._modules if isinstance(value, nn.Module) else None)
            return
        attributes = kept.attributes_of(value) or {}
        self.found.objects.append(kept.kept_object(value))
        self._pairs(attributes.items())
        self._all(entry for _, entry in kept.slots_of(value))
        self.push(type(value))
        if is_sharded:  # by a class of PyTorch's, made of the user's
            self._all(type(value).__bases__)
            self._sharded(value)
        if isinstance(value, nn.Module):
            self._module(value)

    def _module(self, module: nn.Module) -> None:
        if isinstance(module, torch.jit.ScriptModule):
            self.found.objects.append(kept.kept_script(module))
            self.push([*module.parameters(), *module.buffers()])
            return
        if is_compiled(module):
            self.found.is_compiled = True

    def _sharded(self, module: nn.Module) -> None:
        """Sharded and whole parameters are there in turn. The sharded ones have the gradients."""
        self.found.is_sharded = True
        self._left_alone.update(id(inner._parameters) for inner in module.modules())
        for group in sharding_groups(module):
            self._all(one.sharded_param for one in group.fsdp_params)


_ATOMS = frozenset(
    (
        *(int, float, bool, str, bytes, complex, type(None), type(Ellipsis), slice, range, object),
        *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
        *(types.CodeType, types.ModuleType, types.FrameType, types.UnionType, types.GenericAlias),
        *(types.GetSetDescriptorType, types.MemberDescriptorType, types.WrapperDescriptorType),
        *(types.MethodDescriptorType, types.ClassMethodDescriptorType, types.MethodWrapperType),
    )
)
# Objects of Python's and PyTorch's classes that are there to hold what a user puts into them.
_OBJECTS = (
    *(nn.Module, torch.optim.Optimizer),
    *(types.SimpleNamespace, queue.Queue),
)
_OF_RANKS = ("torch.nn.parallel.", "torch.distributed.")
_PLAIN = frozenset((dict, list, set, deque, bytearray, array.array, tuple, frozenset))
_WEAK = (weakref.WeakSet, weakref.WeakKeyDictionary, weakref.WeakValueDictionary)
_NAMES_OF_CLASSES = frozenset(("__dict__", "__weakref__", "__doc__", "__module__", "_abc_impl"))


def _is_foreign(module: str) -> bool:
    """Whether a module of this name is neither a part of Python, NumPy, PyTorch nor memopt."""
    root = module.partition(".")[0]
    return root not in ("torch", "memopt", "numpy") and root not in sys.stdlib_module_names


_Visit = Callable[[_Walk, Any], None]
_VISITS: tuple[tuple[Any, _Visit], ...] = (
    (Tensor, _Walk._tensor),
    ((dict, list, set, deque, bytearray, array.array, tuple, frozenset), _Walk._container),
    (types.FunctionType, _Walk._function),
    (types.CellType, _Walk._cell),
    ((types.MethodType, types.BuiltinMethodType), _Walk._method),
    ((staticmethod, classmethod), _Walk._wrapped_method),
    (property, _Walk._property),
    (functools.partial, _Walk._partial),
    (functools._lru_cache_wrapper, _Walk._cached),
    (weakref.ref, _Walk._reference),
    (_WEAK, _Walk._weak),
    (type, _Walk._class),
    (threading.local, _Walk._of_thread),
    ((io.StringIO, io.BytesIO), _Walk._stream),
    (types.MappingProxyType, _Walk._proxy),
    (memoryview, _Walk._memory),
)


@functools.lru_cache(maxsize=4096)
def _visit_of(cls: type) -> _Visit | None:
    """The part of the walk for objects of a class; None: it does not go into them."""
    if issubclass(cls, types.ModuleType):  # one that loads its parts when they are asked for
        return None
    for kinds, visit in _VISITS:
        if issubclass(cls, kinds):
            return visit
    if is_iterator_class(cls):
        return _Walk._iterator
    if issubclass(cls, (torch.Generator, random.Random)) or any(map(_is_numpys, cls.__mro__)):
        return _Walk._numbers
    return _Walk._object if _is_open(cls) else None  # type: ignore[arg-type]


def _is_numpys(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == "numpy"


@functools.lru_cache(maxsize=4096)
def _is_open(cls: type) -> bool:
    """Whether the walk goes into objects of a class."""
    if issubclass(cls, _OBJECTS):
        return True
    if issubclass(cls, (enum.Enum, BaseException)):
        return False
    module = cls.__module__ or ""
    if module.startswith(("torch.nn.", "torch.optim.", "torch.amp.")):
        return not module.startswith(_OF_RANKS)
    return module == "collections" or _is_foreign(module)


def _is_state(value: Any, namespace: dict[str, Any]) -> bool:
    """Whether a global of a function may be changed by it. Functions, classes and objects of other
    files are left alone: from there all of a library would be reached.
    """
    if isinstance(value, (Tensor, nn.Module, list, set, deque, bytearray, array.array)):
        return True
    if isinstance(value, dict):
        return value is not namespace
    if isinstance(value, types.FunctionType):
        return value.__globals__ is namespace
    if isinstance(value, types.ModuleType):
        return False
    file = namespace.get("__name__")
    if isinstance(value, type):
        return value.__module__ == file
    if isinstance(value, functools._lru_cache_wrapper):
        return bool(value.__module__ == file)
    return (
        type(value).__module__ == file
        or kept.is_array(value)
        or isinstance(value, (torch.Generator, threading.local, *_WEAK, *_OBJECTS))
        or is_iterator_class(type(value))
        or type(value).__module__ in ("collections", "random", "numpy.random._generator")
    )


@functools.lru_cache(maxsize=1 << 16)
def _globals_of(code: types.CodeType) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names that a function, and those inside it, may look up as globals, and those it assigns."""
    names: dict[str, None] = {}
    assigned: dict[str, None] = {}
    for part in codes_in(code):
        names.update(dict.fromkeys(part.co_names))
        if _STORES & set(part.co_code[::2]):
            assigned.update(
                (step.argval, None)
                for step in dis.get_instructions(part)
                if step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL")
            )
    return tuple(names), tuple(assigned)


_STORES = {dis.opmap["STORE_GLOBAL"], dis.opmap["DELETE_GLOBAL"]}
