"""checkpoint_wrapper: a module whose every forward is a checkpointed region.

The module stays the object it is; only its class changes, to a subclass made for the purpose whose
`forward` runs the original one as a region. Unlike a forward function that is put on the instance
and refers back to it, a method finds its module through `self`: a deepcopy, an unpickled module or
a DataParallel replica runs on its own parameters, and no reference cycle keeps the module alive.
The subclass bears the original's name, adds no state that state_dict or named_parameters would see,
and leaves `__call__` alone, so that hooks on the module run once, outside the region.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch import nn

from memopt._extension import _C
from memopt.checkpoint.region import compiled_region

ModuleT = TypeVar("ModuleT", bound=nn.Module)

# Where a wrapped module keeps its settings, and its instance-level forward if it has one.
_SETTINGS = "_memopt_checkpoint_settings"
_INSTANCE_FORWARD = "_memopt_checkpoint_instance_forward"
# FairScale's name for it, since code outside reads it.
_COUNTER = "_checkpoint_fwd_counter"


@dataclass(frozen=True)
class Settings:
    """How a wrapped module runs its region."""

    offload_to_cpu: bool
    """Keep the region's input tensors in (pinned) host memory between forward and recompute."""

    maintain_forward_counter: bool
    """Count forwards that wait for their recompute on every submodule."""


def checkpoint_wrapper(
    module: ModuleT, offload_to_cpu: bool = False, maintain_forward_counter: bool = False
) -> ModuleT:
    """Make every forward of `module` a checkpointed region (see `memopt.checkpoint`).

    Wrapping a module again replaces its settings; `unwrap` undoes the wrapping. The module may be
    copied, pickled and saved like any other; a pickle of it needs memopt to load.

    Args:
        module: changed in place. A `forward` set on the instance is kept: the region runs it.
        offload_to_cpu: keep the tensors among the arguments in host memory until backward, pinned,
            with copies that do not block the host. Parameters, tensors that are on the CPU already,
            and expanded tensors stay where they are. Any object is taken by its truth value. No
            effect under `torch.compile`.
        maintain_forward_counter: keep an integer `_checkpoint_fwd_counter` on every submodule, +1
            with each forward of `module` and -1 with each recompute, for code that must know
            whether a forward is the last. Not kept under `torch.compile`.

    Returns:
        `module`, the same object.

    Raises:
        TypeError: `module` is no `nn.Module`, is a ScriptModule, or its class allows no subclass.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"checkpoint_wrapper: module must be an nn.Module, got {type(module).__name__}"
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(
            "checkpoint_wrapper: module must not be a ScriptModule (TorchScript runs without "
            f"Python), got {type(module).__name__}; wrap the module that was scripted"
        )
    if not _is_generated(type(module)):
        _change_class(module)
    if _SETTINGS not in module.__dict__ and "forward" in module.__dict__:
        module.__dict__[_INSTANCE_FORWARD] = module.__dict__.pop("forward")
    _set_settings(module, Settings(bool(offload_to_cpu), bool(maintain_forward_counter)))
    return module


def unwrap(module: ModuleT) -> ModuleT:
    """Undo `checkpoint_wrapper` on `module` and on all of its submodules.

    Modules that are not wrapped are left as they are.

    Returns:
        `module`, the same object.

    Raises:
        TypeError: `module` is not an `nn.Module`.
        RuntimeError: something else has changed the class of one of the modules since it was
            wrapped. None of them is unwrapped then.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"unwrap: module must be an nn.Module, got {type(module).__name__}")
    wrapped = [m for m in module.modules() if _is_generated(type(m))]
    for submodule in wrapped:
        if _Checkpointed not in type(submodule).__bases__:
            raise RuntimeError(
                "unwrap: module must have the class that checkpoint_wrapper gave it, got "
                f"{type(submodule).__name__}, a class derived from that one"
            )
    for submodule in wrapped:
        _unwrap_itself(submodule)
    return module


def _unwrap_itself(module: nn.Module) -> None:
    object.__setattr__(module, "__class__", _original(type(module)))
    _set_settings(module, None)
    forward = module.__dict__.pop(_INSTANCE_FORWARD, None)
    if forward is not None:
        module.__dict__.setdefault("forward", forward)


def class_before_wrapping(module: nn.Module) -> type[nn.Module]:
    """The class of `module`, or the one that it had before `checkpoint_wrapper` changed it."""
    return next(cls for cls in type(module).__mro__ if not _is_generated(cls))


class _Checkpointed:
    """Mixin of the classes that wrapped modules get, ahead of the original class."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # Stops here: an original class that registers its subclasses is not told of this one.
        pass

    def __prepare_scriptable__(self) -> NoReturn:
        """torch.jit.script calls this first; it would compile the original forward, if anything."""
        raise TypeError(
            "checkpoint_wrapper: a wrapped module must not be scripted (TorchScript runs without "
            f"Python), got {type(self).__name__} in torch.jit.script; unwrap the model before"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Reduce as the original class does, since the subclass cannot be imported by name."""
        generated = type(self)
        reduced = super().__reduce_ex__(protocol)
        if isinstance(reduced, str) or _Checkpointed not in generated.__bases__:
            return reduced
        make, arguments, *state = reduced
        make, *arguments = (
            _original(generated) if part is generated else part for part in (make, *arguments)
        )
        return (_rebuild, (self.__dict__.get(_SETTINGS), make, *arguments), *state)


def _rebuild(settings: Settings | None, make: Callable[..., nn.Module], *arguments: Any) -> Any:
    """Make the object that a wrapped module was reduced to. Pickles contain this name."""
    module = make(*arguments)
    if settings is not None and not _is_generated(type(module)):
        _change_class(module)
        module.__dict__[_SETTINGS] = settings
    return module


def _change_class(module: nn.Module) -> None:
    try:
        # object's: a module may forward the setting of attributes to another (OptimizedModule).
        object.__setattr__(module, "__class__", _checkpointed_class(type(module)))
    except TypeError as error:
        raise TypeError(
            "checkpoint_wrapper: module must have a class that can be subclassed, got "
            f"{type(module).__name__}"
        ) from error


# One subclass per class, kept for as long as a module has it.
_generated_classes: weakref.WeakKeyDictionary[type[nn.Module], weakref.ref[type[nn.Module]]] = (
    weakref.WeakKeyDictionary()
)


def _checkpointed_class(original: type[nn.Module]) -> type[nn.Module]:
    ref = _generated_classes.get(original)
    if ref is not None and (known := ref()) is not None:
        return known

    @functools.wraps(original.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # super(): a class derived from this one later, as FSDP2 does, is left in place.
        plain: Any = super(generated, self)
        return _forward(self, plain.forward, args, kwargs)

    namespace = {
        "forward": forward,
        "__doc__": original.__doc__,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
    }
    generated = cast(
        "type[nn.Module]",
        types.new_class(
            original.__name__, (_Checkpointed, original), exec_body=lambda ns: ns.update(namespace)
        ),
    )
    _generated_classes[original] = weakref.ref(generated)
    return generated


def _forward(
    module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    settings = module.__dict__.get(_SETTINGS)
    if settings is None:  # made by calling the class of a wrapped module
        return forward(*args, **kwargs)
    run = module.__dict__.get(_INSTANCE_FORWARD, forward)
    if torch.compiler.is_compiling():
        return compiled_region(run, args, kwargs)
    return _C.run_region(run, args, kwargs, _region_settings(settings), module)


@functools.cache
def _region_settings(settings: Settings) -> _C.RegionSettings:
    return _C.RegionSettings(
        offload_to_cpu=settings.offload_to_cpu,
        on_pass=_count if settings.maintain_forward_counter else None,
    )


def _set_settings(module: nn.Module, settings: Settings | None) -> None:
    before: Settings | None = module.__dict__.pop(_SETTINGS, None)
    if settings is not None:
        module.__dict__[_SETTINGS] = settings
    if settings is not None and settings.maintain_forward_counter:
        _count(module, 0)
    elif before is not None and before.maintain_forward_counter:
        for submodule in module.modules():
            submodule.__dict__.pop(_COUNTER, None)


def _count(module: nn.Module | None, step: int) -> None:
    assert module is not None
    for submodule in module.modules():
        submodule.__dict__[_COUNTER] = submodule.__dict__.get(_COUNTER, 0) + step


def _is_generated(cls: type) -> bool:
    """Whether `cls` is a class that wrapped modules get, or derived from one."""
    return issubclass(cls, _Checkpointed)


def _original(generated: type) -> type[nn.Module]:
    original: type[nn.Module] = generated.__bases__[1]
    return original
