"""apply_checkpointing: chooses submodules of a model and makes them checkpointed regions."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from memopt._class_patch import restored_on_error
from memopt.checkpoint.wrapper import checkpoint_wrapper, class_before_wrapping

NamedModules = list[tuple[str, nn.Module]]


def apply_checkpointing(
    model: nn.Module,
    check_fn: Callable[[nn.Module], bool] | None = None,
    *,
    every: int | None = None,
    fraction: float | None = None,
    skip_first: int = 0,
    skip_last: int = 0,
    offload_to_cpu: bool = False,
    maintain_forward_counter: bool = False,
) -> list[str]:
    """Apply `checkpoint_wrapper`, in place, to chosen submodules; `unwrap(model)` undoes it.

    Candidates are the submodules, never `model` itself, that `check_fn` is true for. Without it
    they are the model's blocks: the elements of the longest nn.ModuleList or nn.Sequential in which
    all elements are of the same class and have parameters. Of equally long lists all count, except
    those inside an element of another one. From the candidates, in the order of
    `model.named_modules()`, `skip_first` and `skip_last` are left out first; `every` or `fraction`
    then choose among the rest. A candidate inside another is wrapped as well, a module that the
    model holds in several places once. A chosen module that is wrapped already gets the new
    settings; modules that are not chosen stay as they are.

    Args:
        model: its submodules are changed; names, parameters and state_dict stay the same.
        check_fn: called with each submodule, as by PyTorch's apply_activation_checkpointing.
        every: the first of each `every` candidates, at least 1. Default: all candidates.
        fraction: round(fraction * candidates) of them, spread evenly and beginning with the first;
            from 0 to 1. Not together with `every`.
        skip_first: that many candidates at the beginning stay as they are.
        skip_last: the same at the end.
        offload_to_cpu: see `checkpoint_wrapper`.
        maintain_forward_counter: see `checkpoint_wrapper`.

    Returns:
        The qualified names of the modules that were wrapped, in order; empty if none was chosen.

    Raises:
        TypeError: an argument is of the wrong type, or `checkpoint_wrapper` raises it for a module.
        ValueError: an argument is out of its range, both `every` and `fraction` are given, or there
            is no `check_fn` and the model has no such list. After any error the model is as before.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"apply_checkpointing: model must be an nn.Module, got {type(model).__name__}"
        )
    if check_fn is not None and not callable(check_fn):
        raise TypeError(f"apply_checkpointing: check_fn must be callable or None, got {check_fn!r}")
    if every is not None and fraction is not None:
        raise ValueError(
            "apply_checkpointing: every and fraction must not be given together, got "
            f"every={every!r} and fraction={fraction!r}"
        )
    _check_count("every", 1 if every is None else every, least=1)
    _check_count("skip_first", skip_first, least=0)
    _check_count("skip_last", skip_last, least=0)
    _check_fraction(0 if fraction is None else fraction)

    candidates = _blocks(model) if check_fn is None else _submodules(model, check_fn)
    end = max(0, len(candidates) - skip_last)
    chosen = _choose(candidates[skip_first:end], every, fraction)
    with restored_on_error(model):
        for _, module in chosen:
            checkpoint_wrapper(module, offload_to_cpu, maintain_forward_counter)
    return [name for name, _ in chosen]


def _submodules(model: nn.Module, check_fn: Callable[[nn.Module], bool]) -> NamedModules:
    return [(name, m) for name, m in model.named_modules() if m is not model and check_fn(m)]


def _blocks(model: nn.Module) -> NamedModules:
    """The elements of the longest lists of like modules, see apply_checkpointing."""
    lists = [module for module in model.modules() if _is_list_of_blocks(module)]
    if not lists:
        raise ValueError(
            "apply_checkpointing: without check_fn, model must have an nn.ModuleList or "
            "nn.Sequential whose elements are all of the same class and have parameters, got "
            f"{type(model).__name__} without one"
        )
    most = max(map(_length, lists))
    longest = [module for module in lists if _length(module) == most]
    blocks = {block for container in longest for block in container.children()}
    inside = {module for block in blocks for module in block.modules()}
    chosen = {b for container in longest if container not in inside for b in container.children()}
    return _submodules(model, chosen.__contains__)


def _is_list_of_blocks(module: nn.Module) -> bool:
    blocks = list(module.children())
    return (
        isinstance(module, (nn.ModuleList, nn.Sequential))
        and len({class_before_wrapping(block) for block in blocks}) == 1
        and all(any(True for _ in block.parameters()) for block in blocks)
    )


def _length(module: nn.Module) -> int:
    """Distinct elements: one that is in the list twice is wrapped once."""
    return len(list(module.children()))


def _choose(candidates: NamedModules, every: int | None, fraction: float | None) -> NamedModules:
    if fraction is None:
        return candidates[:: every or 1]
    count = len(candidates)
    wanted = round(fraction * count)
    return [c for i, c in enumerate(candidates) if i * wanted % count < wanted]


def _check_count(name: str, value: object, least: int) -> None:
    rule = f"apply_checkpointing: {name} must be an int of at least {least}, got {value!r}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(rule)
    if value < least:
        raise ValueError(rule)


def _check_fraction(value: object) -> None:
    rule = f"apply_checkpointing: fraction must be a number from 0 to 1, got {value!r}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(rule)
    if not 0 <= value <= 1:
        raise ValueError(rule)
