"""Changes what the call of one module does while the module stays the object it is.

Only the module's class changes, to a subclass made for the purpose whose `forward` is another.
Unlike a forward function that is put on the instance and refers back to it, a method finds its
module through `self`: a deepcopy, an unpickled module or a DataParallel replica runs on its own
parameters, and no reference cycle keeps the module alive. The subclass bears the original's name,
adds no state that state_dict or named_parameters would see, and leaves `__call__` alone, so that
hooks on the module run once, outside.

A module may have several changes, one subclass over the other: what its forward computes
(memopt.convert) innermost, then what is put around its forward, in the order in which it was put
there. Each can be taken away alone.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn, cast

import torch
from torch import nn

Forward = Callable[..., Any]


class Changed:
    """Mixin of the classes that changed modules get, ahead of the original class.

    Each kind of change is a direct subclass.
    """

    _memopt_who: ClassVar[str]
    """The function that makes the change, for error messages."""

    _memopt_undo: ClassVar[str]
    """What to do before the module can be scripted."""

    _memopt_attributes: ClassVar[tuple[str, ...]] = ()
    """Instance attributes without which the change is not there, copied with it."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # Stops here: an original class that registers its subclasses is not told of this one.
        pass

    @classmethod
    def _memopt_bases(cls, original: type[nn.Module], key: Any) -> tuple[type, ...]:
        """Of the subclass that is made of `original`."""
        return (cls, original)

    @classmethod
    def _memopt_forward(cls, generated: type, original: type[nn.Module], key: Any) -> Forward:
        """The forward of the subclass `generated`."""
        raise NotImplementedError

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
            (change, {name: attributes[name] for name in change.mixin._memopt_attributes})
            for change in changes(generated)
            if all(name in attributes for name in change.mixin._memopt_attributes)
        ]
        make, arguments, *state = reduced
        make, *arguments = (original if part is generated else part for part in (make, *arguments))
        return (_rebuild, (kept, make, *arguments), *state)


class Around(Changed):
    """A change that runs something around the forward, which stays."""

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
                # The change was taken away, and code that kept the method calls it still.
                return type(self).forward(self, *args, **kwargs)
            # super(): a class derived from this one later, as FSDP2 does, is left in place.
            plain: Any = super(generated, self)
            return call(self, self.__dict__.get(instance_forward, plain.forward), args, kwargs)

        return forward


@dataclass(frozen=True)
class Change:
    """One change of a module: which subclass its class is derived into."""

    mixin: type[Changed]
    key: Hashable = None
    """What else the subclass depends on."""


def changes(cls: type) -> list[Change]:
    """The changes that made `cls`, innermost first; none if it was not made here.

    A class that something else derived from a changed one (FSDP2, parametrizations) has none: the
    changes below it cannot be taken away.
    """
    found = []
    while _is_generated(cls):
        found.append(cls.__dict__["_memopt_change"])
        cls = cls.__dict__["_memopt_original"]
    return found[::-1]


def original_class(cls: type) -> type[nn.Module]:
    """The class that the changes were made to; `cls` itself if there are none."""
    while _is_generated(cls):
        cls = cls.__dict__["_memopt_original"]
    return cls


def set_changes(module: nn.Module, wanted: Sequence[Change]) -> None:
    """Give `module` the class with exactly these changes, innermost first.

    Raises:
        TypeError: the class allows no subclass.
    """
    cls = original_class(type(module))
    for change in wanted:
        cls = _generated_class(cls, change)
    # object's: a module may forward the setting of attributes to another (OptimizedModule).
    object.__setattr__(module, "__class__", cls)


def put_around(module: nn.Module, change: Change) -> None:
    """Add a change of the kind Around; the module has none of its mixin yet."""
    mixin = cast("type[Around]", change.mixin)
    set_changes(module, [*changes(type(module)), change])
    if "forward" in module.__dict__:
        module.__dict__[mixin._memopt_instance_forward] = module.__dict__.pop("forward")


def take_away(module: nn.Module, mixin: type[Changed]) -> None:
    """Take the changes of this kind away; `changes(type(module))` has one."""
    before = changes(type(module))
    set_changes(module, [change for change in before if change.mixin is not mixin])
    for name in mixin._memopt_attributes:
        module.__dict__.pop(name, None)
    if not issubclass(mixin, Around):
        return
    forward = module.__dict__.pop(mixin._memopt_instance_forward, None)
    if forward is None:
        return
    index = next(i for i, change in enumerate(before) if change.mixin is mixin)
    for above in before[index + 1 :]:
        # What runs around this change ran around the forward of the instance too.
        if issubclass(above.mixin, Around):
            module.__dict__.setdefault(above.mixin._memopt_instance_forward, forward)
            return
    module.__dict__.setdefault("forward", forward)


@contextmanager
def unchanged_on_error(model: nn.Module) -> Iterator[None]:
    """If the scope raises, every module of `model` has the class and attributes again that it had
    before.
    """
    before = [(m, type(m), dict(m.__dict__)) for m in model.modules()]
    try:
        yield
    except BaseException:
        for module, cls, attributes in before:
            object.__setattr__(module, "__class__", cls)
            module.__dict__.clear()
            module.__dict__.update(attributes)
        raise


def check_can_change(who: str, argument: str, module: object) -> None:
    """Raises TypeError, in the name of the function `who`, for what is no module of Python."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"{who}: {argument} must be an nn.Module, got {type(module).__name__}")
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(
            f"{who}: {argument} must not be a ScriptModule (TorchScript runs without "
            f"Python), got {type(module).__name__}"
        )


def _rebuild(
    kept: list[tuple[Change, dict[str, Any]]], make: Callable[..., nn.Module], *arguments: Any
) -> Any:
    """Make the object that a changed module was reduced to. Pickles contain this name."""
    module = make(*arguments)
    if kept and not issubclass(type(module), Changed):
        set_changes(module, [change for change, _ in kept])
        for _, attributes in kept:
            module.__dict__.update(attributes)
    return module


def _is_generated(cls: type) -> bool:
    """Whether `cls` was made here; a class derived from such a one was not."""
    return "_memopt_change" in cls.__dict__


# One subclass per class and change, kept for as long as a module has it.
_generated_classes: weakref.WeakKeyDictionary[
    type[nn.Module], dict[Change, weakref.ref[type[nn.Module]]]
] = weakref.WeakKeyDictionary()


def _generated_class(original: type[nn.Module], change: Change) -> type[nn.Module]:
    of_original = _generated_classes.setdefault(original, {})
    ref = of_original.get(change)
    if ref is not None and (known := ref()) is not None:
        return known
    namespace = {
        "__doc__": original.__doc__,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "_memopt_change": change,
        "_memopt_original": original,
    }
    try:
        generated = cast(
            "type[nn.Module]",
            types.new_class(
                original.__name__,
                change.mixin._memopt_bases(original, change.key),
                exec_body=lambda ns: ns.update(namespace),
            ),
        )
    except TypeError as error:
        raise TypeError(
            f"{change.mixin._memopt_who.split(':')[0]}: module must have a class that can be "
            f"subclassed, got {original.__name__}"
        ) from error
    forward = change.mixin._memopt_forward(generated, original, change.key)
    generated.forward = functools.wraps(original.forward)(forward)
    of_original[change] = weakref.ref(generated)
    return generated
