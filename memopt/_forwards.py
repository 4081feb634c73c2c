"""Something else around the forward of one module, which stays as it is: its class, its methods and
its attributes are what they were, since libraries compare them.

What runs around the forward is an object in the module's `__dict__` (`Around`), so that a deepcopy,
an unpickled module or a DataParallel replica has it as well, and runs on its own parameters. The
function that is the class's forward stays the object that it is, with its signature, closure and
globals, but gets other code: a few lines that ask the module whether it has such an object. Modules
that have none run the code that was there, which is kept in a second function. So hooks run once,
outside; `module.forward(x)` is what `module(x)` is; torch.compile traces these lines like the
user's own; and no reference cycle keeps a module alive. When no module has such an object any more
the function has its own code again.

A forward that was set on the instance, or that is no Python function, is put into a `Forward`,
which takes its place on the instance.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import inspect
import secrets
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

from memopt._class_patch import ClassPatch, class_with, original_class, patch_of
from memopt._compat import compiles_now, forget_compiled_code

Call = Callable[[nn.Module, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

_AROUND = "_memopt_around_forward"
# The same object again, under the name of what torch.jit.script calls first.
_SCRIPTED = "__prepare_scriptable__"
# On a function whose code was exchanged: the function with its own, and weak references to the
# objects that it asks for, by their ids.
_PLAIN = "_memopt_plain"
_USERS = "_memopt_users"

# The functions whose code was exchanged, by the key that is in the new code.
_functions: dict[str, weakref.ref[types.FunctionType]] = {}
_lock = threading.RLock()  # an object may end while another one is made
_NOTHING: dict[str, Any] = {}


class Around:
    """What runs around a module's forward."""

    def __init__(
        self,
        cls: type[nn.Module] | None,
        name: str,
        call: Call,
        settings: Any,
        refuse_script: Callable[[str], NoReturn],
    ) -> None:
        """
        Args:
            cls: the module's; None where the class's function is not asked for this.
            name: the class's, for messages.
        """
        self.cls, self.name, self.call, self.settings = cls, name, call, settings
        self.refuse_script = refuse_script
        self.function: types.FunctionType | None = None
        if cls is not None:
            _ask_for(self, cls)

    def __call__(self) -> NoReturn:
        """torch.jit.script calls this before it compiles a module; it would compile the forward
        alone.
        """
        self.refuse_script(self.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Around) and self._made_of() == other._made_of()

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> Any:
        return _around, self._made_of()

    def _made_of(self) -> tuple[Any, ...]:
        # A class by what it was made of: one that memopt made cannot be imported by name.
        cls = None if self.cls is None else (original_class(self.cls), patch_of(self.cls))
        return cls, self.name, self.call, self.settings, self.refuse_script


def _around(cls: tuple[type[nn.Module], ClassPatch | None] | None, *rest: Any) -> Around:
    """Make the object that was reduced to this: in another process the code is exchanged there.
    Pickles contain this name.
    """
    return Around(None if cls is None else class_with(*cls), *rest)


class Forward:
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

    def __deepcopy__(self, memo: dict[int, Any]) -> Forward:
        module = self.module()
        owner: Any = memo.get(id(module), module)
        return Forward(owner, copy.deepcopy(self.forward, memo))

    def __reduce__(self) -> Any:
        module = self.module()
        if isinstance(module, torch.fx.GraphModule):  # pickled by its graph, without attributes
            return type(None), ()
        return Forward, (module, self.forward)


def put_around_forward(
    module: nn.Module, call: Call, settings: Any, refuse_script: Callable[[str], NoReturn]
) -> None:
    """Run `call(module, forward, args, kwargs)` in place of `module.forward(*args, **kwargs)`.

    What was around it before goes. Copies and pickles of the module have it too.

    Args:
        settings: for `around_forward(module).settings`.
        refuse_script: gets the name of the class, and raises, where torch.jit.script meets it.
    """
    there = module.__dict__.get("forward")
    outermost = isinstance(there, Forward)
    if there is not None and not outermost and around_forward(module) is None:
        there, outermost = Forward(module, there), True
    elif there is None and _function_of(type(module)) is None:
        there, outermost = Forward(module, None), True
    kind = type(module)
    cls = None if _function_of(kind) is None else kind
    around = Around(cls, kind.__name__, call, settings, refuse_script)
    module.__dict__.update({_AROUND: around, _SCRIPTED: around})
    if _decides_what_is_pickled(kind):
        copyreg.dispatch_table.setdefault(kind, _reduced)
    if outermost:
        # object's: a module may forward the setting of attributes to another (OptimizedModule).
        module.__dict__["forward"] = there


def _decides_what_is_pickled(cls: type[nn.Module]) -> bool:
    """Whether pickle, and deepcopy, may leave out an attribute that the class does not know."""
    ours = ("__reduce_ex__", "__reduce__", "__getstate__")
    return any(getattr(cls, name, None) is not getattr(nn.Module, name, None) for name in ours)


def _reduced(module: nn.Module) -> Any:
    """What the module reduces to, with what is around its forward."""
    reduced = module.__reduce_ex__(4)
    around = around_forward(module)
    if around is None or isinstance(reduced, str):
        return reduced
    make, arguments, *state = reduced
    return (_made_with, (around, make, *arguments), *state)


def _made_with(around: Around, make: Callable[..., nn.Module], *arguments: Any) -> nn.Module:
    """Make the object that a module was reduced to. Pickles contain this name."""
    module = make(*arguments)
    module.__dict__.update({_AROUND: around, _SCRIPTED: around})
    return module


def take_from_forward(module: nn.Module) -> None:
    """Undo `put_around_forward`; nothing if it was not called."""
    for name in (_AROUND, _SCRIPTED):
        module.__dict__.pop(name, None)
    there = module.__dict__.get("forward")
    if isinstance(there, Forward):
        del module.__dict__["forward"]
        if there.forward is not None:
            module.__dict__["forward"] = there.forward


def around_forward(module: nn.Module) -> Around | None:
    """What is around the module's forward; None if nothing is."""
    around: Around | None = module.__dict__.get(_AROUND)
    return around


def keep_around(module: nn.Module) -> None:
    """To be called when `module` has got another class: what is around its forward stays."""
    around = around_forward(module)
    if around is not None:
        _ask_for(around, type(module))


def is_ours(name: str) -> bool:
    """Whether memopt has put the attribute of this name on a module."""
    return name.startswith("_memopt_") or name == _SCRIPTED


def plain_function(function: Any) -> Any:
    """The function with the code that it was written with."""
    code = _written(function)
    if code is None:
        return function
    plain = function.__dict__.get(_PLAIN)
    return _with_code(function, code) if plain is None else plain


def _ask_for(around: Around, cls: type[nn.Module]) -> None:
    """Have calls of modules of class `cls` ask whether they have something around them."""
    function = _function_of(cls)
    if function is None:
        return
    with _lock:
        if _written(function) is None:
            _exchange_code(function)
        around.function = function
        ended = functools.partial(_ended, weakref.ref(function), id(around))
        function.__dict__.setdefault(_USERS, {})[id(around)] = weakref.ref(around, ended)


def _ended(
    reference: weakref.ref[types.FunctionType],
    user: int,
    _: object,
    at_exit: Callable[[], bool] = sys.is_finalizing,  # when names of this file are gone
) -> None:
    """The last of the objects that a function's code asks for gives it its own code back."""
    function = reference()
    if function is None or at_exit():
        return
    with _lock:
        users = function.__dict__.get(_USERS, {})
        users.pop(user, None)
        code = _written(function)
        if code is not None and not users and not compiles_now():
            function.__code__ = code
            for name in (_PLAIN, _USERS):
                function.__dict__.pop(name, None)


def _function_of(cls: type[nn.Module]) -> types.FunctionType | None:
    """The Python function that is the class's forward."""
    if issubclass(cls, torch.fx.GraphModule):  # which gets another with each change of the graph
        return None
    found = inspect.getattr_static(cls, "forward", None)
    if found is nn.Module.forward:  # there is none
        return None
    return found if isinstance(found, types.FunctionType) else None


def _written(function: Any) -> types.CodeType | None:
    """The code that the function was written with; None if it has that."""
    code = getattr(function, "__code__", None)
    if not isinstance(code, types.CodeType) or "_memopt_run" not in code.co_varnames:
        return None
    written = code.co_consts[-1]
    return written if isinstance(written, types.CodeType) else None


def _with_code(function: types.FunctionType, code: types.CodeType) -> types.FunctionType:
    """Another function that is like `function`, but has this code."""
    other = types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    other.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(other, function)
    del other.__dict__["__wrapped__"]
    if "__wrapped__" in function.__dict__:
        other.__dict__["__wrapped__"] = function.__dict__["__wrapped__"]
    return other


def _exchange_code(function: types.FunctionType) -> None:
    known = (key for key, reference in _functions.items() if reference() is function)
    key = next(known, None) or secrets.token_hex(8)
    _functions[key] = weakref.ref(function, lambda _: _functions.pop(key, None))
    function.__dict__[_PLAIN] = _with_code(function, function.__code__)
    function.__code__ = _asking(function.__code__, key)
    forget_compiled_code()


def _asking(code: types.CodeType, key: str) -> types.CodeType:
    """Code with the parameters of `code` that passes them to `_run`."""
    names = iter(code.co_varnames)
    positional = [next(names) for _ in range(code.co_argcount)]
    by_name = [next(names) for _ in range(code.co_kwonlyargcount)]
    rest = next(names) if code.co_flags & inspect.CO_VARARGS else None
    named_rest = next(names) if code.co_flags & inspect.CO_VARKEYWORDS else None
    parameters = list(positional)
    if code.co_posonlyargcount:
        parameters.insert(code.co_posonlyargcount, "/")
    if rest or by_name:
        parameters.append(f"*{rest or ''}")
    parameters += [*by_name, *([f"**{named_rest}"] if named_rest else [])]
    args = "".join(f"{name}, " for name in [*positional, *([f"*{rest}"] if rest else [])])
    kwargs = "".join(f"{name!r}: {name}, " for name in by_name)
    kwargs += f"**{named_rest}" if named_rest else ""
    source = (
        f"def forward({', '.join(parameters)}):\n"
        f"    from {__name__} import _run as _memopt_run\n"
        f"    return _memopt_run({key!r}, ({args}), {{{kwargs}}})\n"
    )
    namespace: dict[str, Any] = {}
    exec(source, namespace)  # nothing in it comes from outside but the names of parameters
    asking: types.CodeType = namespace["forward"].__code__
    replaced: dict[str, Any] = {"co_name": code.co_name, "co_freevars": code.co_freevars}
    if hasattr(code, "co_qualname"):  # Python 3.11
        replaced["co_qualname"] = code.co_qualname
    # Whoever asks for the source finds that of the function, and whoever looks at what the code
    # names finds the code that was there, as that of a function inside.
    return asking.replace(
        co_filename=code.co_filename,
        co_firstlineno=code.co_firstlineno,
        co_consts=(*asking.co_consts, code),
        **replaced,
    )


def _run(key: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call of a function whose code was exchanged."""
    module = args[0]
    function: Any = (_functions[key] if key in _functions else _find(key, module))()
    plain = getattr(function, _PLAIN, None) or plain_function(function)
    if torch.compiler.is_compiling():
        around = getattr(module, _AROUND, None)  # which the compiler looks after
    else:
        around = getattr(module, "__dict__", _NOTHING).get(_AROUND)
    # Also called by super(), from the function that asks.
    if around is None or around.function is not function:
        return plain(*args, **kwargs)
    if isinstance(module.__dict__.get("forward"), Forward):
        return plain(*args, **kwargs)  # called by that one
    # The compiler knows no types.MethodType.
    bound = functools.partial if torch.compiler.is_compiling() else types.MethodType
    return around.call(module, bound(plain, module), args[1:], kwargs)


def _find(key: str, module: Any) -> weakref.ref[types.FunctionType]:
    """The function whose code has this key, where the class was pickled by value (cloudpickle)."""
    for cls in type(module).__mro__:
        function = cls.__dict__.get("forward")
        if isinstance(function, types.FunctionType) and key in function.__code__.co_consts:
            return _functions.setdefault(key, weakref.ref(function))
    raise LookupError(f"memopt: {type(module).__name__}.forward was copied without its class")
