"""Any model of transformers at a size for a test: its configuration with the numbers that are known
by their names made small. `FAMILIES` in tests/support/families.py has the names of those that come
out trainable.
"""

from __future__ import annotations

import copy
import functools
import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.support.seed import seed
from tests.support.tiny_changes import CHANGES, STARTS
from tests.support.tiny_configs import shrunk
from tests.support.tiny_inputs import candidates


@dataclass(frozen=True)
class Tiny:
    """A model to be made, and what it is called with."""

    config: Any
    make_class: type[nn.Module]

    def make(self) -> nn.Module:
        """In training mode, without dropout and without a cache; the same weights each time."""
        seed(0)
        with _nan_where_uninitialized():
            model = self._new()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.isnan().any():  # experts whose weights transformers does not fill
                    parameter.normal_(std=0.02)
        return model.train()

    def size(self) -> int:
        """How many numbers the parameters have; the model is not made for it."""
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in self._new().parameters())

    def _new(self) -> nn.Module:
        return self.make_class._from_config(self.config)  # type: ignore[attr-defined]

    def inputs(self) -> dict[str, Any]:
        return copy.deepcopy(self._inputs)

    @functools.cached_property
    def _inputs(self) -> dict[str, Any]:
        """Of what may be meant by the main input's name, the first that the model runs with."""
        problems = []
        model = self.make()
        for inputs in candidates(model, self.config):
            try:
                with torch.no_grad():
                    model(**copy.deepcopy(inputs))
            except Exception as e:
                shapes = {n: tuple(getattr(v, "shape", ())) for n, v in inputs.items()}
                problems.append(f"{shapes}: {e}")
            else:
                return inputs
        raise ValueError("runs with none of these inputs: " + "; ".join(problems))


def tiny(family: str) -> Tiny:
    """The base model of a family, by its `model_type`. Skips the test without transformers."""
    config_class = pytest.importorskip("transformers").CONFIG_MAPPING[family]
    changes = CHANGES.get(family, {})
    config = shrunk(_default(config_class), changes)
    config._attn_implementation = changes.get("attn_implementation", "eager")
    return Tiny(config, model_class(config_class))


@contextmanager
def _nan_where_uninitialized() -> Iterator[None]:
    """torch.empty gives NaN in place of what happens to be in memory."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def model_class(config_class: Any) -> type[nn.Module]:
    """The base model of a configuration; of a part without one of its own, the part's module."""
    return _from_table(config_class) or min(
        _beside(config_class), key=lambda c: not c.__name__.endswith("Model")
    )


def _from_table(config_class: Any) -> type[nn.Module] | None:
    """In transformers' table of base models; None where there is none that can be checkpointed."""
    from transformers import MODEL_MAPPING

    try:
        found = MODEL_MAPPING[config_class]
    except (KeyError, ValueError):
        return None
    found = found[0] if isinstance(found, tuple) else found
    is_of_part = found.config_class in getattr(config_class, "sub_configs", {}).values()
    return None if is_of_part or not found.supports_gradient_checkpointing else found


def _beside(config_class: Any) -> list[Any]:
    """Models in the module that belongs to a configuration's that are made of it, and that
    transformers can checkpoint. ModuleNotFoundError where there is no such module.
    """
    from transformers import PreTrainedModel

    module = importlib.import_module(
        config_class.__module__.replace(".configuration_", ".modeling_")
    )
    return [
        one
        for one in vars(module).values()
        if isinstance(one, type)
        and issubclass(one, PreTrainedModel)
        and one.__module__ == module.__name__
        and one.config_class is config_class
        and one.supports_gradient_checkpointing
        and not one.__name__.endswith("PreTrainedModel")
    ]


def checkpointing_families() -> set[str]:
    """Every `model_type` that has a model with gradient checkpointing, or one that cannot be
    imported here for want of another package.
    """
    from transformers import CONFIG_MAPPING

    return {f for f in CONFIG_MAPPING if _checkpoints(CONFIG_MAPPING[f], f)}


def _checkpoints(config_class: Any, family: str) -> bool:
    if config_class.model_type not in ("", family):
        return False  # a second name of another family
    try:
        return bool(_from_table(config_class) or _beside(config_class))
    except ImportError as e:
        return not (e.name or "").startswith("transformers.")  # it has no such module


def _default(config_class: Any) -> Any:
    try:
        return config_class(**STARTS.get(config_class.model_type, {}))
    except Exception:  # one that has no defaults for its parts
        parts = config_class.sub_configs
        return config_class(**{name: _default(part) for name, part in parts.items()})


def loss_of(output: Any) -> Tensor:
    """A number that all floating tensors of a model's output enter."""
    values = output.to_tuple() if hasattr(output, "to_tuple") else output
    return sum(  # type: ignore[return-value]
        leaf.pow(2).sum()
        for leaf in pytree.tree_leaves(values)
        if isinstance(leaf, Tensor) and leaf.requires_grad
    )
