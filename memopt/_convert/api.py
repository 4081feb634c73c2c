"""convert and revert: memopt for an unmodified model."""

from __future__ import annotations

import sys
from collections.abc import Container
from typing import Any, TypeVar

from torch import nn

from memopt._arguments import check_flags
from memopt._checkpoint.assigned import revert_region
from memopt._checkpoint.chosen_modules import Modules
from memopt._class_patch import SwappedModule, check_can_patch, restored_on_error
from memopt._convert.apply_swaps import apply_swaps, put_originals_back, undo_swap
from memopt._convert.head import (
    FoundHead,
    find_heads,
    is_head,
    make_lazy,
    probed_heads,
    with_uses,
)
from memopt._convert.match import Context, Match, Reason, match
from memopt._convert.recipes import has_recipes, is_converted, turn_recipes_off, turn_recipes_on
from memopt._convert.regions import Regions
from memopt._convert.register import registered_rules
from memopt._convert.remaining import remaining
from memopt._convert.report import Left, Report, Swapped
from memopt._convert.rules import RULES
from memopt._convert.sample import (
    NOT_COUNTED,
    attribute_sample,
    measure_sample,
    note_on_calls,
    notes_on_sample,
)
from memopt._convert.skip import Skip, outermost, skipped
from memopt._convert.supported import has_kernels_for
from memopt._convert.swap import Swap, swap_of
from memopt._convert.told_norms import (
    AutocastNorms,
    check_autocast_norms,
    with_autocast_norms,
    with_written_inputs,
)
from memopt._extension import require_native
from memopt._head.call import watched_heads
from memopt._progress import progress
from memopt.memory.asked import check_function
from memopt.memory.step import StepFunction
from memopt.place import Place

ModuleT = TypeVar("ModuleT", bound=nn.Module)

STEP_ASIDE = (
    "recipes are on in the calls of the model and of its modules; under torch.compile they step "
    "aside, and "
    "modules compute by PyTorch's own ops, from which Inductor generates code: "
    "memopt.compile(model) has it keep for backward what recipes keep"
)
BYTES_OF_A_FUNCTION = (
    "bytes are not counted where step= runs forward and backward itself; "
    "memopt.check(model, batch, step=step) does that"
)
NOTHING_NEW = "nothing changed: the model was converted before"


@progress("memopt.convert")
def convert(
    model: nn.Module,
    batch: Any = None,
    *,
    recipes: bool = True,
    functional: bool = True,
    head: bool = True,
    checkpoint: Modules | bool | None = None,
    offload: Place | None = None,
    chunks: int | None = None,
    autocast_norms: AutocastNorms = "keep",
    skip: Skip | None = None,
    step: StepFunction = None,
) -> Report:
    """Have memopt's ops compute what they can of `model`, in place; `revert(model)` undoes it.

    A list of rules says which modules are swapped:

    - torch.nn's LayerNorm, RMSNorm, GELU, SiLU, ReLU, ReLU6, LeakyReLU, ELU, Hardswish,
      Hardsigmoid, Mish, Sigmoid, Dropout and SyncBatchNorm, and subclasses of them that keep the
      forward; the activation function of torch.nn's transformer layers. With inplace=True an
      activation goes on writing over its input (see `memopt.functional.activation_`).
    - Any module that computes one of these norms or memopt's activations, whatever its class is
      called: those of transformers and timm, or your own. Norms may also be over channels, without
      a weight, with 1 + weight, or F.normalize times the root of the size.
    - Gated units, down(f(gate(x)) up(x)), with and without their linears; and f(up(x)) where f is
      a formula in the forward.
    - Modules that your own rules know, which are asked first: see `memopt.convert.rule`.

    Results differ by rounding, dropout draws other random numbers, and all else stays: parameters,
    buffers, state_dict keys, hooks, copies, transformers' gradient checkpointing. The rest is under
    Details, below the arguments.

    Args:
        model: changed in place.
        batch: with one, the model runs once before and once after, and the report has the bytes
            kept for backward, and what still keeps how many of them. A tensor; a tuple or list of
            positional arguments; or a mapping of keyword arguments. `memopt.saved_bytes` measures,
            which leaves the model as it was. Storages of the sample that are saved count; a note
            says how many bytes they are.
        recipes: turn recipes on. Without them ReLU and Sigmoid stay PyTorch's, which save their
            output like the layer behind them, and not their input. With them a call of either is
            memopt's where its input is kept anyway, and PyTorch's elsewhere.
        functional: with recipes, calls of PyTorch's gelu, silu, relu, relu6, leaky_relu, elu,
            hardswish, hardsigmoid, mish, sigmoid, dropout, layer_norm, rms_norm, group_norm,
            instance_norm and batch_norm inside the model are memopt's too, as functions of
            torch.nn.functional or torch, as methods of tensors and in torch.nn's modules, the
            activations in place as well. What memopt's ops do not support stays
            PyTorch's. Calls outside the model are PyTorch's too. Sums, products and copies of
            PyTorch's with an operand that has a recipe have one. For every second sum of a
            float32 residual and a 16-bit tensor of its shape, as blocks add them under autocast,
            16-bit tensor is kept in place of the sum, if nothing else holds that tensor by then.
        head: have the head return lazy logits. A head is a Linear that shares an embedding's
            weight, that the model's `get_output_embeddings` returns, or that alone has a class for
            each word of an embedding; if there is none, and a batch, each whose output reaches a
            loss in it. In evaluation, without gradients, under torch.compile, and where the linear
            has hooks of others, its output is computed as before.
        checkpoint: submodules to make checkpointed regions (see `checkpoint_wrapper`): a predicate,
            a class or a sequence of classes, or True for those that
            `apply_activation_checkpointing` finds, by what a step with `batch` keeps if there is
            one. In layers of transformers a region takes
            the place of their own gradient checkpointing; a note says so if that is on. A norm,
            activation or dropout alone does not become a region where recipes are on, which keep
            less; a note says so.
        offload: "cpu", "disk" or a directory (a `pathlib.Path`): the inputs of these regions wait
            there until backward, see `checkpoint_wrapper`. Without `checkpoint`, of those that True
            finds.
        chunks: have modules that work on each row alone (MLPs, a norm with its MLP, heads) run in
            that many chunks of rows, so that forward and backward hold the inner tensors of one
            chunk, see `memopt.checkpoint`. With a predicate or classes as `checkpoint` these
            modules are meant. Else `batch` is needed: they are the outermost modules that a probe
            on a few rows finds to work on each row alone, and inside of regions they run in chunks
            within the region.
        autocast_norms: what swapped norms return under autocast. "keep" (default): their input's
            dtype, as PyTorch's do on the CPU, so that a float32 residual stream stays float32.
            "lower": the autocast dtype, in which they compute. A norm then saves 2 bytes an element
            of a float32 input and not 4 (or 3 on average, where it is a sum; see `functional`), but
            what it returns is rounded to 16 bits: in models that
            add to that (BERT; BLOOM, by its embedding norm) gradients were 1.3 to 2.4 times as far
            from float64's.
        skip: modules that stay as they are, with all that is inside them: a path as
            `named_modules()` has it or a pattern of such paths ("decoder.*.norm", as fnmatch reads
            it, where * also matches dots), a class, a function of a module, or a sequence of these.
            Regions are chosen apart from this. Modules that an earlier call swapped stay swapped.
            The functions that these modules call are left by `functional=False`.
        step: with a batch: `step(model, batch)` runs forward and backward itself, see
            `memopt.plan`. Regions are chosen by what it keeps. The report has no bytes then;
            `memopt.check(model, batch, step=step)` has.

    Returns:
        A report of what was swapped, and what was left and why. `print` it; `to_dict()`.

    Raises:
        TypeError: `model` is no nn.Module, is a ScriptModule, compiled or quantised, or
            `checkpoint`, `offload` or `skip` is of another kind.
        NativeLibraryMissing: a RuntimeError: memopt was installed without its native library.
        ValueError: the model's forward has no parameters for `batch`, `chunks` is below 1 or has
            neither a `batch` nor modules chosen by `checkpoint`, `checkpoint` is True
            and the model has no blocks, `offload` is no place, no module has a path that `skip`
            names, or `autocast_norms` is another value.
        RuntimeError: a rule raises, or there is a `batch` and torch.inference_mode() is on.
        Whatever the model's forward raises with `batch`: its own error, with a note.

    After any error the model is as before.

    Details:
        The modules of the second and third kind are recognised by their structure, and by comparing
        what they compute with the formula. This is done on stand-ins with small tensors of their
        own on the CPU: no tensor of the model is read or written, no module of it is called, and it
        may be on any device, meta included. Modules that no rule knows stay as they are.

        A swapped module's class is a subclass of the one it had. A module without submodules may be
        shared with other models, so it stays as it is, and a double takes its place in this model
        until `revert`: another object with the same `__dict__`, so that the parameters, buffers and
        hooks of both are the same, whichever they are set on. A reference from before goes on
        computing with PyTorch's ops. A module with hooks, with submodules, or that one of this
        model's modules keeps in a plain attribute, stays the same object, and so is swapped for
        every model that holds it. Parameters, buffers, state_dict keys, hooks and the training flag
        stay, and so do copies and pickles (which need memopt to load). Calls that memopt's ops do
        not support, with other dtypes or devices or with distributed tensors, run the module's own
        forward. So does a module that was recognised by a comparison, once a number, string or
        function among its attributes was changed (except a norm's eps). Results differ by rounding;
        dropout draws other random numbers. The activation in front of a gated product is not called
        as a module, unless it has a hook.

        Recipes (see `memopt.recipes`) are on in the calls of the model and of those of its modules
        that have submodules, by a pair of PyTorch's hooks on each: inside `model(x)` and
        `model.encoder(x)`, and so in whatever `training_step` or `encode_text` calls that way. So
        the tensors that these ops return are not stored for backward by whatever uses them. Where
        the code outside calls modules without submodules one by one, or a `forward` in place of its
        module, no hook runs: `with memopt.recipes():` around it turns them on. transformers'
        gradient checkpointing and other code that asks for classes, methods and attributes finds
        what it found before, of every module that is not swapped. A copy of a torch.fx.GraphModule
        loses PyTorch's hooks, and recipes with them, until it is converted.

        The head, the linear that makes logits, returns lazy logits in training: a tensor with their
        shape, dtype and device that is not computed. Views, shifts, casts to float32, masks of
        rows, numbers as factors and soft caps of it are lazy too. cross_entropy, nll_loss and
        gather of its log_softmax, and logsumexp, are `linear_cross_entropy`, `linear_log_probs` and
        `linear_logsumexp`, in chunks of rows. Anything else computes the logits once, for all who
        ask.

        Converting again swaps what has been added since. If that is nothing, the report says so.
        Convert before torch.compile, DistributedDataParallel and FSDP. Under torch.compile with its
        default backend the converted modules run their own forwards, which Inductor fuses; what is
        saved there is a matter of `memopt.compile`. Other backends and torch.export get memopt's
        ops.
    """
    require_native("convert")
    _check_model(model)
    check_flags("convert", recipes=recipes, functional=functional, head=head)
    check_autocast_norms(autocast_norms)
    check_function("convert", step, None)
    if step is not None and batch is None:
        raise ValueError("convert: step must be given with a batch, got none")
    regions = Regions(checkpoint, offload, chunks, step)
    before = None if batch is None or step is not None else measure_sample(model, batch, recipes)
    was_converted = any(map(is_converted, model.modules())) and (has_recipes(model) or not recipes)
    left_alone = skipped(model, skip)
    functions = recipes and functional and _has_kernels(model)
    context = Context(model, recipes, left_alone, functions)
    matches = match(context, (*registered_rules(), *RULES))
    matches = with_written_inputs(with_autocast_norms(matches, autocast_norms), model)
    sample_batch = None if step is not None else batch
    heads = _heads(model, sample_batch, left_alone, matches) if head else {}
    with restored_on_error(model):
        apply_swaps(model, [(m.module, m.answer) for m in matches if isinstance(m.answer, Swap)])
        make_lazy(model, {module: found.path for module, found in heads.items()})
        if recipes:
            turn_recipes_on(model, functions, left_alone)
        assignment = regions.put(model, has_recipes(model), batch)
        is_old = not (_has_swaps(matches) or heads or assignment.choices) and was_converted
        notes = _notes(model, is_old)
        if left_alone:
            notes = (f"skipped: {', '.join(outermost(left_alone))}", *notes)
        notes += regions.notes + ((BYTES_OF_A_FUNCTION,) if step is not None else ())
        checkpointed = assignment.where(lambda choice: not choice.offload and not choice.chunks)
        in_chunks = assignment.where(lambda choice: bool(choice.chunks))
        offloaded = assignment.where(lambda choice: choice.offload > 0)
        sample, found_heads = None, tuple(heads.values())
        if before is None and sample_batch is not None:
            notes += (NOT_COUNTED,)
        if before is not None:
            paths = (*checkpointed, *offloaded, *in_chunks)
            with watched_heads() as uses:
                sample = attribute_sample(model, batch, paths)
            found_heads = with_uses(found_heads, uses)
            notes += note_on_calls(paths, sample.called) + notes_on_sample(
                model, before, sample.saved
            )
    return Report(
        model=type(model).__qualname__,
        swapped=_swapped(matches),
        by_function=_by_function(matches),
        left=_left(matches),
        recipes=has_recipes(model),
        checkpointed=checkpointed,
        offloaded=offloaded,
        in_chunks=in_chunks,
        bytes_before=None if before is None else int(before),
        bytes_after=None if sample is None else int(sample.saved),
        notes=notes,
        remaining=() if sample is None else remaining(model, sample.storages),
        idle=_idle(matches),
        heads=found_heads,
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
    check_can_patch("revert", "model", model)
    modules = list(model.modules())
    for module in modules:
        if issubclass(type(module), SwappedModule) and swap_of(module) is None:
            raise RuntimeError(
                "revert: model must have the classes that convert gave it, got "
                f"{type(module).__name__}, a class derived from one of them"
            )
    for module in modules:
        undo_swap(module)
        turn_recipes_off(module)
        revert_region(module)
    put_originals_back(model)
    return model


def _heads(
    model: nn.Module, batch: Any, left_alone: Container[nn.Module], matches: list[Match]
) -> dict[nn.Module, FoundHead]:
    """The modules whose logits are to be lazy."""
    swapped = {found.module for found in matches if isinstance(found.answer, Swap)}
    others = [m for m in model.modules() if m in left_alone or m in swapped]
    found = find_heads(model, others)
    if found or batch is None or any(map(is_head, model.modules())):
        return found
    return probed_heads(model, batch, others)


def _has_swaps(matches: list[Match]) -> bool:
    return any(isinstance(found.answer, Swap) for found in matches)


def _swapped(matches: list[Match]) -> tuple[Swapped, ...]:
    return tuple(
        Swapped(*found.origin(), found.answer.becomes())
        for found in matches
        if isinstance(found.answer, Swap)
    )


def _idle(matches: list[Match]) -> tuple[str, ...]:
    """Paths of dropouts that drop nothing."""
    return tuple(
        found.path
        for found in matches
        if isinstance(found.answer, Swap)
        and isinstance(found.module, nn.Dropout)
        and found.module.p == 0
    )


def _by_function(matches: list[Match]) -> tuple[Swapped, ...]:
    return tuple(
        Swapped(*found.origin(), f"memopt.functional.{found.answer.function}")
        for found in matches
        if isinstance(found.answer, Reason) and found.answer.function
    )


def _left(matches: list[Match]) -> tuple[Left, ...]:
    return tuple(
        Left(*found.origin(), found.answer.text)
        for found in matches
        if isinstance(found.answer, Reason) and found.answer.text
    )


def _notes(model: nn.Module, is_old: bool) -> tuple[str, ...]:
    """The report's notes. `is_old`: the model was converted before, and nothing changed."""
    notes = []
    if is_old:
        notes.append(NOTHING_NEW)
    if has_recipes(model):
        notes.append(STEP_ASIDE)
    devices = {parameter.device for parameter in model.parameters()}
    notes += [
        f"this build of memopt has no kernels for {device}: modules there stay PyTorch's"
        for device in sorted({d.type for d in devices if not has_kernels_for(d)})
    ]
    return tuple(notes)


def _has_kernels(model: nn.Module) -> bool:
    """Whether this build has kernels for any of its devices."""
    devices = {parameter.device for parameter in model.parameters()}
    return not devices or any(map(has_kernels_for, devices))


def _check_model(model: nn.Module) -> None:
    check_can_patch("convert", "model", model)
    # Before this module of PyTorch's is imported, nothing is compiled.
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    for path, module in model.named_modules():
        where = f" at {path!r}" if path else ""
        if eval_frame is not None and isinstance(module, eval_frame.OptimizedModule):
            raise TypeError(
                "convert: model must not be compiled, got "
                f"{type(module).__name__}{where}; convert it before torch.compile"
            )
        # Those of torch.ao.nn.qat train, and only round what they compute.
        if type(module).__module__.startswith("torch.") and "quantized" in type(module).__module__:
            raise TypeError(
                "convert: model must not be quantised (it has no gradients), got "
                f"{type(module).__module__}.{type(module).__qualname__}{where}"
            )
