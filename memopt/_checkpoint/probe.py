"""Finds the modules that can be recomputed in backward: a probe, on a sample.

A region recomputes its module. State that the module changes besides gradients (a counter, a
moving average, the vectors of spectral norm's power iteration, features that the next call reads,
a cache of the user's own class among its arguments) changes twice then, and the recompute may
differ from the first run. The engine takes care of statistics of batch norm layers, of random
numbers of PyTorch's generators, and of transformers' caches.

So the model runs once, without gradients; each module runs as a region before its turn, forward and
backward, and is put back. Modules are reported

- whose state after the recompute is not what it was after the first run, be it that the recompute
  stops early, in the middle of a forward that would have put it back,
- whose recompute returns something else, or raises,
- that keep a tensor with its gradient (`retain_grad`): the recompute would put another in its
  place, which gets none,
- whose weights something around them exchanges for the time of a call, be it by equal ones
  (`torch.func.functional_call` in a step whose backward does not run here),
- that run inside checkpointing of the model's own, or checkpoint all of themselves, where a region
  changes nothing,
- that run inside a transform of torch.func.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from memopt._checkpoint.caches import has_cache, may_have_caches
from memopt._checkpoint.decisions import noting_decisions
from memopt._checkpoint.naming import by_reason
from memopt._checkpoint.other import is_in_other_checkpointing, own_turned_off
from memopt._checkpoint.region import run_region
from memopt._checkpoint.settings import region_settings
from memopt._checkpoint.state import State, version_of
from memopt._compat import in_transform
from memopt.memory.backwards import own_backward
from memopt.memory.modules import seen_modules
from memopt.memory.step import Step
from memopt.memory.storages import storage_keys, tensors_in
from memopt.memory.unchanged import unchanged

# A feature that one call keeps for the next one shows at the second step.
_STEPS = 2
_MOST_NAMES = 3
IN_OTHER_CHECKPOINTING = "it runs inside checkpointing of the model's own"


def cannot_run_again(
    step: Step, modules: Mapping[str, nn.Module], deciding: set[str] | None = None
) -> dict[str, str]:
    """The paths of those of `modules` that must not be regions, and why.

    Args:
        step: the model's forward is run on its first micro-batch. All that it uses is put back.
        modules: by path in the model. Those that the sample never calls are not told of.
        deciding: gets the paths of those that choose by values, which may come out otherwise.

    Raises:
        Whatever the model's forward raises.
    """
    reasons: dict[str, str] = {}
    seen: set[str] = set()
    own: dict[str, set[tuple[str, int]]] = {}
    lent: dict[str, set[tuple[str, int]]] = {path: set() for path in modules}
    probed: list[str] = []
    """The module whose probe runs. Those inside of it have their turn when that has ended."""

    def before(path: str) -> Callable[[nn.Module, Any, Any], None]:
        def probe(module: nn.Module, args: Any, kwargs: Any) -> None:
            if probed:
                return
            lent[path] |= _memory(module) - own[path]
            if path in seen:
                return
            seen.add(path)
            probed.append(path)
            try:
                reason = (
                    IN_OTHER_CHECKPOINTING
                    if is_in_other_checkpointing()
                    else _reason(module, args, kwargs)
                )
            finally:
                probed.pop()
            if reason:
                reasons[path] = reason

        return probe

    left: dict[str, dict[str, tuple[float, float]]] = {}

    def behind(path: str) -> Callable[[nn.Module, Any, Any], None]:
        def leaving(module: nn.Module, args: Any, output: Any) -> None:
            if probed:
                return
            if not in_transform():  # where these have no values of their own, and there is a reason
                left[path] = _weights(module)
            own[path] |= _memory(module) - lent[path]  # it may have made others itself

        return leaving

    with ExitStack() as stack:
        stack.enter_context(unchanged(*step.roots))
        stack.enter_context(own_turned_off(step.model))  # a region would take its place
        for path, module in modules.items():
            hook = module.register_forward_pre_hook(before(path), with_kwargs=True)
            stack.callback(hook.remove)
            stack.callback(module.register_forward_hook(behind(path)).remove)
        if deciding is not None:
            stack.enter_context(noting_decisions(modules, deciding.add))
        own.update((path, _memory(module)) for path, module in modules.items())
        if run_without_gradients(step):  # its hooks may have written weights, in backward
            left.clear()
        for path, weights in left.items():
            now = _weights(modules[path])
            others = {name for name, _ in lent[path] - _memory(modules[path])}
            others |= {n for n in now if n not in weights or not _is_one(weights[n], now[n])}
            other = [name for name in now if name in others]
            if other:
                reasons[path] = f"{_listed(other)} is changed from outside before backward"
    return {path: reasons[path] for path in modules if path in reasons}


def run_without_gradients(step: Step) -> bool:
    """Runs a forward without gradients; with them where it raises without: it differentiates
    something itself (forces as gradients of an energy), or a step of the user's looks at gradients.
    With its backward where that raises too: a step may need what its hooks for gradients collect.
    Returns whether backward ran.
    """
    batch = step.batches()[0]
    try:
        with torch.no_grad():
            step.output(batch)
    except Exception:
        try:
            step.output(batch)
        except Exception:
            if step.function is None:
                raise
            step.output(batch, backward=True)
            return True
    return False


def _memory(module: nn.Module) -> set[tuple[str, int]]:
    """Names of its parameters, each with what tells its memory from others'."""
    named = module.named_parameters(remove_duplicate=False)
    return {(name, key) for name, p in named for key in storage_keys(p)}


def _weights(module: nn.Module) -> dict[str, tuple[float, float]]:
    """Two sums over each parameter and buffer, by which its values are known."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    return {
        name: (float(tensor.float().sum()), float(tensor.float().abs().sum()))
        for name, tensor in ((n, t.detach()) for n, t in tensors)
        if tensor.layout is torch.strided and not tensor.is_complex()
    }


def _is_one(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """Whether they are equal, but for what adding and taking away leaves by rounding."""
    limit = 1e-4 * max(one[1], other[1])
    return one == other or max(abs(a - b) for a, b in zip(one, other, strict=True)) <= limit


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_MOST_NAMES]) + (", ..." if len(names) > _MOST_NAMES else "")


def left_out(reasons: Mapping[str, str]) -> str:
    """The message about modules that do not become regions."""
    return f"no regions, since these cannot be recomputed as they ran: {by_reason(reasons)}"


def _reason(module: nn.Module, args: Any, kwargs: Any) -> str:
    """Why a module must not be a region when it is called so; empty if it may be one."""
    if in_transform():
        return "it runs inside a transform of torch.func or forward-mode differentiation"
    if may_have_caches() and has_cache(args, kwargs):
        return ""  # regions deal with these themselves
    for early_stop in (False, True):
        with unchanged(module, args, kwargs), torch.enable_grad(), own_backward():
            for step in range(_STEPS):
                with _watching_parts(module) as checkpoints_itself:
                    reason = _of_one_step(module, args, kwargs, 1.0 + step / 2, early_stop)
                if checkpoints_itself():
                    return "it checkpoints all of itself"
                if reason is None:
                    return ""
                if reason:
                    return reason
    return ""


def _of_one_step(
    module: nn.Module, args: Any, kwargs: Any, scale: float, early_stop: bool
) -> str | None:
    """Empty if both runs did the same. None: the first one changed nothing, and all will.

    Args:
        scale: of the arguments, which are others in the next step.
        early_stop: whether the recompute ends at the last tensor that backward needs.
    """
    leaves: list[Tensor] = []
    outputs: list[list[Tensor]] = []

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if not leaf.is_floating_point():
            return leaf.detach().clone()
        leaves.append((leaf.detach() * scale).requires_grad_())
        return leaves[-1].clone()  # which may be written in place

    def run(*args: Any, **kwargs: Any) -> Any:
        output = module.forward(*args, **kwargs)
        outputs.append([t.detach().clone() for t in tensors_in(output)])
        return output

    args, kwargs = pytree.tree_map(copied, (args, kwargs))
    start = State(module, (args, kwargs))
    try:
        output = run_region(run, args, kwargs, region_settings(early_stop=early_stop))
    except Exception:  # the model's own: it will raise it itself
        return None
    first = State(module, (args, kwargs))
    results = [t for t in tensors_in(output) if t.requires_grad]
    if any(map(version_of, tensors_in((args, kwargs)))):
        return "it writes to its arguments in place"
    if not results or not start.changes(first):
        return None
    if kept := _with_gradients(module):
        return f"{_listed(kept)} would lose the gradient that it retains"
    wanted = [*leaves, *(p for p in module.parameters() if p.requires_grad)]
    try:
        torch.autograd.grad(
            results, wanted, [torch.zeros_like(t) for t in results], allow_unused=True
        )
    except Exception as error:
        names = _listed(start.changes(first))
        return f"it cannot be recomputed ({type(error).__name__}), since {names} changed"
    moved = first.differing(State(module, (args, kwargs)))
    if moved and early_stop:
        return f"{_listed(moved)} would stay as in the middle of it, where a recompute stops early"
    if moved:
        return f"{_listed(moved)} would change twice in a step"
    if len(outputs) > 1 and not all(map(_are_close, outputs[0], outputs[-1])):
        names = _listed(start.changes(first))
        return f"its recompute would differ, since {names} changed"
    return ""


def _with_gradients(module: nn.Module) -> list[str]:
    """Names of attributes with a result in them that retains its gradient."""
    return [
        f"{path}.{name}" if path else name
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if any(tensor.retains_grad and not tensor.is_leaf for tensor in tensors_in(value))
    ]


@contextmanager
def _watching_parts(module: nn.Module) -> Iterator[Callable[[], bool]]:
    """Says whether every child that has parameters ran in checkpointing of the module's own."""
    children = (one for path, one in seen_modules(module).items() if path and "." not in path)
    parts = [child for child in children if next(child.parameters(), None) is not None]
    inside: set[nn.Module] = set()
    outside: set[nn.Module] = set()

    def called(part: nn.Module, args: Any) -> None:
        (inside if is_in_other_checkpointing() else outside).add(part)

    with ExitStack() as stack:
        for part in parts:
            stack.callback(part.register_forward_pre_hook(called).remove)
        yield lambda: bool(inside) and not outside


def _are_close(one: Tensor, other: Tensor) -> bool:
    """Whether they are equal, but for what kernels differ by that add in any order."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    return torch.allclose(one.float(), other.float(), rtol=1e-2, atol=1e-5, equal_nan=True)
