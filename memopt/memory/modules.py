"""A model's modules: dicts of them, and those whose calls Python sees."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from typing import TypeVar

import torch
from torch import nn

ValueT = TypeVar("ValueT")


class ByModule(MutableMapping[nn.Module, ValueT]):
    """A dict whose keys are the very modules: the hash of some (a metric of torchmetrics) is that
    of their state, which forward changes.
    """

    def __init__(self, pairs: Iterable[tuple[nn.Module, ValueT]] = ()) -> None:
        self._pairs = {id(module): (module, value) for module, value in pairs}

    def __getitem__(self, module: nn.Module) -> ValueT:
        return self._pairs[id(module)][1]

    def __setitem__(self, module: nn.Module, value: ValueT) -> None:
        self._pairs[id(module)] = module, value

    def __delitem__(self, module: nn.Module) -> None:
        del self._pairs[id(module)]

    def __contains__(self, module: object) -> bool:
        return id(module) in self._pairs

    def __iter__(self) -> Iterator[nn.Module]:
        return (module for module, _ in self._pairs.values())

    def __len__(self) -> int:
        return len(self._pairs)


def paths_of(model: nn.Module) -> ByModule[str]:
    """The path of each of a model's modules."""
    return ByModule((module, path) for path, module in model.named_modules())


def seen_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of a model by path, each once, without those of TorchScript: these run without
    Python, and take no hooks.
    """
    named = model.named_modules()
    return {path: one for path, one in named if not isinstance(one, torch.jit.ScriptModule)}
