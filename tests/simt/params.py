"""The structs of csrc/kernels/*.h for ctypes, read from the headers: what launchers take."""

from __future__ import annotations

import ctypes
import re
from functools import cache
from typing import Any

from .build import KERNELS

C_TYPES: dict[str, Any] = {
    "bool": ctypes.c_bool,
    "double": ctypes.c_double,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint32_t": ctypes.c_uint32,
    "uint64_t": ctypes.c_uint64,
    # The enumerations.
    "Activation": ctypes.c_int32,
    "NormKind": ctypes.c_int32,
    "ScalarType": ctypes.c_int32,
}


@cache
def activations() -> dict[str, int]:
    """The numbers of memopt::kernels::Activation by name. 0 is none of them."""
    names = re.findall(r'ACTIVATION\("(\w+)", k\w+, \w+\)', _headers())
    return {name: number for number, name in enumerate(names, 1)}


@cache
def struct_type(name: str) -> type[ctypes.Structure]:
    """The plain struct `name` of any header."""
    found = re.search(rf"^struct {name} {{\n(.*?)^}};", _headers(), re.DOTALL | re.MULTILINE)
    if found is None:
        raise LookupError(f"no struct {name} in {KERNELS}")
    fields = [_field(line) for line in found[1].split(";") if line.strip()]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def make_struct(name: str, values: dict[str, Any]) -> ctypes.Structure:
    """With `values` in its fields, a dict in that of a struct, and zeros elsewhere."""
    kind = struct_type(name)
    types: dict[str, Any] = dict(kind._fields_)
    made = kind()
    for field, value in values.items():
        if field not in types:
            raise LookupError(f"struct {name} has no field {field}")
        if isinstance(value, dict):
            value = make_struct(types[field].__name__, value)
        setattr(made, field, value)
    return made


def _field(line: str) -> tuple[str, Any]:
    declared = re.fullmatch(r"\s*(?:const )?(\w+)(\*?) (\w+)\s*", line)
    if declared is None:
        raise LookupError(f"not a plain field: {line}")
    kind, pointer, name = declared.groups()
    if pointer:
        return name, ctypes.c_void_p
    return name, C_TYPES.get(kind) or struct_type(kind)


@cache
def _headers() -> str:
    """All of them, without comments."""
    text = "\n".join(path.read_text() for path in sorted(KERNELS.glob("*.h")))
    return re.sub(r"\s*//[^\n]*", "", text)
