"""Every private name of PyTorch that memopt's Python uses, so that a new release of PyTorch is
checked in one place. Each entry says what is relied upon. What the C++ side looks up by name stands
in csrc/python/compat.h.
"""

from __future__ import annotations

import sys
import threading
import types
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, _ops, nn
from torch.autograd import forward_ad
from torch.utils import _python_dispatch
from torch.utils import checkpoint as _checkpoint


def checkpoint_options_set_globally() -> tuple[bool | None, bool | None]:
    """Return (early_stop, debug) as `set_checkpoint_early_stop` and `set_checkpoint_debug_enabled`
    of torch.utils.checkpoint have set them, each None where nothing was set.
    """
    return _checkpoint._enable_checkpoint_early_stop, _checkpoint._checkpoint_debug_enabled


def in_transform() -> bool:
    """Whether a transform of torch.func (grad, vmap, ...) or a forward-mode derivative
    (torch.autograd.forward_ad) runs.
    """
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


def without_transforms(tensor: Tensor) -> Tensor:
    """The tensor with the memory, inside the wrappers of torch.func's transforms."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def without_function_modes() -> Any:
    """A context in which no TorchFunctionMode and no `__torch_function__` sees a call."""
    return torch._C.DisableTorchFunction()


def without_dispatch_modes() -> Any:
    """A context in which no TorchDispatchMode sees an operator."""
    return _python_dispatch._disable_current_modes()


def saved_tensor_hooks() -> Any:
    """The hooks that see what autograd saves now; None where there are none."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def may_hook_saved_tensors() -> bool:
    """Whether they may be set, as they may not inside of torch.func.grad."""
    autograd: Any = torch._C._autograd
    return bool(autograd._saved_tensors_hooks_is_enabled())


def dispatch_modes() -> list[Any]:
    """The TorchDispatchModes that see operators now."""
    return _python_dispatch._get_current_dispatch_mode_stack()


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor is a FakeTensor, which has no values."""
    fakes: Any = sys.modules.get("torch._subclasses.fake_tensor")
    return fakes is not None and isinstance(tensor, fakes.FakeTensor)


def in_jit_trace() -> bool:
    """Whether torch.jit.trace runs in this thread."""
    return tracing_state() is not None


# In that thread what a tensor's shape holds are tensors, too. None where nothing is traced.
tracing_state = torch._C._get_tracing_state

# Of batch norms of every kind: their constructor, parameters and running statistics.
BatchNormBase = nn.modules.batchnorm._BatchNorm


def wraps_tensors(tensor: Tensor) -> bool:
    """Whether `tensor` is of a subclass that holds other tensors (DTensor, for one), which
    `__tensor_flatten__` names.
    """
    return bool(_python_dispatch.is_traceable_wrapper_subclass(tensor))


QUESTIONS = frozenset(
    (
        *("prim.device.default", "prim.layout.default", "aten.dim.default"),
        *("aten.size.default", "aten.sym_size.default", "aten.stride.default"),
        *("aten.sym_stride.default", "aten.numel.default", "aten.sym_numel.default"),
        *("aten.storage_offset.default", "aten.sym_storage_offset.default"),
        *("aten.is_contiguous.default", "aten.is_contiguous.memory_format"),
        *("aten.sym_is_contiguous.default", "aten.is_strides_like_format.default"),
        "aten.is_non_overlapping_and_dense.default",
    )
)
"""Operators by which PyTorch asks such a subclass for its sizes and the like. Some it asks where a
C++ exception ends the process: a TorchDispatchMode must raise nothing there."""


def set_versions(tensors: tuple[Tensor, ...], versions: tuple[int, ...]) -> None:
    """Sets version counters, which views share with their base."""
    torch._C._autograd._unsafe_set_version_counter(tensors, versions)


def default_device() -> torch.device | None:
    """The device of torch.set_default_device; None where none is set."""
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if context is None else context.device


def print_options() -> object:
    """The object that has what torch.set_printoptions sets as its attributes."""
    return torch._tensor_str.PRINT_OPTS


def exchange_implementations(one: Tensor, other: Tensor) -> None:
    """Have two tensors exchange all but their Python objects.

    Raises:
        RuntimeError: a graph refers to one of them weakly: it retains its gradient.
    """
    torch._C._swap_tensor_impl(one, other)


def view_base(tensor: Tensor) -> Tensor | None:
    """The tensor that `tensor` is a view of, as autograd knows it; None if it is no view."""
    return tensor._base


def let_higher_order_ops_pass(key: str) -> None:
    """Make torch's higher-order operators (cond, flex_attention, ...), those of now and of later,
    fall through a dispatch key, as the dispatcher's backend fallback does for all other operators.
    """
    parsed = torch._C._parse_dispatch_key(key)
    assert parsed is not None
    _ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS.append(parsed)
    for operator in _ops._higher_order_ops.values():
        operator.fallthrough(parsed)


def call_forward_alone(module: Any) -> None:
    """Makes a call of `module` one of its forward from now on: no hook sees it, those that are
    registered for all modules (torch.nn.modules.module) included.
    """
    module.__dict__["_compiled_call_impl"] = types.MethodType(type(module).forward, module)


def add_note(error: BaseException, note: str) -> None:
    """BaseException.add_note, which Python 3.10 does not have; the same note once."""
    notes = getattr(error, "__notes__", [])
    if note not in notes:
        error.__dict__["__notes__"] = [*notes, note]


def is_parametrized(module: nn.Module) -> bool:
    """Whether torch.nn.utils.parametrize owns the module's class."""
    return "parametrizations" in module._modules


def has_partitioner_option() -> bool:
    """Whether this PyTorch's Inductor takes a partitioner, as its source says: to import the
    compiler takes more than a second. What else memopt.compile relies upon is in
    memopt/_compile/_inductor.py.
    """
    source = Path(torch.__file__).parent / "_inductor" / "custom_graph_pass.py"
    return source.exists() and "class CustomPartitionerFn" in source.read_text()


class CompilerOff:
    """torch.compile's code runs as it is written, uncompiled, between the making of this and
    `end`. In other threads as well, but not where this is made inside of compiled code.
    """

    _lock = threading.Lock()
    _count = 0
    _stance: Any = None

    def __init__(self) -> None:
        self._counted, self._callback = False, None
        if "torch._dynamo" not in sys.modules:  # nothing is compiled, and it takes a second
            return
        frames: Any = torch._C._dynamo.eval_frame
        if frames.get_eval_frame_callback() not in (None, False):
            self._callback = frames.set_eval_frame(None)
            return
        self._counted = True
        with CompilerOff._lock:
            CompilerOff._count += 1
            if CompilerOff._count == 1:
                CompilerOff._stance = torch.compiler.set_stance("force_eager")

    def end(self) -> None:
        if self._callback is not None:
            torch._C._dynamo.eval_frame.set_eval_frame(self._callback)
        if not self._counted:
            return
        with CompilerOff._lock:
            CompilerOff._count -= 1
            if CompilerOff._count == 0:
                CompilerOff._stance.__exit__(None, None, None)


def is_compiled(module: nn.Module) -> bool:
    """Whether a module is what torch.compile returned, or its `compile` was called."""
    return hasattr(module, "_orig_mod") or module.__dict__.get("_compiled_call_impl") is not None


def options_of_mode(mode: str | None, dynamic: bool | None) -> dict[str, Any]:
    """The options of Inductor that torch.compile's `mode` stands for: it takes one or the other."""
    if mode is None or mode == "default":
        return {}
    from torch._inductor import list_mode_options

    return dict(list_mode_options(mode, dynamic))


def forget_compiled_code() -> None:
    """Have torch.compile compile again what it has compiled, since it does not look whether a
    function that it took in has other code now.
    """
    frames: Any = sys.modules.get("torch._dynamo.convert_frame")
    if frames is not None and frames.input_codes.seen:
        torch._dynamo.reset_code_caches()


def compiles_now() -> bool:
    """Whether this thread runs torch.compile's tracer, which looks at what it met once more at its
    end.
    """
    return torch._guards.CompileContext.try_get() is not None


def compiles_for_inductor() -> bool:
    """Whether torch.compile traces this call for Inductor, and not for export or a backend that
    generates no code. To be asked inside torch.compile only, which asks when it traces.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        backend = InstructionTranslator.current_tx().output.compiler_fn
    except AttributeError:  # another tracer
        return False
    wrapped = getattr(backend, "_torchdynamo_orig_backend", backend)
    return getattr(wrapped, "compiler_name", None) == "inductor"


# What torch.compiler.assume_constant_result does, which imports the compiler: 1.3 s for all who
# import memopt.
compiles_for_inductor._dynamo_marked_constant = True  # type: ignore[attr-defined]


def leave_to_python(function: types.FunctionType) -> None:
    """Have torch.compile run a function, and what that calls, as it stands, where it is called by
    code that is compiled. Unlike torch._dynamo.disable this does not import the compiler.
    """
    frames: Any = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))


def running_node() -> Any:
    """The autograd node whose backward runs in this thread; None outside of backward."""
    return torch._C._current_autograd_node()


def running_node_number() -> int:
    """The number that this node got in forward; -1 outside of backward, in a forward that backward
    runs again, and in a node that accumulates a gradient, which has none.
    """
    node = None if torch.is_grad_enabled() else running_node()
    return -1 if node is None or hasattr(node, "variable") else int(node._sequence_nr())


def sequence_number() -> int:
    """The number that the next autograd node of this thread will get."""
    return torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]


def run_backward(loss: Tensor) -> None:
    """`loss.backward()`, but in the same TorchFunctionModes: the engine takes them over, and
    Tensor.backward would have been called by one, without it.
    """
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward(
        (loss,), (torch.ones_like(loss),), False, False, (), True, accumulate_grad=True
    )


def process_group_named(name: str) -> Any:
    """The process group of this `group_name`. Raises where there is none."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined,arg-type]


def all_gather_single(whole: Tensor, part: Tensor, group: Any) -> Any:
    """Begins to gather `part` of all ranks into `whole`; the Work. torch 2.13 renamed it."""
    import torch.distributed as dist

    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(whole, part, group=group, async_op=True)


def device_types_of_group(group: Any) -> list[str]:
    """The types of device that a process group has a backend for."""
    return [device.type for device in group._device_types]


def depends_on_values(error: Exception) -> bool:
    """Whether an operator's meta kernel raised this because there is none, or because the shape of
    its result depends on values. (Importing the exception's class takes a second.)
    """
    return isinstance(error, NotImplementedError) or (
        type(error).__name__ == "DynamicOutputShapeException"
    )


def sharding_groups(model: nn.Module) -> list[Any]:
    """The parameter groups of FSDP2 in a model. Each begins its collectives by two callables that
    may be replaced, `_all_gather_comm` and `_reduce_scatter_comm`, and says by `is_unsharded`
    whether its parameters are there whole.
    """
    sharded: list[Any] = [m for m in model.modules() if hasattr(m, "_get_fsdp_state")]
    states = dict.fromkeys(module._get_fsdp_state() for module in sharded)
    if all(hasattr(state, "_fsdp_param_groups") for state in states):
        return [group for state in states for group in state._fsdp_param_groups]
    # Before PyTorch 2.13 each has one, or none.
    return [state._fsdp_param_group for state in states if state._fsdp_param_group is not None]


def is_in_backward() -> bool:
    """Whether this thread runs a backward: a module that is called then is being recomputed."""
    return bool(torch._C._current_graph_task_id() != -1)
