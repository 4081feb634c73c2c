"""`memopt.check`: what each block was asked to do, and what happened."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from memopt._arguments import check_flags
from memopt._check.asked import (
    HEAD,
    RECIPES,
    TRANSFORMERS,
    asks_for_recipes,
    heads_asked,
    regions_asked,
    without_fates,
)
from memopt._check.observed import ObservedStep, observed
from memopt._check.report import Check, CheckedBlock
from memopt._checkpoint.blocks import find_blocks
from memopt._compat import is_compiled
from memopt._errors import in_the_name_of
from memopt._forwards import has_another_forward
from memopt._head.call import HeadUse, watched_heads
from memopt._progress import doing, progress
from memopt.memory.asked import check_function, check_module, has_values
from memopt.memory.calls.measure import predicted_tree, sum_of_outputs
from memopt.memory.calls.tree import CallTree
from memopt.memory.leaves import as_dict
from memopt.memory.modules import paths_of
from memopt.memory.paths import is_inside, outermost_paths, overlap, paths_around
from memopt.memory.step import LossLike, Step, StepFunction

_IS_COMPILED = "it is compiled: torch.compile decides what is kept"


@in_the_name_of("check")
@progress("memopt.check")
def check(
    model: nn.Module,
    batch: Any,
    *,
    loss: LossLike = None,
    step: StepFunction = None,
    autocast: torch.dtype | None = None,
    strict: bool = False,
) -> Check:
    """Run forward and backward once, and say of each block what was asked of it and what happened.

        memopt.convert(model, checkpoint=True)
        print(memopt.check(model, batch))
        memopt.check(model, batch, strict=True)  # raises where something has no effect

    Asked: regions of memopt (`checkpoint_wrapper`, `convert`, a plan on the model), gradient
    checkpointing of transformers, the wrappers of PyTorch and FairScale; recipes, and a head in
    chunks (`memopt.convert`). Happened: how often each module ran in forward and again in backward,
    counted; bytes by the allocator; bytes that each block keeps for backward, with and without what
    was asked, by predicted steps, which compute nothing. It works on models that do not use memopt
    too. The model, its gradients and random generators are afterwards as before. A model or a batch
    without values (on the meta device) is predicted alone: nothing is counted then. Bytes by block
    are those of uncompiled code: what compiled modules keep is the compiler's choice, and recipes
    and heads inside them are named as without effect.

    Args:
        model: in its own training or evaluation mode.
        batch: a mapping of keyword arguments, a tuple or list of positional ones, or the only one.
        loss: makes the loss of what the model returns. Default: the output's `loss`, or the sum of
            all that has a gradient.
        step: `step(model, batch)` runs forward and backward itself, see `memopt.plan`.
        autocast: run forward under torch.autocast with this dtype.
        strict: raise where something that was asked took no effect.

    Returns:
        A `Check` (memopt.types): `ok`, `blocks`, `problems`, `kept`, `peak`; `to_json(path)`.

    Raises:
        TypeError: `model` is no module.
        FateWithoutEffect: with `strict`, something took no effect. The message is the report.
        Whatever the step raises: its own error.
    """
    check_module("check", model)
    check_flags("check", strict=strict)
    check_function("check", step, loss, autocast)
    asked_for = Step(
        model,
        as_dict(batch),
        None,
        loss or sum_of_outputs,
        autocast,
        function=step,
        who="check",
    )
    runs = has_values(model, asked_for.batch)
    asked, with_recipes = regions_asked(model), asks_for_recipes(model)
    heads = heads_asked(model)
    plain, why = _predicted(asked_for, without_fates)
    with watched_heads() as uses:
        tree, _ = _predicted(asked_for, None)
    if not runs and tree is None:
        raise RuntimeError(f"check: the step must be one that can be predicted, {why}")
    doing("running step")
    found = observed(asked_for) if runs else _calls_in(tree, uses)
    notes = [f"bytes by block are not known: {why}"] if why else []
    notes += _nested(asked)
    paths = _blocks_of(model, asked, found)
    blocks = [_checked(model, path, asked, with_recipes, found, plain, tree) for path in paths]
    blocks += [
        _checked_head(model, path, found, plain, tree) for path in sorted(heads.difference(asked))
    ]
    result = Check(
        model=type(model).__name__,
        blocks=tuple(blocks),
        kept=found.kept if runs else None,
        peak=found.peak if runs else None,
        predicted_kept=None if tree is None else tree.kept_bytes,
        plain_kept=None if plain is None else plain.kept_bytes,
        plain_peak=None if plain is None else plain.peak,
        plain_margin=0 if plain is None else plain.margin,
        offloaded=found.offloaded,
        problems=_problems_of(plain, tree) if with_recipes and not asked else (),
        notes=tuple(notes),
    )
    if strict:
        result.raise_if_not_ok()
    return result


def _predicted(
    step: Step, changes: Callable[[nn.Module], object] | None
) -> tuple[CallTree | None, str]:
    """A predicted step's calls; or None, and why there are none."""
    try:
        return predicted_tree(step, changes), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def _blocks_of(model: nn.Module, asked: Collection[str], found: ObservedStep) -> list[str]:
    """The modules that something is asked of, the outermost that are recomputed though nothing is,
    and the model's blocks.
    """
    paths = paths_of(model)
    known = set(asked)
    alone = [p for p in found.again if p not in asked and paths_around(p).isdisjoint(asked)]
    known.update(outermost_paths(alone))
    blocks = {paths[block] for block in find_blocks(model)}
    known |= {p for p in blocks if not any(overlap(p, other) for other in known)}
    return [path for path in paths.values() if path in known]


def _checked(
    model: nn.Module,
    path: str,
    asked: dict[str, str],
    with_recipes: bool,
    found: ObservedStep,
    plain: CallTree | None,
    tree: CallTree | None,
) -> CheckedBlock:
    before, after = _kept_by(plain, path), _kept_by(tree, path)
    has_less = before is not None and after is not None and after < before
    kept = RECIPES if with_recipes and has_less else "kept"
    if with_recipes and (plain is None or tree is None):
        kept = f"{RECIPES}, not counted"
    wanted = asked.get(path) or (RECIPES if with_recipes else "keep")
    calls = found.with_gradients[path] + found.without_gradients[path]
    again = found.runs_again(path)
    if not again and path in asked and before and not after:
        again = 1  # a layer alone: no module inside it tells
    happened = kept if not again else "recomputed" if again == 1 else f"recomputed {again} times"
    problem = ""
    if path not in asked:
        problem = _IS_COMPILED if with_recipes and _is_compiled(model, path) else ""
    elif not again:
        problem = _problem(model, path, asked, found, before)
    return CheckedBlock(path, wanted, happened, calls, again, before, after, problem)


def _checked_head(
    model: nn.Module,
    path: str,
    found: ObservedStep,
    plain: CallTree | None,
    tree: CallTree | None,
) -> CheckedBlock:
    """A linear whose logits are lazy."""
    calls = found.with_gradients[path] + found.without_gradients[path]
    happened = found.of_head(path)
    problem = ""
    if calls and not happened and not model.get_submodule(path).training:
        problem = "in evaluation mode its logits are computed; model.train()"
    elif _is_compiled(model, path):
        problem = _IS_COMPILED
    kept = _kept_by(plain, path), _kept_by(tree, path)
    return CheckedBlock(path, HEAD, happened or "kept", calls, 0, *kept, problem)


def _calls_in(tree: CallTree | None, heads: list[HeadUse]) -> ObservedStep:
    """The calls of a predicted step, which says nothing of recomputes."""
    found = ObservedStep(heads=heads)
    for each in () if tree is None else tree.calls[1:]:
        counts = found.with_gradients if each.with_gradients else found.without_gradients
        counts[each.path] += 1
    return found


def _nested(asked: dict[str, str]) -> list[str]:
    """Notes on regions inside others."""
    return [
        f"{path}: a region inside another, {outer}: what it drops is dropped already until that "
        "one is recomputed, and it may be recomputed twice"
        for path in asked
        if (outer := next((p for p in asked if is_inside(path, p)), None)) is not None
    ]


def _problem(
    model: nn.Module,
    path: str,
    asked: dict[str, str],
    found: ObservedStep,
    before: int | None,
) -> str:
    """The reason why a region was not recomputed."""
    module = model.get_submodule(path)
    if not found.with_gradients[path] + found.without_gradients[path]:
        return "the step never calls it"
    if not found.with_gradients[path]:
        return "it runs without gradients"
    if has_another_forward(module):
        kind = type(module).__name__
        return f"{kind} has got another forward since: put the region around it again"
    if before == 0:
        return "it keeps nothing for backward that a region could drop"
    if asked[path] == TRANSFORMERS and not module.training:
        return "transformers checkpoints in training mode alone: model.train()"
    if _is_compiled(model, path):
        return _IS_COMPILED
    return "backward did not recompute it: its results were not wanted, or it is switched off"


def _is_compiled(model: nn.Module, path: str) -> bool:
    """Whether torch.compile is around a module or one that it is in."""
    return any(map(is_compiled, map(model.get_submodule, ("", path, *paths_around(path)))))


def _problems_of(plain: CallTree | None, tree: CallTree | None) -> tuple[str, ...]:
    """The problem of a model whose recipes save nothing. Inside checkpointing of the model's own
    nothing is kept anyway, and they lower what its recompute takes.
    """
    if plain is None or tree is None or tree.kept_bytes < plain.kept_bytes:
        return ()
    if tree.peak < plain.peak:
        return ()
    return (
        "recipes: the model was converted, and keeps no fewer bytes than before; "
        "print(memopt.convert(model, batch)) on the plain model says why",
    )


def _kept_by(tree: CallTree | None, path: str) -> int | None:
    return None if tree is None else sum(tree.calls[n].kept_bytes for n in tree.calls_of(path))
