"""A function that has other code for a time: it asks the module that it is called with for what is
around its forward, and runs the code that it was written with for all others. _forwards.py says
what for.

The function stays the object that it is, with its signature, closure, defaults and globals. The new
code refers to nothing but this file and a key, since a code object is no part of what the garbage
collector sees: what it held, it would hold for ever. The second function, with the code that was
there, is an attribute of the first.
"""

from __future__ import annotations

import functools
import inspect
import secrets
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import nn

from memopt._compat import compiles_now, forget_compiled_code

AROUND = "_memopt_around_forward"
"""The attribute of a module that is asked for."""

# On a function whose code was exchanged: the function with its own, and weak references to the
# objects that it asks for, by their ids.
_PLAIN = "_memopt_plain"
_USERS = "_memopt_users"


class _Functions:
    """The functions whose code was exchanged, weakly: attributes named by the key that is in the
    new code. TorchDynamo looks at the one that a call asks for; of a dict it walks all, and fails
    where one of another model ends meanwhile.
    """


class _Users(dict[int, "weakref.ref[Asked]"]):
    """Weak references to the objects that a function asks for, by their ids."""

    def __init__(self, function: types.FunctionType | None = None) -> None:
        super().__init__()
        self._function = None if function is None else weakref.ref(function)

    def are_of(self, function: types.FunctionType) -> bool:
        """Whether it is this function that asks for them."""
        return self._function is not None and self._function() is function

    def __reduce__(self) -> Any:
        # A class that is pickled by value (cloudpickle) takes its functions with their code and
        # attributes. This one comes before the attributes are set.
        return _Users, (), None if self._function is None else {"copy": self._function()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Give the copy of a function the code that it was written with, until it is asked for.

        Where the function itself is here too, the copy may have taken its place in the class: those
        that ask for the one ask for the other.
        """
        function = state["copy"]
        written = _written(function)
        if written is None or _USERS in function.__dict__:
            return
        with _lock:
            copied = _function_with(function.__code__)
            function.__code__ = written
            users = {} if copied is None else copied.__dict__.get(_USERS, {}).copy()
            self._function = weakref.ref(function)
            if users:
                _exchange_code(function)
            for reference in users.values():
                if asked := reference():
                    self[id(asked)] = _user(asked, function)


_functions = _Functions()
_lock = threading.RLock()  # an object may end while another one is made
_NOTHING: dict[str, Any] = {}


class Asked(Protocol):
    """The value that a module has at that attribute."""

    function: types.FunctionType | None
    """The last function that asks for it."""

    def is_for(self, module: nn.Module, function: types.FunctionType) -> bool:
        """Whether it runs around this call of the function."""

    def call(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Runs in place of the function."""


def function_of(cls: type[nn.Module]) -> types.FunctionType | None:
    """The Python function that is the class's forward."""
    if issubclass(cls, torch.fx.GraphModule):  # which gets another with each change of the graph
        return None
    found = inspect.getattr_static(cls, "forward", None)
    if found is nn.Module.forward:  # there is none
        return None
    return found if isinstance(found, types.FunctionType) else None


def plain_function(function: Any) -> Any:
    """The function with the code that it was written with."""
    code = _written(function)
    if code is None:
        return function
    plain = function.__dict__.get(_PLAIN)
    return _with_code(function, code) if plain is None else plain


def codes_in(function: Any) -> Iterator[types.CodeType]:
    """The code of a function, and of functions inside it; of a code object likewise, and of
    anything else none.
    """
    code = getattr(function, "__code__", function)
    if isinstance(code, types.CodeType):
        yield code
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                yield from codes_in(constant)


def asks(function: types.FunctionType, cls: type[nn.Module]) -> bool:
    """Whether calls of modules of class `cls` come to this function, which asks."""
    is_there = any(base.__dict__.get("forward") is function for base in cls.__mro__)
    return is_there and _written(function) is not None


def others_attributes(function: types.FunctionType) -> dict[str, Any]:
    """A function's attributes, but for those that go with its code."""
    return {k: v for k, v in function.__dict__.items() if k not in (_PLAIN, _USERS)}


def ask_for(asked: Asked, cls: type[nn.Module], function: types.FunctionType | None = None) -> None:
    """Have calls of modules of class `cls` ask whether they have something around them.

    Args:
        function: that runs in these calls; None: the class's.
    """
    function = function or function_of(cls)
    if function is None:
        return
    with _lock:
        if not _has_users(function) or _written(function) is None:
            function.__code__ = _written(function) or function.__code__  # its code was copied
            _exchange_code(function)
        asked.function = function
        function.__dict__[_USERS][id(asked)] = _user(asked, function)


def _has_users(function: types.FunctionType) -> bool:
    """Whether it has those that it asks for, and not those of another with its attributes."""
    users = function.__dict__.get(_USERS)
    return isinstance(users, _Users) and users.are_of(function)


def _user(asked: Asked, function: types.FunctionType) -> weakref.ref[Asked]:
    return weakref.ref(asked, functools.partial(_ended, weakref.ref(function), id(asked)))


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
        if not users and not compiles_now():
            function.__code__ = code or function.__code__
            for name in (_PLAIN, _USERS):
                function.__dict__.pop(name, None)


def _written(function: Any) -> types.CodeType | None:
    """The code that the function was written with; None if it has that."""
    code = getattr(function, "__code__", None)
    if not isinstance(code, types.CodeType) or "_memopt_run" not in code.co_varnames:
        return None
    written = code.co_consts[-1]
    return written if isinstance(written, types.CodeType) else None


def _function_with(asking: types.CodeType) -> types.FunctionType | None:
    """The function that was given this code, if it is here."""
    found = (getattr(_functions, each, None) for each in asking.co_consts if isinstance(each, str))
    return next((function for reference in found if reference and (function := reference())), None)


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
    there = vars(_functions).copy()  # others end at any time
    known = (key for key, reference in there.items() if reference() is function)
    key = next(known, None) or secrets.token_hex(8)
    setattr(_functions, key, weakref.ref(function, lambda _: vars(_functions).pop(key, None)))
    function.__dict__[_PLAIN] = _with_code(function, function.__code__)
    if not _has_users(function):  # they stay where other code was put in (IPython's autoreload)
        function.__dict__[_USERS] = _Users(function)
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
    # It closes over what the function closes over: whoever reads the locals of its frame relies on
    # the closure.
    source = (
        f"def closure({', '.join(code.co_freevars)}):\n"
        f"    def forward({', '.join(parameters)}):\n"
        f"        from {__name__} import _run as _memopt_run\n"
        f"        return _memopt_run({key!r}, ({args}), {{{kwargs}}})\n"
        f"        {', '.join(code.co_freevars)}\n"
        f"    return forward\n"
    )
    namespace: dict[str, Any] = {}
    exec(source, namespace)  # nothing in it comes from outside but the names of variables
    asking: types.CodeType = namespace["closure"](*code.co_freevars).__code__
    assert asking.co_freevars == code.co_freevars
    replaced: dict[str, Any] = {"co_name": code.co_name}
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
    function: Any = (getattr(_functions, key, None) or _find(key, module))()
    plain = getattr(function, _PLAIN, None) or plain_function(function)
    bound: Callable[..., Callable[..., Any]]
    if torch.compiler.is_compiling():  # it looks after attributes, and knows no types.MethodType
        asked, bound = getattr(module, AROUND, None), functools.partial
    else:
        asked, bound = getattr(module, "__dict__", _NOTHING).get(AROUND), types.MethodType
    if asked is None or not asked.is_for(module, function):
        return plain(*args, **kwargs)
    return asked.call(module, bound(plain, module), args[1:], kwargs)


def _find(key: str, module: Any) -> weakref.ref[types.FunctionType]:
    """The function whose code has this key, where its code alone was copied."""
    for cls in type(module).__mro__:
        function = cls.__dict__.get("forward")
        if isinstance(function, types.FunctionType) and key in function.__code__.co_consts:
            # Not noted: a compilation would look at all that are.
            return weakref.ref(function)
    raise LookupError(f"memopt: {type(module).__name__}.forward was copied without its class")
