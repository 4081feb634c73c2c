"""Configs of transformers by name, with errors that come at once and say what to do."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from typing import Any

from memopt._errors import UsageError

_PATIENCE = 2.0
"""Seconds within which the hub must answer whether it has a repository."""
_OF_MODELS = ("loss_type",)
"""Names that models of transformers read from a config that has them; configs do not."""


def config_by_name(transformers: Any, name: str, sizes: dict[str, Any]) -> Any:
    """A config: by its class ("LlamaConfig"), its model type ("llama"), a folder with a config.json
    or a repository of the hub. `sizes` are changed in it.

    Raises:
        UsageError: there is none of that name, or it has none of these sizes, or not such values.
    """
    auto = transformers.models.auto.configuration_auto
    known, classes = auto.CONFIG_MAPPING, auto.CONFIG_MAPPING_NAMES  # known's values are imported
    kind: Any = getattr(transformers, name, None)
    is_class = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedConfig)
    if is_class or name in known:
        config_class = kind if is_class else known[name]
        _check_sizes(config_class(), sizes)
        return _with_sizes(config_class, sizes)
    config = _read(transformers, name, [*classes, *classes.values()])
    _check_sizes(config, sizes)
    return _with_sizes(type(config), {**config.to_dict(), **sizes})


def _with_sizes(config_class: Any, sizes: dict[str, Any]) -> Any:
    try:
        return config_class(**sizes)
    except Exception as error:  # each config has errors of its own
        reason = " ".join(str(error).split())
        raise UsageError(
            f"--set: must have values that {config_class.__name__} takes: {reason}"
        ) from None


def _check_sizes(config: Any, sizes: dict[str, Any]) -> None:
    """Refuse names that no model reads; transformers takes them without a word."""
    for key in sizes:
        if key in _OF_MODELS or hasattr(config, key) or hasattr(config, f"_{key}"):
            continue
        raise UsageError(
            f"--set: must have names of {type(config).__name__}, got {key!r}"
            f"{_did_you_mean(key, config.to_dict())}"
        )


def _read(transformers: Any, name: str, others: Iterable[str]) -> Any:
    """The config of a folder, or of a repository that is in the cache or that the hub has."""
    read = transformers.AutoConfig.from_pretrained
    try:
        return read(name, local_files_only=True)
    except Exception as error:  # errors of the hub's client are of no class of transformers
        if os.path.isdir(name):
            reason = str(error).splitlines()[0]
            raise UsageError(
                f"--config: must be a folder with a config.json, got {name!r}: {reason}"
            ) from None
    _look_up(name, others)
    try:
        return read(name)
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"--config: no config of transformers, got {name!r}: {reason}") from None


def _look_up(name: str, others: Iterable[str]) -> None:
    """Ask the hub for a repository, once: transformers tries again for half a minute."""
    from huggingface_hub import HfApi  # transformers needs it

    try:
        HfApi().model_info(name, timeout=_PATIENCE)
    except Exception as error:
        raise UsageError(
            "--config: must be a model type or class of transformers, a folder with a config.json "
            f"or a repository of the hub, got {name!r}{_did_you_mean(name, others)}; the hub: "
            f"{str(error).splitlines()[0] or type(error).__name__}"
        ) from None


def _did_you_mean(name: str, others: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(others), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
