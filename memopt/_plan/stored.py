"""A plan as JSON, and what a model must be like for it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import types
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch
from torch import nn

from memopt._plan.planned import Planned, PlannedBlock
from memopt._version import __version__
from memopt.assignment import Assignment, Choice
from memopt.memory.sizes import Size
from memopt.place import Place

_KIND = "memopt plan "
_FORMAT = f"{_KIND}7"


def signature_of(model: nn.Module, paths: Iterable[str]) -> dict[str, str]:
    """Return, by path, the class of a block and a digest of its parameters' names, shapes and
    dtypes; and those of modules beside the blocks that look like one of them, of which a deeper
    model has more.
    """
    modules = dict(model.named_modules())
    found = {path: _look(modules[path]) for path in paths if path in modules}
    looks, parents = {*found.values()}, {path.rpartition(".")[0] for path in found if path}
    for parent in sorted(parents):
        for name, module in modules[parent].named_children():
            path = f"{parent}.{name}" if parent else name
            if path not in found and (look := _look(module)) in looks:
                found[path] = look
    return found


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


def load(path: Path) -> dict[str, Any]:
    """Return the fields of the plan that a file holds.

    Raises:
        ValueError: it holds none, one of another format, or one that is damaged.
    """
    try:
        data = json.loads(path.read_text())
    except (ValueError, RecursionError):  # no JSON, no text at all, or brackets without end
        data = None
    found = data.get("format") if isinstance(data, dict) else None
    if not isinstance(found, str) or not found.startswith(_KIND):
        raise ValueError(f"Plan.load: {path} must hold a plan that was saved, got something else")
    if found != _FORMAT:
        raise ValueError(
            f"Plan.load: {path} must hold a plan of this memopt's format, {_FORMAT!r}, got "
            f"{found!r}, of memopt {data.get('memopt')}; plan again"
        )
    try:
        return fields_of(data)
    except _Damaged as error:
        raise ValueError(
            f"Plan.load: {path} must hold a plan as it was saved, got {error}"
        ) from None


def fields_of(data: dict[str, Any]) -> dict[str, Any]:
    """Return a plan's fields from what `plan_as_dict` gave."""
    hints = get_type_hints(Planned)
    kinds = {field.name: hints[field.name] for field in dataclasses.fields(Planned)}
    kinds = {name: kind for name, kind in kinds.items() if name not in _LEFT_OUT}
    kinds |= {"heads": tuple[str, ...], "in_step": bool, "budget_given": str}
    fields = _named(kinds, {name: data[name] for name in kinds if name in data}, "")
    heads, in_step, given = (fields.pop(name) for name in ("heads", "in_step", "budget_given"))
    blocks: tuple[PlannedBlock, ...] = fields["blocks"]
    choices = {block.together or (block.path,): block.choice for block in blocks}
    unknown = [path for at in choices for path in at if path not in fields["signature"]]
    if unknown:
        raise _Damaged(f"the block {unknown[0]!r}, which its signature lacks")
    choices |= {(path,): Choice(head=True) for path in heads}
    fields["assignment"] = Assignment(choices, fields["terms"].place, in_step)
    fields["budget"] = Size(_checked(fields["budget"], fields["budget"] >= 1, "budget"), given)
    return fields


class _Damaged(ValueError):
    """A part of a file is not what a saved plan has there."""


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
    if isinstance(value, Size):  # as JSON's own, also where a pickle has it
        return int(value)
    return str(value) if isinstance(value, os.PathLike) else value


def _from_json(kind: Any, data: Any, where: str) -> Any:
    """Return a value of a type, from what `_as_json` gave of it.

    Args:
        where: the names that lead to it.

    Raises:
        _Damaged: it is no such thing.
    """
    origin, parts = get_origin(kind), get_args(kind)
    if kind in _PLAIN:
        return _checked(data, type(data) in _PLAIN[kind], where)
    if kind == Place | None:
        _checked(data, data is None or isinstance(data, str), where)
        return data if data in (None, "cpu", "disk") else Path(data)
    if origin in (Union, types.UnionType):
        return _one_of(parts, data, where)
    if origin is Literal:
        return _checked(data, data in parts, where)
    if origin is dict:
        pairs = data.items() if isinstance(data, dict) else _pairs(data, where)
        return {
            _from_json(parts[0], key, where): _from_json(parts[1], part, f"{where}.{key}")
            for key, part in pairs
        }
    if origin is tuple:
        _checked(data, isinstance(data, list), where)
        of_each = (parts[0],) * len(data) if parts[-1] is ... else parts
        _checked(data, len(of_each) == len(data), where)
        return tuple(
            _from_json(one, part, f"{where}[{number}]")
            for number, (one, part) in enumerate(zip(of_each, data, strict=True))
        )
    fields = _named(get_type_hints(kind), data, where)
    try:
        return kind(**fields)
    except ValueError as error:
        raise _Damaged(f"{where}, whose {error}") from None


_PLAIN: dict[Any, tuple[type, ...]] = {
    str: (str,),
    int: (int,),
    float: (float, int),
    bool: (bool,),
    types.NoneType: (types.NoneType,),
}
"""The types that JSON has for those of fields."""


def _checked(data: Any, is_right: bool, where: str) -> Any:
    if not is_right:
        text = repr(data)
        raise _Damaged(f"{text if len(text) <= 40 else type(data).__name__} for {where}")
    return data


def _named(kinds: dict[str, Any], data: Any, where: str) -> dict[str, Any]:
    """The fields of an object, each of its type, and no other."""
    _checked(data, isinstance(data, dict), where)
    begin = f"{where}." if where else ""
    for name in kinds.keys() ^ data.keys():
        raise _Damaged(f"{'no' if name in kinds else 'an unknown'} {begin}{name}")
    return {name: _from_json(kind, data[name], begin + name) for name, kind in kinds.items()}


def _one_of(kinds: Sequence[Any], data: Any, where: str) -> Any:
    """A value of the first of the types that it can be of."""
    for number, kind in enumerate(kinds, 1):
        try:
            return _from_json(kind, data, where)
        except _Damaged:
            if number == len(kinds):
                raise


def _pairs(data: Any, where: str) -> Any:
    is_right = isinstance(data, list) and all(type(p) is list and len(p) == 2 for p in data)
    return _checked(data, is_right, where)
