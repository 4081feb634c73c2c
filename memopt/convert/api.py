"""convert and revert: memopt for a model that nobody rewrites."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import nn

from memopt._subclass import Changed, changes, check_can_change, take_away, unchanged_on_error
from memopt.checkpoint.apply import apply_checkpointing
from memopt.checkpoint.wrapper import (
    check_can_unwrap,
    checkpoint_wrapper,
    settings_of,
    unwrap_itself,
)
from memopt.convert.around import Recomputing, has_recipes, turn_recipes_on
from memopt.convert.eligible import has_kernels_for
from memopt.convert.known import SAVES_ITS_OUTPUT, Chooser
from memopt.convert.measure import saved_bytes
from memopt.convert.probe import quiet
from memopt.convert.report import Left, Report
from memopt.convert.report import Swapped as SwappedEntry
from memopt.convert.swap import Swap, Swapped, swap
from memopt.convert.transformer_layer import (
    activation_function,
    revert_function,
    swap_function,
)

ModuleT = TypeVar("ModuleT", bound=nn.Module)
Choice = Callable[[nn.Module], bool] | type[nn.Module] | Sequence[type[nn.Module]]

# On a module that convert made a checkpointed region: the settings it had before, or None.
_SETTINGS_BEFORE = "_memopt_convert_settings_before"

STEP_ASIDE = (
    "recipes are on around the model's forward; under torch.compile they step aside, where the "
    "compiler decides what is kept"
)
NOTHING_NEW = "nothing changed: the model was converted before"


def convert(
    model: nn.Module,
    sample_input: Any = None,
    *,
    recompute: bool = True,
    checkpoint: Choice | bool | None = None,
    offload: Choice | None = None,
) -> Report:
    """Let memopt compute what it can of `model`, in place; `revert(model)` undoes it.

    Modules that memopt has an op for are swapped: torch.nn's LayerNorm, RMSNorm, GELU, SiLU, ReLU,
    Sigmoid and Dropout, and their subclasses that keep the forward; any module that computes one of
    these norms or memopt's activations, whatever its class is called (as transformers', timm's or
    your own); and gated units between linears, down(f(gate(x)) up(x)). The latter are known by
    structure and by comparing what they compute with the formula, on stand-ins with small tensors
    of their own on the CPU, so that nothing of the model is read, written or called; it may be on
    any device, meta included. What memopt does not know, it leaves alone.

    A swapped module is the object that it was, of a subclass of its class: parameters, buffers,
    keys, hooks, training flag, copies and pickles (which need memopt to load) stay. Calls that
    memopt's ops do not take, of other dtypes or devices or of distributed tensors, are PyTorch's as
    before; and the module's own, where it is known by probes and a number, string or function among
    its attributes was changed since (but a norm's eps). Results differ by rounding; dropout draws
    other random numbers; under autocast norms return the autocast dtype. The activation in front of
    a gated product is not called as a module, unless it has a hook.

    Recipes (see `memopt.recompute`) are turned on around the model's forward, so that the tensors
    that these ops return are not stored for backward by whatever uses them.

    Converting again swaps what has been added since; there is nothing to do otherwise, and the
    report says so. Convert before torch.compile, DistributedDataParallel, FSDP.

    Args:
        model: changed in place.
        sample_input: with one, the model runs once before and once after, and the report has the
            bytes saved for backward. A tensor; a tuple or list of positional arguments; or a
            mapping of keyword arguments. Random numbers and buffers are left as they were.
        recompute: turn recipes on. Without them ReLU and Sigmoid stay PyTorch's, which save their
            output like the layer behind them, and not their input.
        checkpoint: submodules to make checkpointed regions (see `checkpoint_wrapper`): a predicate,
            a class or a sequence of classes, or True for the model's blocks as
            `apply_checkpointing` finds them.
        offload: the same, with the regions' inputs kept in host memory until backward. A module
            chosen by both is offloaded.

    Returns:
        A report of what was swapped, and what was left and why. `print` it; `to_dict()`.

    Raises:
        TypeError: `model` is no nn.Module, is a ScriptModule, compiled or quantised, or
            `checkpoint` or `offload` is of another kind.
        ValueError: the model's forward raises with `sample_input`, or `checkpoint` is True and the
            model has no blocks. After any error the model is as before.
    """
    _check_model(model)
    blocks = checkpoint is True
    checkpoint_fn = None if isinstance(checkpoint, bool) else _predicate("checkpoint", checkpoint)
    offload_fn = _predicate("offload", offload)
    before = None if sample_input is None else _measure(model, sample_input)
    swaps, functions, swapped, left = _plan(model, recompute)
    notes = []
    with unchanged_on_error(model):
        for module, to in swaps:
            swap(module, to)
        for module in functions:
            swap_function(module)
        checkpointed, offloaded = _apply_regions(model, blocks, checkpoint_fn, offload_fn)
        nothing_new = not swapped and not checkpointed and not offloaded
        if nothing_new and (has_recipes(model) or not recompute) and _is_converted(model):
            notes.append(NOTHING_NEW)
        if recompute:
            turn_recipes_on(model)
        if has_recipes(model):
            notes.append(STEP_ASIDE)
        notes += _devices_without_kernels(model)
        after = None if sample_input is None else _measure(model, sample_input)
    return Report(
        model=type(model).__qualname__,
        swapped=tuple(swapped),
        left=tuple(left),
        recompute=has_recipes(model),
        checkpointed=tuple(checkpointed),
        offloaded=tuple(offloaded),
        bytes_before=before,
        bytes_after=after,
        notes=tuple(notes),
    )


def revert(model: ModuleT) -> ModuleT:
    """Undo `convert` on `model` and all of its submodules.

    Each has the class that it had, and nothing is left on it; what was not converted stays as it
    is. Regions that `convert` made are unwrapped, or have the settings again that they had before.

    Returns:
        `model`, the same object.

    Raises:
        TypeError: `model` is not an nn.Module.
        RuntimeError: something else (FSDP2, a parametrization) has changed the class of one of the
            modules since it was converted. None is reverted then.
    """
    check_can_change("revert", "model", model)
    modules = list(model.modules())
    for module in modules:
        for mixin in (Swapped, Recomputing):
            if issubclass(type(module), mixin) and not _has(module, mixin):
                raise RuntimeError(
                    "revert: model must have the classes that convert gave it, got "
                    f"{type(module).__name__}, a class derived from one of them"
                )
        if _SETTINGS_BEFORE in module.__dict__ and settings_of(module) is not None:
            check_can_unwrap("revert", module)
    for module in modules:
        for mixin in (Swapped, Recomputing):
            if _has(module, mixin):
                take_away(module, mixin)
        revert_function(module)
        _revert_region(module)
    return model


def _has(module: nn.Module, mixin: type[Changed]) -> bool:
    return any(change.mixin is mixin for change in changes(type(module)))


def _is_converted(model: nn.Module) -> bool:
    return any(issubclass(type(module), (Swapped, Recomputing)) for module in model.modules())


def _plan(
    model: nn.Module, recompute: bool
) -> tuple[list[tuple[nn.Module, Swap]], list[nn.Module], list[SwappedEntry], list[Left]]:
    """What to swap, and the report of it. Changes nothing."""
    chooser = Chooser(recompute)
    paths = {module: path for path, module in model.named_modules()}
    swaps, functions, swapped, left = [], [], [], []
    with quiet():
        # Those inside come first: a gated unit asks for its activation.
        for module in reversed(paths):
            name = type(module).__qualname__
            choice = chooser.choose(module)
            if isinstance(choice, str):
                left.append(Left(paths[module], name, choice))
            elif choice is not None:
                swaps.append((module, choice))
                swapped.append(SwappedEntry(paths[module], name, choice.to))
            function = activation_function(module)
            if function is not None:
                path = f"{paths[module]}.activation".removeprefix(".")
                name = f"torch.nn.functional.{function}"
                if function == "relu" and not recompute:
                    left.append(Left(path, name, SAVES_ITS_OUTPUT))
                else:
                    functions.append(module)
                    swapped.append(SwappedEntry(path, name, f"memopt.functional.{function}"))
    return swaps, functions, swapped[::-1], left[::-1]


def _devices_without_kernels(model: nn.Module) -> list[str]:
    devices = {parameter.device for parameter in model.parameters()}
    return [
        f"this build of memopt has no kernels for {device}: what is there stays PyTorch's"
        for device in sorted({d.type for d in devices if not has_kernels_for(d)})
    ]


def _measure(model: nn.Module, sample_input: Any) -> int:
    try:
        return saved_bytes(model, sample_input)
    except Exception as error:
        raise ValueError(
            "convert: sample_input must be a tensor, a tuple or list of positional arguments, or a "
            f"mapping of keyword arguments that the model's forward takes, got "
            f"{type(sample_input).__name__}, for which {type(model).__name__} raised "
            f"{type(error).__name__}: {error}"
        ) from error


def _apply_regions(
    model: nn.Module,
    blocks: bool,
    checkpoint: Callable[[nn.Module], bool] | None,
    offload: Callable[[nn.Module], bool] | None,
) -> tuple[list[str], list[str]]:
    before = {module: settings_of(module) for module in model.modules()}
    checkpointed, offloaded = [], []
    if blocks or checkpoint is not None:
        checkpointed = apply_checkpointing(model, None if blocks else checkpoint)
    if offload is not None:
        offloaded = apply_checkpointing(model, offload, offload_to_cpu=True)
    for path in {*checkpointed, *offloaded}:
        module = model.get_submodule(path)
        module.__dict__.setdefault(_SETTINGS_BEFORE, before[module])
    return [path for path in checkpointed if path not in offloaded], offloaded


def _revert_region(module: nn.Module) -> None:
    if _SETTINGS_BEFORE not in module.__dict__:
        return
    settings = module.__dict__.pop(_SETTINGS_BEFORE)
    if settings is not None:
        checkpoint_wrapper(module, settings.offload_to_cpu, settings.maintain_forward_counter)
    elif settings_of(module) is not None:  # else it was unwrapped since
        unwrap_itself(module)


def _predicate(name: str, choice: object) -> Callable[[nn.Module], bool] | None:
    if choice is None:
        return None
    if isinstance(choice, type) or not callable(choice):
        classes: Any = tuple(choice) if isinstance(choice, (list, tuple, set)) else (choice,)
        if classes and all(isinstance(c, type) and issubclass(c, nn.Module) for c in classes):
            return lambda module: isinstance(module, classes)
        raise TypeError(
            f"convert: {name} must be a function of a module, a subclass of nn.Module, or a "
            f"sequence of such classes, got {choice!r}"
        )
    return choice


def _check_model(model: nn.Module) -> None:
    check_can_change("convert", "model", model)
    # Where nobody imported it, nothing is compiled.
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    for path, module in model.named_modules():
        where = f" at {path!r}" if path else ""
        if eval_frame is not None and isinstance(module, eval_frame.OptimizedModule):
            raise TypeError(
                "convert: model must not be compiled, got "
                f"{type(module).__name__}{where}; convert it before torch.compile"
            )
        if type(module).__module__.startswith(("torch.ao.nn", "torch.nn.quantized")):
            raise TypeError(
                "convert: model must not be quantised (it has no gradients), got "
                f"{type(module).__module__}.{type(module).__qualname__}{where}"
            )
