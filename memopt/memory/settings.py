"""Settings of PyTorch and Python for the thread or for all, which a first forward may make."""

from __future__ import annotations

import contextvars
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from memopt._compat import default_device, print_options
from memopt._extension import _C
from memopt.memory.containers import Restore, kept_list, kept_object


def kept_settings(kinds: Iterable[str]) -> list[Restore]:
    """Restores settings: context variables that have a value, whether gradients are on, autocast on
    devices of these kinds, and those of the table below. Settings of Python stay where a module was
    imported meanwhile, which may have made them for good. Scopes end that calls of modules have
    opened and, interrupted, not ended.
    """
    context = contextvars.copy_context()
    found: list[Restore] = [partial(_set_context, context), kept_object(print_options())]
    for read, write in (*_SETTINGS, *_of_autocast(kinds)):
        try:
            value = read()
        except RuntimeError:  # autocast does not know this kind; both APIs of a precision are used
            continue
        found.append(partial(_set, read, write, value))
    return [*found, _kept_in_python(), _C.end_interrupted_calls]


Access = tuple[Callable[[], Any], Callable[[Any], object]]
"""Functions that read and that write it."""


def _attribute(owner: Any, name: str) -> Access:
    return partial(getattr, owner, name), partial(setattr, owner, name)


_SETTINGS: tuple[Access, ...] = (
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    (torch.get_default_dtype, torch.set_default_dtype),
    (default_device, torch.set_default_device),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    ),
    (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda value: torch.set_anomaly_enabled(*value),
    ),
    (torch.is_warn_always_enabled, torch.set_warn_always),
    *(
        _attribute(torch.backends.cudnn, name)
        for name in ("enabled", "benchmark", "benchmark_limit", "deterministic")
    ),
    *(_attribute(torch.backends.mkldnn, name) for name in ("enabled", "deterministic")),
    *(
        (
            getattr(torch.backends.cuda, f"{kind}_sdp_enabled"),
            getattr(torch.backends.cuda, f"enable_{kind}_sdp"),
        )
        for kind in ("flash", "mem_efficient", "math", "cudnn")
    ),
    (
        partial(getattr, torch.distributions.Distribution, "_validate_args"),
        torch.distributions.Distribution.set_default_validate_args,
    ),
)


def _of_autocast(kinds: Iterable[str]) -> list[Access]:
    found: list[Access] = []
    for kind in sorted({"cpu", *kinds} - {"meta"}):
        for read, write in (
            (torch.is_autocast_enabled, torch.set_autocast_enabled),
            (torch.get_autocast_dtype, torch.set_autocast_dtype),
        ):
            found.append((partial(read, kind), partial(write, kind)))
    return found


def _set(read: Callable[[], Any], write: Callable[[Any], object], value: Any) -> None:
    if read() != value:
        write(value)


_OF_MEASUREMENTS = ("memopt.", "torch.profiler.")
"""Modules that a measurement itself imports, and that set nothing."""


def _kept_in_python() -> Restore:
    """Restores the environment, filters of warnings and levels of loggers."""
    modules = len(sys.modules)
    environment = dict(os.environ)
    filters = kept_list(warnings.filters)  # type: ignore[arg-type]
    loggers = (logging.root, *logging.root.manager.loggerDict.values())
    levels = [(one, one.level) for one in loggers if isinstance(one, logging.Logger)]

    def restore() -> None:
        if not all(name.startswith(_OF_MEASUREMENTS) for name in list(sys.modules)[modules:]):
            return
        filters()
        for logger, level in levels:
            if logger.level != level:
                logger.setLevel(level)
        if os.environ != environment:
            for name in os.environ.keys() - environment.keys():
                del os.environ[name]
            os.environ.update(environment)

    return restore


def _set_context(before: contextvars.Context) -> None:
    """Sets what has another value now. A variable that had none cannot be without one again."""
    for variable, value in before.items():
        if variable.get(None) is not value:
            variable.set(value)
