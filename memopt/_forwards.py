"""Something else around the forward of one module, which stays as it is: its class, its methods and
its attributes are what they were, since libraries compare them.

What runs around the forward is an object in the module's `__dict__` (`Around`), so that a deepcopy,
an unpickled module or a DataParallel replica has it as well, and runs on its own parameters. The
function that is the class's forward asks for it (_function_code.py). So hooks run once, outside;
`module.forward(x)` is what `module(x)` is; torch.compile traces it like the user's own code; and no
reference cycle keeps a module alive.

A forward that was set on the instance, or that is no Python function, is put into an
`InstanceForward`, which takes its place on the instance.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import types
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

from memopt._class_patch import Patch, class_with, original_class, patch_of
from memopt._function_code import AROUND, ask_for, asks, function_of

AroundCall = Callable[[nn.Module, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

# The same object again, under the name of what torch.jit.script calls first.
_SCRIPTED = "__prepare_scriptable__"


class Around:
    """The object that runs around a module's forward."""

    def __init__(
        self,
        cls: type[nn.Module] | None,
        name: str,
        call: AroundCall,
        settings: Any,
        function: types.FunctionType | None = None,
    ) -> None:
        """
        Args:
            cls: the module's; None where the class's function is not asked for this.
            name: the class's, for messages.
            function: the one that is to ask; None: the class's.
        """
        self.cls, self.name, self.call, self.settings = cls, name, call, settings
        self.function: types.FunctionType | None = None
        if cls is not None:
            ask_for(self, cls, function)

    def __deepcopy__(self, memo: dict[int, Any]) -> Around:
        """Asked by the function that asks for this one: where the class has got another meanwhile,
        that one runs around neither.
        """
        settings = copy.deepcopy(self.settings, memo)
        return Around(self.cls, self.name, self.call, settings, self.function)

    def __call__(self) -> NoReturn:
        """torch.jit.script calls this before it compiles a module; it would compile the forward
        alone.
        """
        raise TypeError(
            "checkpoint_wrapper: a wrapped module must not be scripted (TorchScript runs without "
            f"Python), got {self.name} in torch.jit.script; unwrap the model before"
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Around) and self._made_of() == other._made_of()

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> Any:
        return _around, self._made_of()

    def is_for(self, module: nn.Module, function: types.FunctionType) -> bool:
        """Answer no for a function that is called by super(), from the one that asks; and not for
        one that an `InstanceForward` calls.
        """
        if function is not self.function:
            if type(module).__dict__.get("forward") is not function:
                return False
            # The class has got another, as where cloudpickle loads it once more.
            if not torch.compiler.is_compiling():
                ask_for(self, type(module))
        return not isinstance(module.__dict__.get("forward"), InstanceForward)

    def _made_of(self) -> tuple[Any, ...]:
        # A class by what it was made of: one that memopt made cannot be imported by name.
        cls = None if self.cls is None else (original_class(self.cls), patch_of(self.cls))
        return cls, self.name, self.call, self.settings


def _around(cls: tuple[type[nn.Module], Patch | None] | None, *rest: Any) -> Around:
    """Make the object that was reduced to this: in another process the code is exchanged there.
    Pickles contain this name.
    """
    return Around(None if cls is None else class_with(*cls), *rest)


class InstanceForward:
    """A forward that was set on the instance, with something around it."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any] | None) -> None:
        """
        Args:
            module: not held.
            forward: None: the class's, which is no Python function.
        """
        self.module = weakref.ref(module)
        self.forward = forward
        if forward is not None:
            functools.update_wrapper(self, forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module()
        assert module is not None, "a module's forward was called after the module was gone"
        forward = self.forward
        if forward is None:
            forward = type(module).forward.__get__(module, type(module))
        around = around_forward(module)
        # Nothing, if that was taken off and other code, which had kept this object, put it back.
        if around is None:
            return forward(*args, **kwargs)
        return around.call(module, forward, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> InstanceForward:
        module = self.module()
        owner: Any = memo.get(id(module), module)
        return InstanceForward(owner, copy.deepcopy(self.forward, memo))

    def __reduce__(self) -> Any:
        module = self.module()
        if isinstance(module, torch.fx.GraphModule):  # pickled by its graph, without attributes
            return type(None), ()
        return InstanceForward, (module, self.forward)


def put_around_forward(module: nn.Module, call: AroundCall, settings: Any) -> None:
    """Run `call(module, forward, args, kwargs)` in place of `module.forward(*args, **kwargs)`.

    What was around it before goes. Copies and pickles of the module have it too.

    Args:
        settings: for `around_forward(module).settings`.
    """
    kind = type(module)
    asks = function_of(kind) is not None
    there = module.__dict__.get("forward")
    # One that was set while something was around the forward calls what it found.
    is_to_be_taken = there is not None and around_forward(module) is None
    if not isinstance(there, InstanceForward) and (is_to_be_taken or (there is None and not asks)):
        module.__dict__["forward"] = InstanceForward(module, there)
    _set(module, Around(kind if asks else None, kind.__name__, call, settings))
    if _decides_what_is_pickled(kind):
        copyreg.dispatch_table.setdefault(kind, _reduced)


def _set(module: nn.Module, around: Around) -> None:
    # Not by setattr: a module may forward that to another (OptimizedModule).
    module.__dict__.update({AROUND: around, _SCRIPTED: around})


def _decides_what_is_pickled(cls: type[nn.Module]) -> bool:
    """Whether pickle, and deepcopy, may leave out an attribute that the class does not know."""
    ours = ("__reduce_ex__", "__reduce__", "__getstate__")
    return any(getattr(cls, name, None) is not getattr(nn.Module, name, None) for name in ours)


def _reduced(module: nn.Module) -> Any:
    """Reduce a module, with what is around its forward."""
    reduced = module.__reduce_ex__(4)
    around = around_forward(module)
    if around is None or isinstance(reduced, str):
        return reduced
    make, arguments, *state = reduced
    return (_made_with, (around, make, *arguments), *state)


def _made_with(around: Around, make: Callable[..., nn.Module], *arguments: Any) -> nn.Module:
    """Make the object that a module was reduced to. Pickles contain this name."""
    module = make(*arguments)
    _set(module, around)
    return module


def take_from_forward(module: nn.Module) -> None:
    """Undo `put_around_forward`; nothing if it was not called."""
    for name in (AROUND, _SCRIPTED):
        module.__dict__.pop(name, None)
    there = module.__dict__.get("forward")
    if isinstance(there, InstanceForward):
        del module.__dict__["forward"]
        if there.forward is not None:
            module.__dict__["forward"] = there.forward


def around_forward(module: nn.Module) -> Around | None:
    """Return what is around the module's forward; None if nothing is."""
    around: Around | None = module.__dict__.get(AROUND)
    return around


def has_another_forward(module: nn.Module) -> bool:
    """Whether it, or its class, has got another forward since something was put around the
    module's, which then runs only if that one calls the one before.
    """
    around = around_forward(module)
    if around is None or around.function is None:
        return False
    own = module.__dict__.get("forward")
    is_set = own is not None and not isinstance(own, InstanceForward)
    return is_set or not asks(around.function, type(module))


def keep_around(module: nn.Module) -> None:
    """Call this when `module` has got another class: what is around its forward stays."""
    around = around_forward(module)
    if around is not None:
        ask_for(around, type(module))


def is_ours(name: str) -> bool:
    """Whether memopt has put the attribute of this name on a module."""
    return name.startswith("_memopt_") or name == _SCRIPTED
