"""The options of `configure`, by DeepSpeed's names, and how its configuration file gives them."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memopt._arguments import check_count, check_flags

WHO = "deepspeed.checkpointing.configure"
SECTION = "activation_checkpointing"


@dataclass(frozen=True)
class Options:
    """The arguments of `configure`, after `mpu_` and `deepspeed_config`."""

    partition_activations: bool = False
    contiguous_checkpointing: bool = False
    num_checkpoints: int | None = None
    checkpoint_in_cpu: bool = False
    synchronize: bool = False
    profile: bool = False

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name != "num_checkpoints":
                check_flags(WHO, **{field.name: value})
            elif value is not None:
                check_count(WHO, field.name, value)


# Of the file's section: each key, and the argument that it stands for.
_KEYS = {
    "partition_activations": "partition_activations",
    "contiguous_memory_optimization": "contiguous_checkpointing",
    "number_checkpoints": "num_checkpoints",
    "cpu_checkpointing": "checkpoint_in_cpu",
    "synchronize_checkpoint_boundary": "synchronize",
    "profile": "profile",
}


def options_of(config: object, given: Mapping[str, Any]) -> Options:
    """The options of a configuration, a dict or a JSON file; `given` goes before it if not None.

    Raises:
        TypeError, ValueError: no such configuration, an unknown key in its section, or a value of
            the wrong type.
        OSError: the file cannot be read.
    """
    values = {} if config is None else _section(config)
    values |= {name: value for name, value in given.items() if value is not None}
    return Options(**values)


def _section(config: object) -> dict[str, Any]:
    if isinstance(config, (str, os.PathLike)):
        try:
            config = json.loads(Path(config).read_text())
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{WHO}: deepspeed_config must be a file in JSON, got {error}"
            ) from error
    if not isinstance(config, Mapping):
        raise TypeError(
            f"{WHO}: deepspeed_config must be a dict or the path of a JSON file with one, got "
            f"{type(config).__name__}"
        )
    section = config.get(SECTION, {})
    if not isinstance(section, Mapping):
        raise TypeError(
            f"{WHO}: {SECTION!r} in deepspeed_config must be a dict, got {type(section).__name__}"
        )
    unknown = [key for key in section if key not in _KEYS]
    if unknown:
        raise ValueError(
            f"{WHO}: the keys of {SECTION!r} in deepspeed_config must be among "
            f"{', '.join(_KEYS)}, got {unknown[0]!r}"
        )
    return {_KEYS[key]: value for key, value in section.items() if value is not None}
