"""A plan as JSON, and what a model must be like for it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch
from torch import nn

from memopt._plan.planned import Planned
from memopt._version import __version__
from memopt.assignment import Assignment, Choice
from memopt.memory.sizes import Size
from memopt.place import Place

_FORMAT = "memopt plan 6"


def signature_of(model: nn.Module, paths: Iterable[str]) -> dict[str, str]:
    """Return, by path, the class of a block and a digest of its parameters' names, shapes and
    dtypes.
    """
    modules = dict(model.named_modules())
    return {path: _look(modules[path]) for path in paths if path in modules}


def _look(block: nn.Module) -> str:
    parameters = [(name, tuple(p.shape), str(p.dtype)) for name, p in block.named_parameters()]
    digest = hashlib.sha256(repr(parameters).encode()).hexdigest()[:12]
    return f"{type(block).__qualname__} {digest}"


# Fields of a plan that are its model's, or follow from the others.
_LEFT_OUT = ("assignment", "plain_trace", "trace")


def plan_as_dict(plan: Planned) -> dict[str, Any]:
    """Return a plan with its profile, so that a loaded one has its table and its curve."""
    stored = [field.name for field in dataclasses.fields(Planned) if field.name not in _LEFT_OUT]
    return {
        "format": _FORMAT,
        "memopt": __version__,
        "torch": torch.__version__,
        "machine": platform.machine(),
        "budget_given": getattr(plan.budget, "given", ""),
        "in_step": plan.assignment.in_step,
        "heads": list(plan.assignment.heads),
        **{name: _as_json(getattr(plan, name)) for name in stored},
    }


def read(path: Path) -> dict[str, Any]:
    """Raises ValueError where the file holds no plan."""
    try:
        data = json.loads(path.read_text())
    except json.JSONDecodeError:
        data = None
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise ValueError(f"Plan.load: {path} must hold a plan that was saved, got something else")
    return data


def fields_of(data: dict[str, Any]) -> dict[str, Any]:
    """Return a plan's fields from what `plan_as_dict` gave."""
    kinds = {name: kind for name, kind in get_type_hints(Planned).items() if name in data}
    fields = {name: _from_json(kind, data[name]) for name, kind in kinds.items()}
    choices = {block.together or (block.path,): block.choice for block in fields["blocks"]}
    choices |= {(path,): Choice(head=True) for path in data["heads"]}
    fields["assignment"] = Assignment(choices, fields["terms"].place, data["in_step"])
    fields["budget"] = Size(data["budget"], data["budget_given"])
    return fields


def _as_json(value: Any) -> Any:
    """Return dataclasses and named tuples as dicts, dicts whose keys are no strings as pairs."""
    if dataclasses.is_dataclass(value):
        named = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {name: _as_json(part) for name, part in named.items()}
    if isinstance(value, dict):
        pairs = [(_as_json(key), _as_json(part)) for key, part in value.items()]
        return dict(pairs) if all(isinstance(key, str) for key in value) else list(map(list, pairs))
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: _as_json(part) for name, part in value._asdict().items()}
    if isinstance(value, tuple):
        return list(map(_as_json, value))
    return str(value) if isinstance(value, os.PathLike) else value


def _from_json(kind: Any, data: Any) -> Any:
    """Return a value of a type, from what `_as_json` gave of it."""
    origin, parts = get_origin(kind), get_args(kind)
    if data is None or kind in (Any, str, int, float, bool):
        return data
    if kind == Place | None:
        return data if data in ("cpu", "disk") else Path(data)
    if origin in (Union, types.UnionType):
        some = [part for part in parts if part is not type(None)]
        return _from_json(some[0], data) if len(some) == 1 else data
    if origin is dict:
        pairs = data.items() if isinstance(data, dict) else data
        return {_from_json(parts[0], key): _from_json(parts[1], part) for key, part in pairs}
    if origin is tuple:
        of_each = (parts[0],) * len(data) if parts[-1] is ... else parts
        return tuple(_from_json(one, part) for one, part in zip(of_each, data, strict=True))
    hints = get_type_hints(kind)
    return kind(**{name: _from_json(hints[name], part) for name, part in data.items()})
