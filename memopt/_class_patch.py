"""Class patches: another forward for one module, which stays the object that it is. Only modules
that are themselves replaced or wrapped get one; scopes around calls are hooks (_call_hooks.py).

Only the module's class becomes another: a subclass that is made here and has its own `forward`.
Unlike a forward function that is put on the instance and refers back to it, a method finds its
module through `self`: a deepcopy, an unpickled module or a DataParallel replica runs on its own
parameters, and no reference cycle keeps the module alive. The subclass bears the original's name,
adds no state that state_dict or named_parameters would see, and leaves `__call__` alone, so that
hooks on the module run once, outside.

A module may have several patches, one subclass over the other: innermost the one that replaces its
forward (memopt.convert), then those that wrap it, in the order in which they were made. Each can be
removed alone.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn, cast

import torch
from torch import nn

Forward = Callable[..., Any]


class Patched:
    """Mixin of the classes that patched modules get, ahead of the original class.

    Each kind of patch is a direct subclass.
    """

    _memopt_who: ClassVar[str]
    """The function that makes the patch, for error messages."""

    _memopt_undo: ClassVar[str]
    """What to do before the module can be scripted."""

    _memopt_attributes: ClassVar[tuple[str, ...]] = ()
    """Instance attributes that belong to the patch: copied with it, and removed with it."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # Stops here: an original class that registers its subclasses is not told of this one.
        pass

    @classmethod
    def _memopt_bases(cls, original: type[nn.Module], key: Any) -> tuple[type, ...]:
        """The bases of the subclass that is made of `original`."""
        return (cls, original)

    @classmethod
    def _memopt_forward(cls, generated: type, original: type[nn.Module], key: Any) -> Forward:
        """The forward of the subclass `generated`."""
        raise NotImplementedError

    def __setattr__(self, name: str, value: Any) -> None:
        """Code that wraps the forward for a time, as accelerate's hooks do, puts the one back that
        it found. If that is a class's own, it is meant as it is now, with the patches of today. A
        forward that was on the instance when it was found stays; one that came since goes.
        """
        cls = _class_of_forward(self, value) if name == "forward" else None
        if cls is None:
            super().__setattr__(name, value)
            return
        self.__dict__.pop("forward", None)
        for patch in patches_of(type(self)):
            if not issubclass(patch.mixin, ForwardWrapper):
                continue
            if not issubclass(cls, patch.mixin):  # it was put on the module since
                self.__dict__.pop(patch.mixin._memopt_instance_forward, None)

    def __prepare_scriptable__(self) -> NoReturn:
        """torch.jit.script calls this first; it would compile the original forward, if anything."""
        raise TypeError(
            f"{self._memopt_who} module must not be scripted (TorchScript runs without Python), "
            f"got {type(self).__name__} in torch.jit.script; {self._memopt_undo} the model before"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Reduce as the original class does, since the subclass cannot be imported by name."""
        generated = type(self)
        reduced = super().__reduce_ex__(protocol)
        if isinstance(reduced, str) or not _is_generated(generated):
            return reduced
        original = original_class(generated)
        attributes = self.__dict__
        kept = [
            (patch, {name: attributes[name] for name in patch.mixin._memopt_attributes})
            for patch in patches_of(generated)
            if all(name in attributes for name in patch.mixin._memopt_attributes)
        ]
        make, arguments, *state = reduced
        make, *arguments = (original if part is generated else part for part in (make, *arguments))
        return (_rebuild, (kept, make, *arguments), *state)


class ForwardWrapper(Patched):
    """A patch that wraps the forward in something else."""

    _memopt_instance_forward: ClassVar[str]
    """The attribute where a forward that was set on the instance before is kept."""

    @staticmethod
    def _memopt_call(
        module: Any, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What the module's forward does now; `forward` is what it did."""
        raise NotImplementedError

    @classmethod
    def _memopt_forward(cls, generated: type, original: type[nn.Module], key: Any) -> Forward:
        call, instance_forward = cls._memopt_call, cls._memopt_instance_forward

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(self, generated):
                # The patch was removed, and code that kept the method still calls it.
                return type(self).forward(self, *args, **kwargs)
            # super(): a class derived from this one later, as FSDP2 does, is left in place.
            plain: Any = super(generated, self)
            return call(self, self.__dict__.get(instance_forward, plain.forward), args, kwargs)

        return forward


@dataclass(frozen=True)
class ClassPatch:
    """One patch of a module: which subclass its class is derived into."""

    mixin: type[Patched]
    key: Hashable = None
    """What else the subclass depends on."""


def patches_of(cls: type) -> list[ClassPatch]:
    """The patches that made `cls`, innermost first; none if it was not made here.

    A class that something else derived from a patched one (FSDP2, parametrizations) has none: the
    patches below it cannot be removed.
    """
    found = []
    while _is_generated(cls):
        found.append(cls.__dict__["_memopt_patch"])
        cls = cls.__dict__["_memopt_original"]
    return found[::-1]


def original_class(cls: type) -> type[nn.Module]:
    """The class that was patched; `cls` itself if there are no patches."""
    while _is_generated(cls):
        cls = cls.__dict__["_memopt_original"]
    return cls


def set_patches(module: nn.Module, wanted: Sequence[ClassPatch]) -> None:
    """Give `module` the class with exactly these patches, innermost first.

    Raises:
        TypeError: the class allows no subclass.
    """
    cls = original_class(type(module))
    for patch in wanted:
        cls = _generated_class(cls, patch)
    # object's: a module may forward the setting of attributes to another (OptimizedModule).
    object.__setattr__(module, "__class__", cls)


def wrap_forward(module: nn.Module, patch: ClassPatch) -> None:
    """Add a patch whose mixin is a ForwardWrapper; the module has none of that mixin yet."""
    mixin = cast("type[ForwardWrapper]", patch.mixin)
    set_patches(module, [*patches_of(type(module)), patch])
    if "forward" in module.__dict__:
        module.__dict__[mixin._memopt_instance_forward] = module.__dict__.pop("forward")


def remove_patch(module: nn.Module, mixin: type[Patched]) -> None:
    """Remove the patch with this mixin; `patches_of(type(module))` has one."""
    before = patches_of(type(module))
    set_patches(module, [patch for patch in before if patch.mixin is not mixin])
    for name in mixin._memopt_attributes:
        module.__dict__.pop(name, None)
    if not issubclass(mixin, ForwardWrapper):
        return
    forward = module.__dict__.pop(mixin._memopt_instance_forward, None)
    if forward is None:
        return
    index = next(i for i, patch in enumerate(before) if patch.mixin is mixin)
    for above in before[index + 1 :]:
        # What wraps this patch wrapped the forward of the instance too.
        if issubclass(above.mixin, ForwardWrapper):
            module.__dict__.setdefault(above.mixin._memopt_instance_forward, forward)
            return
    module.__dict__.setdefault("forward", forward)


@contextmanager
def restored_on_error(model: nn.Module) -> Iterator[None]:
    """If the scope raises, every module of `model` has the class, attributes, submodules and hooks
    again that it had before.
    """
    before = [
        (m, type(m), dict(m.__dict__), [(d, dict(d)) for d in m.__dict__.values() if _is_dict(d)])
        for m in model.modules()
        if not isinstance(m, torch.jit.ScriptModule)  # nothing changes these
    ]
    try:
        yield
    except BaseException:
        for module, cls, attributes, dictionaries in before:
            object.__setattr__(module, "__class__", cls)
            for now, then in (*dictionaries, (module.__dict__, attributes)):
                now.clear()
                now.update(then)
        raise


def check_can_patch(who: str, argument: str, module: object) -> None:
    """Raises TypeError, in the name of the function `who`, unless `module` is a Python module."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"{who}: {argument} must be an nn.Module, got {type(module).__name__}")
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(
            f"{who}: {argument} must not be a ScriptModule (TorchScript runs without "
            f"Python), got {type(module).__name__}"
        )


def _rebuild(
    kept: list[tuple[ClassPatch, dict[str, Any]]], make: Callable[..., nn.Module], *arguments: Any
) -> Any:
    """Make the object that a patched module was reduced to. Pickles contain this name."""
    module = make(*arguments)
    if kept and not issubclass(type(module), Patched):
        set_patches(module, [patch for patch, _ in kept])
        for _, attributes in kept:
            module.__dict__.update(attributes)
    return module


def _is_dict(value: object) -> bool:
    return type(value) in (dict, OrderedDict)


def _class_of_forward(module: object, value: object) -> type | None:
    """The class of the module whose forward `value` is; None if it is another function."""
    if not isinstance(value, types.MethodType) or value.__self__ is not module:
        return None
    for cls in reversed(type(module).__mro__):
        forward = cls.__dict__.get("forward")
        while forward is not None:
            if forward is value.__func__:
                return cls
            # One that a patch wraps is found in a class further up, which comes first here.
            forward = getattr(forward, "__wrapped__", None)
    return None


def _is_generated(cls: type) -> bool:
    """Whether `cls` was made here; a class derived from such a one was not."""
    return "_memopt_patch" in cls.__dict__


def _of_graph_modules() -> dict[str, Any]:
    """Methods of patched torch.fx.GraphModules. Each of these has a class of its own, into which
    `recompile` writes a forward, and which copies are derived from: that is the original class.
    """

    def as_original(self: Any, method: str, *args: Any) -> Any:
        patched = type(self)
        object.__setattr__(self, "__class__", original_class(patched))
        try:
            return getattr(self, method)(*args)
        finally:
            object.__setattr__(self, "__class__", patched)

    def copied(self: Any, method: str, *args: Any) -> Any:
        copy = as_original(self, method, *args)
        for name, value in self.__dict__.items():
            if name.startswith("_memopt"):
                copy.__dict__.setdefault(name, value)
        set_patches(copy, patches_of(type(self)))
        return copy

    return {
        "recompile": lambda self: as_original(self, "recompile"),
        "__copy__": lambda self: copied(self, "__copy__"),
        "__deepcopy__": lambda self, memo: copied(self, "__deepcopy__", memo),
    }


# One subclass per class and patch, kept for as long as a module has it.
_generated_classes: weakref.WeakKeyDictionary[
    type[nn.Module], dict[ClassPatch, weakref.ref[type[nn.Module]]]
] = weakref.WeakKeyDictionary()


def _generated_class(original: type[nn.Module], patch: ClassPatch) -> type[nn.Module]:
    of_original = _generated_classes.setdefault(original, {})
    ref = of_original.get(patch)
    if ref is not None and (known := ref()) is not None:
        return known
    namespace: dict[str, Any] = {
        **(_of_graph_modules() if issubclass(original, torch.fx.GraphModule) else {}),
        "__doc__": original.__doc__,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "_memopt_patch": patch,
        "_memopt_original": original,
    }
    try:
        generated = cast(
            "type[nn.Module]",
            types.new_class(
                original.__name__,
                patch.mixin._memopt_bases(original, patch.key),
                exec_body=lambda ns: ns.update(namespace),
            ),
        )
    except TypeError as error:
        raise TypeError(
            f"{patch.mixin._memopt_who.split(':')[0]}: module must have a class that can be "
            f"subclassed, got {original.__name__}"
        ) from error
    forward = patch.mixin._memopt_forward(generated, original, patch.key)
    type.__setattr__(generated, "forward", functools.wraps(original.forward)(forward))
    of_original[patch] = weakref.ref(generated)
    return generated
