"""apply_checkpointing: chooses submodules of a model and makes them checkpointed regions."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

from memopt._checkpoint.blocks import find_blocks
from memopt._checkpoint.partition import PartitionChoice, partition_of
from memopt._checkpoint.probe import arguments_of, cannot_run_again, left_out
from memopt._checkpoint.wrapper import checkpoint_wrapper, has_forward
from memopt._class_patch import restored_on_error
from memopt._offload.place import Place

NamedModules = list[tuple[str, nn.Module]]

Predicate = Callable[[nn.Module], bool]
Choice = Predicate | type[nn.Module] | Sequence[type[nn.Module]]
"""How a caller says which submodules are meant."""


def apply_checkpointing(
    model: nn.Module,
    check_fn: Choice | None = None,
    *,
    every: int | None = None,
    fraction: float | None = None,
    skip_first: int = 0,
    skip_last: int = 0,
    offload_to_cpu: bool = False,
    maintain_forward_counter: bool = False,
    offload: Place | None = None,
    partition: PartitionChoice = None,
    preserve_rng_state: bool = True,
    early_stop: bool = True,
    sample_input: Any = None,
) -> list[str]:
    """Apply `checkpoint_wrapper`, in place, to chosen submodules; `unwrap(model)` undoes it.

    Candidates are the submodules, never `model` itself, that `check_fn` is true for, and that have
    a forward: nn.ModuleList and its like are never called, and are passed over. Without `check_fn`
    candidates are the model's blocks:

    - the elements of an nn.ModuleList, nn.Sequential or nn.ModuleDict that are of one class, or
      mostly of classes that occur more than once, and are more than single layers. All such lists
      count, of all towers of the model, but not those inside a block of another one.
    - Stages, that is elements that differ in their parameters and consist of such lists (those of
      Swin, ConvNeXt or ResNet), are no blocks; what their lists hold is.
    - The children of a module that loops over them as timm's RegNet does: all with parameters are
      of one class, more than layers, and named by a prefix and a count (b1, b2, ...), and no method
      calls them by these names.
    - Of a list of lists, whose elements a loop takes out and calls, as in
      `for attention, feed_forward in self.layers`, these modules. A warning says so.
    - Never experts. A mixture of experts that is in no list is a block.
    - Where all lists hold single layers, the elements of each ModuleList or Sequential that are of
      one class.

    From the candidates, in the order of `model.named_modules()`, `skip_first` and `skip_last` are
    left out first; `every` or `fraction` then choose among the rest. A candidate inside another is
    wrapped as well, a module that the model holds in several places once. A chosen module that is
    wrapped already gets the new settings; modules that are not chosen stay as they are.

    A region runs its module again in backward, where counters, moving averages and spectral norm's
    vectors move once more (batch norm's statistics do not). With a `sample_input` the model runs
    once, each chosen module twice more, all is put back, and modules that cannot run again as they
    did are left out. A warning says which, and why.

    Args:
        model: its submodules are changed; names, parameters and state_dict stay the same.
        check_fn: called with each submodule, as by PyTorch's apply_activation_checkpointing; or a
            class or a sequence of classes, whose instances are meant.
        every: the first of each `every` candidates, at least 1. Default: all candidates.
        fraction: round(fraction * candidates) of them, spread evenly and beginning with the first;
            from 0 to 1. Not together with `every`.
        skip_first: that many candidates at the beginning stay as they are.
        skip_last: the same at the end.
        offload_to_cpu: see `checkpoint_wrapper`.
        maintain_forward_counter, offload, partition, preserve_rng_state, early_stop: see
            `checkpoint_wrapper`.
        sample_input: a tensor; a tuple or list of positional arguments of the model; or a mapping
            of keyword arguments.

    Returns:
        The qualified names of the modules that were wrapped, in order; empty if none was chosen.

    Raises:
        TypeError: an argument is of the wrong type, none of the modules that `check_fn` chooses has
            a forward, or `checkpoint_wrapper` raises it for a module.
        ValueError: an argument is out of its range, both `every` and `fraction` are given, or there
            is no `check_fn` and the model has no blocks. After any error the model is as before.
        Whatever the model's forward raises with `sample_input`.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"apply_checkpointing: model must be an nn.Module, got {type(model).__name__}"
        )
    predicate = as_predicate("apply_checkpointing: check_fn", check_fn)
    ranks = partition_of("apply_checkpointing", partition)
    if every is not None and fraction is not None:
        raise ValueError(
            "apply_checkpointing: every and fraction must not be given together, got "
            f"every={every!r} and fraction={fraction!r}"
        )
    _check_count("every", 1 if every is None else every, least=1)
    _check_count("skip_first", skip_first, least=0)
    _check_count("skip_last", skip_last, least=0)
    _check_fraction(0 if fraction is None else fraction)

    candidates, note = choose_modules(model, predicate)
    if note:
        warnings.warn(f"apply_checkpointing: {note}", stacklevel=2)
    end = max(0, len(candidates) - skip_last)
    chosen = _choose(candidates[skip_first:end], every, fraction)
    if sample_input is not None:
        args, kwargs = arguments_of(sample_input)
        reasons = cannot_run_again(model, partial(model, *args, **kwargs), dict(chosen))
        if reasons:
            warnings.warn(f"apply_checkpointing: {left_out(reasons)}", stacklevel=2)
        chosen = [(name, module) for name, module in chosen if name not in reasons]
    with restored_on_error(model):
        for _, module in chosen:
            checkpoint_wrapper(
                module,
                offload_to_cpu,
                maintain_forward_counter,
                offload=offload,
                partition=ranks,
                preserve_rng_state=preserve_rng_state,
                early_stop=early_stop,
            )
    return [name for name, _ in chosen]


def as_predicate(argument: str, choice: Choice | None) -> Predicate | None:
    """`choice` as a function of a module; `argument` is what an error message calls it."""
    if choice is None:
        return None
    if isinstance(choice, type) or not callable(choice):
        classes: Any = tuple(choice) if isinstance(choice, (list, tuple, set)) else (choice,)
        if classes and all(isinstance(c, type) and issubclass(c, nn.Module) for c in classes):
            return lambda module: isinstance(module, classes)
        raise TypeError(
            f"{argument} must be a function of a module, a subclass of nn.Module, or a "
            f"sequence of such classes, got {choice!r}"
        )
    return choice


def choose_modules(model: nn.Module, predicate: Predicate | None) -> tuple[NamedModules, str]:
    """The candidates of `apply_checkpointing`, and what a user should know about the choice."""
    if predicate is None:
        blocks = find_blocks(model)
        if not blocks.modules:
            raise ValueError(
                "apply_checkpointing: without check_fn, model must have an nn.ModuleList, "
                "nn.Sequential or nn.ModuleDict whose elements are of the same class and have "
                f"parameters, got {type(model).__name__} without one; check_fn (in convert: "
                "checkpoint) chooses modules"
            )
        return _submodules(model, blocks.modules.__contains__), blocks.note
    chosen = _submodules(model, predicate)
    candidates = [(name, module) for name, module in chosen if has_forward(module)]
    if chosen and not candidates:
        name, module = chosen[0]
        raise TypeError(
            "apply_checkpointing: check_fn (in convert: checkpoint) must choose modules that have "
            f"a forward, got {type(module).__name__} at {name!r}, which is never called itself"
        )
    return candidates, ""


def _submodules(model: nn.Module, predicate: Predicate) -> NamedModules:
    return [(name, m) for name, m in model.named_modules() if m is not model and predicate(m)]


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
