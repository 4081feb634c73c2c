"""The base of modules with a linear behind: they can be made of existing modules."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def around(cls: type[ModuleT], training: bool, **attributes: Any) -> ModuleT:
    """An instance of `cls` that holds these, without new parameters."""
    module = cls.__new__(cls)
    nn.Module.__init__(module)
    for name, value in attributes.items():
        setattr(module, name, value)
    module.train(training)
    return module


def check_kinds(owner: str, first: object, kind: type[nn.Module], linear: object) -> None:
    """Raises TypeError unless these are a `kind` and a Linear, and compute what those do."""
    rule = f"{owner}.from_modules: takes a {kind.__name__} and a Linear, got"
    for module, expected in ((first, kind), (linear, nn.Linear)):
        if not isinstance(module, expected):
            raise TypeError(f"{rule} {type(module).__name__}")
        if not has_forward_of(module, expected):
            raise TypeError(f"{rule} {type(module).__name__} with a forward of its own")


def has_forward_of(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether the module's forward is that of `kind`, or memopt.nn's of that name or a subclass."""
    definer = next(cls for cls in type(module).__mro__ if "forward" in vars(cls))
    ours = definer.__module__.startswith("memopt.nn.") and (
        definer.__name__ == kind.__name__ or kind.__module__.startswith("memopt.nn.")
    )
    return (definer is kind or ours) and "forward" not in vars(module)


def check_features(owner: str, normalized_shape: tuple[int, ...], linear: nn.Linear) -> None:
    """Raises ValueError unless the norm is over the linear's features."""
    if tuple(normalized_shape) != (linear.in_features,):
        raise ValueError(
            f"{owner}.from_modules: the norm must be over the linear's {linear.in_features} "
            f"features, got normalized_shape {tuple(normalized_shape)}"
        )
