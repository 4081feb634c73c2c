"""`apply_activation_checkpointing`: chosen submodules of a model become checkpointed regions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.fsdp.wrap import _Policy, _recursive_wrap

from memopt._arguments import check_count, check_flags
from memopt._checkpoint.assigned import join_regions
from memopt._checkpoint.chosen_modules import (
    Modules,
    NamedModules,
    as_predicate,
    choose_modules,
    modules_in_chunks,
)
from memopt._checkpoint.chunks import checked_chunks
from memopt._checkpoint.partition import PartitionChoice, partition_of
from memopt._checkpoint.wrapper import checkpoint_wrapper
from memopt._class_patch import check_can_patch, restored_on_error
from memopt._errors import warn
from memopt._progress import progress
from memopt.memory.asked import check_function
from memopt.memory.calls.measure import step_with
from memopt.memory.step import StepFunction
from memopt.place import Place, check_names_place

WrapperFn = Callable[[nn.Module], nn.Module]

_WHO = "apply_activation_checkpointing"


@progress("memopt.apply_activation_checkpointing")
def apply_activation_checkpointing(
    model: nn.Module,
    checkpoint_wrapper_fn: WrapperFn | None = None,
    check_fn: Modules | None = None,
    auto_wrap_policy: Any = None,
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
    chunks: int | None = None,
    keep_decisions: bool | None = None,
    batch: Any = None,
    step: StepFunction = None,
) -> list[str]:
    """Apply `checkpoint_wrapper`, in place, to chosen submodules; `unwrap(model)` undoes it.

    The first four arguments are those of PyTorch's function of this name
    (torch.distributed.algorithms._checkpoint.checkpoint_wrapper). Without any of them it wraps the
    model's blocks, where PyTorch's wraps every submodule.

    Candidates are the submodules, never `model` itself, that `check_fn` is true for, and that have
    a forward: nn.ModuleList and its like are never called, and are passed over.

    With a `batch` and without `check_fn` candidates are the modules, none inside another, whose
    regions give a forward and backward with that batch the least peak: what is kept for backward,
    and the most that one region takes when it is recomputed. This is measured, on tensors without
    values where the model does not look at values, and does not depend on how the model is written.
    Where transformers, diffusers or timm have gradient checkpointing for the model, modules are
    chosen that keep no more than that, if there are such. Modules that return views of their
    arguments, write to these in place, keep nothing or run without gradients are none. Of a long
    chain several in a row may share a region, which keeps less between them, where that lowers the
    peak and all of them are chosen, without `chunks`, `partition` or a counter.

    Without both, candidates are the model's blocks, as far as its structure shows them:

    - the elements of an nn.ModuleList, nn.Sequential or nn.ModuleDict that are of one class, or
      some of which are, and are more than single layers. All such lists count, of all towers of the
      model, but not those inside a block of another one. Of lists in a list, whose elements a loop
      takes out and calls, these elements count, as in `for attention, feed_forward in self.layers`.
    - Stages, that is elements that differ in their parameters and consist of such blocks (those of
      Swin, ConvNeXt or ResNet), are no blocks; what is inside is.
    - Children of one class in a module without such lists, as timm's RegNet and hand-written U-Nets
      have them.
    - Single layers (a Linear, a convolution, a norm) are never blocks: their regions save nothing.

    A batch finds more: stems, heads, blocks of unlike classes, and whatever is in no list.

    From the candidates, in the order of `model.named_modules()`, `skip_first` and `skip_last` are
    left out first; `every` or `fraction` then choose among the rest. A candidate inside another is
    wrapped as well, a module that the model holds in several places once. A chosen module that is
    wrapped already gets the new settings; modules that are not chosen stay as they are.

    A region recomputes its module in backward, where counters, moving averages and spectral norm's
    vectors change once more (batch norm's statistics do not). With a `batch` the model runs once,
    each chosen module twice more, and modules that cannot be recomputed as they ran are left out. A
    warning says which, and why. For modules that `check_fn` chooses it also says which the batch
    never calls, or without gradients alone, and which are inside others. All is put back.

    Args:
        model: its submodules are changed; names, parameters and state_dict stay the same.
        checkpoint_wrapper_fn: wraps a chosen module in place of `checkpoint_wrapper`; its result
            takes the module's place. Options of `checkpoint_wrapper` must not be given with it.
        check_fn: called with each submodule; or a class or a sequence of classes, whose instances
            are meant.
        auto_wrap_policy: a policy of PyTorch's FSDP (torch.distributed.fsdp.wrap) that chooses the
            modules in place of `check_fn`.
        every: the first of each `every` candidates, at least 1. Default: all candidates.
        fraction: round(fraction * candidates) of them, spread evenly and beginning with the first;
            from 0 to 1. Not together with `every`.
        skip_first: that many candidates at the beginning stay as they are.
        skip_last: the same at the end.
        offload_to_cpu: see `checkpoint_wrapper`.
        maintain_forward_counter, offload, partition, preserve_rng_state, early_stop: see
            `checkpoint_wrapper`.
        chunks: the modules that are chosen by `check_fn` or `auto_wrap_policy` run in that many
            chunks of rows, see `checkpoint_wrapper`; with a `batch` those that do not work on each
            row alone are left out, with a warning. Without these arguments a `batch` has to be
            given: beside the modules that are regions for it, the outermost ones that work on each
            row alone and keep tensors inside (the MLPs of blocks, as a rule) run in chunks, each
            inside the region of its block, if that is one.
        keep_decisions: see `checkpoint_wrapper`. None: with a `batch`, for the modules that choose
            experts, samples or sizes by values with it; else for none.
        batch: a tensor; a tuple or list of positional arguments of the model; or a mapping
            of keyword arguments.
        step: with a batch: `step(model, batch)` runs forward and backward itself, see
            `memopt.plan`.

    Returns:
        The qualified names of the modules that were wrapped, in order; empty if none was chosen.

    Raises:
        TypeError: an argument is of the wrong type, none of the modules that `check_fn` chooses has
            a forward, or `checkpoint_wrapper` raises it for a module.
        ValueError: an argument is out of its range, both `every` and `fraction` are given, or there
            is neither `check_fn` nor `batch` and the model has no blocks.
        Whatever the model raises with `batch`, with a note. After any error the model is as before.
    """
    check_can_patch(_WHO, "model", model)
    check_flags(
        _WHO,
        maintain_forward_counter=maintain_forward_counter,
        preserve_rng_state=preserve_rng_state,
        early_stop=early_stop,
        keep_decisions=keep_decisions is not None and keep_decisions,
    )
    if offload is not None:
        check_names_place(f"{_WHO}: offload", offload)
    predicate = as_predicate(f"{_WHO}: check_fn", check_fn)
    if auto_wrap_policy is not None:
        predicate = modules_of_policy(model, auto_wrap_policy).__contains__
    ranks = partition_of(_WHO, partition)
    if every is not None and fraction is not None:
        raise ValueError(
            f"{_WHO}: every and fraction must not be given together, got "
            f"every={every!r} and fraction={fraction!r}"
        )
    check_count(_WHO, "every", 1 if every is None else every)
    check_count(_WHO, "skip_first", skip_first, least=0)
    check_count(_WHO, "skip_last", skip_last, least=0)
    _check_fraction(0 if fraction is None else fraction)
    checked_chunks(_WHO, chunks)
    if chunks is not None and predicate is None and batch is None:
        raise ValueError(
            f"{_WHO}: chunks needs check_fn, which chooses the modules, or a batch to find those "
            f"that work on each row alone, got chunks={chunks!r} and neither"
        )

    check_function(_WHO, step, None)
    if step is not None and batch is None:
        raise ValueError(f"{_WHO}: step must be given with a batch, got none")
    probed = step_with(_WHO, model, batch, step)
    found = choose_modules(probed, predicate)
    for note in found.warnings:
        warn(f"{_WHO}: {note}")
    end = max(0, len(found.modules) - skip_last)
    chosen = _choose(found.modules[skip_first:end], every, fraction)
    are_all = len(chosen) == len(found.modules)
    options: dict[str, Any] = {
        "offload_to_cpu": offload_to_cpu,
        "maintain_forward_counter": maintain_forward_counter,
        "offload": offload,
        "partition": ranks,
        "preserve_rng_state": preserve_rng_state,
        "early_stop": early_stop,
    }
    if checkpoint_wrapper_fn is not None:
        _check_no_options(options | {"chunks": chunks, "keep_decisions": bool(keep_decisions)})
        _replace(model, chosen, checkpoint_wrapper_fn)
        return [name for name, _ in chosen]
    in_chunks: dict[str, int] = {}
    if chunks is not None:
        paths = [path for path, _ in chosen]
        in_chunks, notes = modules_in_chunks(probed, chunks, paths, predicate)
        for note in notes:
            warn(f"{_WHO}: {note}")
        if predicate is not None and batch is not None:
            chosen = [(path, module) for path, module in chosen if path in in_chunks]
        else:
            wrapped = {path for path, _ in chosen} | in_chunks.keys()
            chosen = [(path, module) for path, module in model.named_modules() if path in wrapped]
    with restored_on_error(model):
        for path, module in chosen:
            keeps = path in found.deciding if keep_decisions is None else keep_decisions
            checkpoint_wrapper(module, chunks=in_chunks.get(path), keep_decisions=keeps, **options)
        if are_all and chunks is None and not (ranks or maintain_forward_counter or keep_decisions):
            for segment in found.segments:
                join_regions(model, segment)
    return [name for name, _ in chosen]


def _choose(candidates: NamedModules, every: int | None, fraction: float | None) -> NamedModules:
    if fraction is None:
        return candidates[:: every or 1]
    count = len(candidates)
    wanted = round(fraction * count)
    return [c for i, c in enumerate(candidates) if i * wanted % count < wanted]


def modules_of_policy(model: nn.Module, policy: Any) -> set[nn.Module]:
    """The submodules that a policy of PyTorch's FSDP would wrap."""
    if isinstance(policy, _Policy):
        return set(policy._run_policy(model, ignored_modules=set(), root_kwargs={})) - {model}
    if not callable(policy):
        raise TypeError(
            f"{_WHO}: auto_wrap_policy must be a policy of "
            f"torch.distributed.fsdp.wrap or a function like one, got {type(policy).__name__}"
        )
    chosen: set[nn.Module] = set()

    def note(module: nn.Module, **_: Any) -> nn.Module:
        chosen.add(module)
        return module

    _recursive_wrap(model, policy, note, set(), set(), only_wrap_children=True)
    return chosen


def _replace(model: nn.Module, chosen: NamedModules, wrapper_fn: WrapperFn) -> None:
    """Replaces each module by the result of `wrapper_fn`; nothing is set if that raises."""
    if not callable(wrapper_fn):
        raise TypeError(
            f"{_WHO}: checkpoint_wrapper_fn must be a function of a module, "
            f"got {wrapper_fn!r}; check_fn chooses modules"
        )
    wrapped = {module: wrapper_fn(module) for _, module in reversed(chosen)}
    for module, result in wrapped.items():
        if not isinstance(result, nn.Module):
            raise TypeError(
                f"{_WHO}: checkpoint_wrapper_fn must return a module, got "
                f"{type(result).__name__} for {type(module).__name__}"
            )
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child in wrapped:
                setattr(parent, name, wrapped[child])


def _check_no_options(options: dict[str, Any]) -> None:
    parameters = inspect.signature(checkpoint_wrapper).parameters
    given = [name for name, value in options.items() if value != parameters[name].default]
    if given:
        raise ValueError(
            f"{_WHO}: options of memopt.checkpoint_wrapper must not be "
            f"given with another checkpoint_wrapper_fn, got {', '.join(given)}"
        )


def _check_fraction(value: object) -> None:
    rule = f"{_WHO}: fraction must be a number from 0 to 1, got {value!r}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(rule)
    if not 0 <= value <= 1:
        raise ValueError(rule)
