"""An operator's result without running it: what its meta kernel says, and what that leaves out."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from memopt._compat import depends_on_values
from memopt.memory.arguments import by_name
from memopt.memory.predicted.int8 import INT8_KERNELS
from memopt.memory.scratch.onednn import lstm_workspace


class DependsOnValues(RuntimeError):
    """A RuntimeError: the step looks at the values of tensors, which a prediction does not have."""


class Made(NamedTuple):
    """A tensor that an operator returns."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    argument: int | None
    """The place among the tensors given of the one that it is or views; None: it is new."""

    storage: int = 0
    """Bytes of its storage, where these are more than its elements take."""


class Outcome(NamedTuple):
    """An operator's result."""

    leaves: list[Any]
    """Numbers and the like as they are; a Made for each tensor."""
    form: Callable[[list[Any]], Any]
    """Makes the result of them, or of others in their places."""
    is_view: bool
    """Whether some are arguments, or views of them."""


# By operator and description of its arguments: the steps of a plan have most calls in common.
_known: dict[Hashable, Outcome] = {}
_MOST_KNOWN = 20_000


def outcome_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], on_cpu: bool) -> Outcome:
    """The result of `func`.

    Raises:
        DependsOnValues: the shapes depend on values.
    """
    described = _described((args, kwargs))
    key = None
    if described is not None:
        key = (func, described, on_cpu, torch.get_default_dtype())
        known = _known.get(key)
        if known is not None:
            return known
    result = _result(func, args, kwargs, on_cpu)
    leaves, spec = pytree.tree_flatten(result, is_leaf=is_made)
    is_view = any(is_made(leaf) and leaf.argument is not None for leaf in leaves)
    found = Outcome(leaves, _form_of(spec), is_view)
    if key is not None:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        _known[key] = found
    return found


def _form_of(spec: pytree.TreeSpec) -> Callable[[list[Any]], Any]:
    """A function that is faster than pytree's for the two forms that nearly all results have."""
    if spec.is_leaf():
        return itemgetter(0)
    if spec.type is tuple and spec.num_children == spec.num_leaves:
        return tuple
    return partial(pytree.tree_unflatten, treespec=spec)


def _described(value: Any) -> Hashable:
    """Returns all that decides about shapes; None: something else may."""
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            return None
        return tuple(value.shape), value.stride(), value.dtype, value.storage_offset()
    if type(value) in _PLAIN:
        return type(value), value
    if type(value) not in (tuple, list, dict):
        return None
    keys = tuple(value) if type(value) is dict else ()
    entries = tuple(_described(entry) for entry in (value.values() if keys else value))
    return None if None in entries else (keys, entries)


_PLAIN = frozenset(
    (
        *(int, float, bool, complex, str, type(None)),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    )
)


def _result(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], on_cpu: bool) -> Any:
    if func in _SOFTMAXES and args[2]:
        return _contiguous(args[0], torch.float32)
    if func in _SOFTMAX_GRADIENTS:
        return _contiguous(args[0], args[3])
    if func is torch.ops.aten._grouped_mm.default:
        return _grouped_product(*args, **kwargs)
    made = _by_meta_kernel(func, args, kwargs)
    if func is torch.ops.aten.convolution.default:
        made = _in_layout_of(args[:2], made)
        return _transposed_on_cpu(args, made) if on_cpu else made
    if on_cpu and func in _OF_WINDOWS:
        return _folded_on_cpu(args, made)
    if func in _LOSS_GRADIENTS:
        return made._replace(dtype=args[1].dtype)
    if func in _LOSSES:
        return _loss_over_its_elements(func, args, kwargs, made)
    if func is torch.ops.aten.mkldnn_rnn_layer.default:
        return _with_workspace(args, made)
    if on_cpu and func is torch.ops.aten._embedding_bag.default:
        return _bags_on_cpu(made, *args, **kwargs)
    if on_cpu and func is torch.ops.aten.native_layer_norm.default:
        return _layer_norm_on_cpu(args, made)
    if on_cpu and func is torch.ops.aten._weight_norm_interface.default:
        norms = torch.promote_types(made[1].dtype, torch.float32)  # the meta kernel's: of bfloat16
        return made[0], made[1]._replace(dtype=norms)
    if on_cpu and func is torch.ops.aten.native_group_norm.default:
        return _in_layout_of(args[:1], made[0]), *made[1:]
    if on_cpu and func is torch.ops.aten.native_group_norm_backward.default:
        gradient = made[0] and made[0]._replace(dtype=args[1].dtype)
        return (_in_layout_of(args[1:2], gradient), *made[1:])
    return made


def is_made(value: object) -> bool:
    return isinstance(value, Made)


def _by_meta_kernel(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    places: dict[int, int] = {}

    def on_meta(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            _check_strided(func, leaf)
            shape, stride = tuple(leaf.shape), leaf.stride()
            meta = torch.empty_strided(shape, stride, dtype=leaf.dtype, device="meta")
            places[meta.untyped_storage()._cdata] = len(places)
            keep.append(meta)
            return meta
        return torch.device("meta") if isinstance(leaf, torch.device) else leaf

    keep: list[Tensor] = []
    args, kwargs = pytree.tree_map(on_meta, (args, kwargs))
    if any(argument.name == "device" for argument in func._schema.arguments):
        kwargs = {**kwargs, "device": torch.device("meta")}
    try:
        result = INT8_KERNELS.get(func.name(), func)(*args, **kwargs)
    except (RuntimeError, ValueError, TypeError, AssertionError) as error:
        if depends_on_values(error):
            raise DependsOnValues(
                f"a prediction has no values, and the shape that {func} returns depends on them, "
                f"or it has no meta kernel: {error}"
            ) from error
        # Its real kernel may take what this one does not; or say better what is wrong.
        raise DependsOnValues(
            f"a prediction asks {func} for shapes alone, which raises {type(error).__name__}: "
            f"{error}"
        ) from error

    def described(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        _check_strided(func, leaf)
        place = places.get(leaf.untyped_storage()._cdata)
        return Made(tuple(leaf.shape), leaf.stride(), leaf.dtype, place)

    return pytree.tree_map(described, result)


def _check_strided(func: Any, tensor: Tensor) -> None:
    if tensor.layout is not torch.strided:
        raise DependsOnValues(
            f"a prediction has no values, and what {func} reads or returns is {tensor.layout}"
        )


def _in_layout_of(tensors: Sequence[Tensor], made: Any) -> Any:
    """Gives the result channels last where an argument has them, which meta kernels do not."""
    layouts = {4: torch.channels_last, 5: torch.channels_last_3d}
    for tensor in tensors:
        layout = layouts.get(tensor.dim())
        if made is None or layout is None or tensor.is_contiguous():
            continue
        if tensor.is_contiguous(memory_format=layout):
            empty = torch.empty(made.shape, device="meta", memory_format=layout)
            return made._replace(stride=empty.stride())
    return made


def _grouped_product(
    one: Tensor,
    other: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Made:
    """The product of experts, whose meta kernel takes bfloat16 alone where the real one takes more.
    Rows begin at multiples of 16 bytes.
    """
    dtype = out_dtype or one.dtype
    shape: tuple[int, ...]
    if one.dim() == 2 and other.dim() == 2:
        assert offs is not None
        shape = (offs.shape[0], one.shape[0], other.shape[1])
    elif one.dim() == other.dim():
        shape = (one.shape[0], one.shape[1], other.shape[2])
    else:
        shape = (one.shape[-2], other.shape[-1])
    step = 16 // dtype.itemsize
    row = -(-shape[-1] // step) * step
    stride = (shape[-2] * row, row, 1)[-len(shape) :]
    return Made(shape, stride, dtype, None)


def _with_workspace(args: tuple[Any, ...], made: Any) -> Any:
    """Adds oneDNN's workspace, in training the last result, which the meta kernel leaves out."""
    source, weight, train = args[0], args[2], args[15]
    steps, rows, inputs = source.shape
    nbytes = 0
    if train:
        itemsize = source.element_size()
        nbytes = lstm_workspace(steps, rows, inputs, weight.shape[1], itemsize)
    return (*made[:-1], made[-1]._replace(shape=(nbytes,), stride=(1,)))


def _bags_on_cpu(
    made: Any,
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> Any:
    """Gives each word's bag the memory of one more, unless sums need none, and the places of maxima
    an element for each bag where there are none.
    """
    output, bags, sizes, places = made
    is_fast = weight.dtype in (torch.float32, torch.float16, torch.bfloat16)
    if mode == _SUM_OF_BAGS and is_fast and weight.stride(1) == 1 and padding_idx < 0:
        bags = bags._replace(shape=(0,), stride=(1,))
    else:
        bags = bags._replace(storage=(indices.numel() + 1) * bags.dtype.itemsize)
    if mode != _MAXIMA_OF_BAGS:
        places = places._replace(shape=sizes.shape, stride=sizes.stride)
    return output, bags, sizes, places


_SUM_OF_BAGS, _MAXIMA_OF_BAGS = 0, 2  # as the operator numbers them


def _transposed_on_cpu(args: tuple[Any, ...], made: Made) -> Made:
    """Gives the result of a transposed convolution over volumes the memory of the input where that
    is more: without oneDNN its kernel resizes a tensor like the input.
    """
    source, kernel = args[0], str(torch._C._select_conv_backend(*args))
    return made._replace(storage=source.nbytes) if "SlowTranspose3d" in kernel else made


_OF_WINDOWS = frozenset((torch.ops.aten.col2im.default, torch.ops.aten.im2col.default))


def _folded_on_cpu(args: tuple[Any, ...], made: Made) -> Made:
    """Gives the image that windows are added to, and windows of some of it, the memory of the
    input where that is more: the kernels resize a tensor like it (`col2im_cpu`, `im2col_cpu`).
    """
    return made._replace(storage=args[0].numel() * made.dtype.itemsize)


def _layer_norm_on_cpu(args: tuple[Any, ...], made: Any) -> Any:
    """Gives the statistics the input's dtype, unless the weight has another one."""
    input, _, weight = args[:3]
    dtype = input.dtype if weight is None else weight.dtype
    output, *statistics = made
    return (output, *(entry._replace(dtype=dtype) for entry in statistics))


# On CUDA they read 16 bits and write 32, and back. The meta kernels allow that for float16 alone.
_SOFTMAXES = frozenset((torch.ops.aten._softmax.default, torch.ops.aten._log_softmax.default))
_SOFTMAX_GRADIENTS = frozenset(
    (
        torch.ops.aten._softmax_backward_data.default,
        torch.ops.aten._log_softmax_backward_data.default,
    )
)


def _contiguous(like: Tensor, dtype: torch.dtype) -> Made:
    shape = tuple(like.shape)
    return Made(shape, torch.empty(shape, device="meta").stride(), dtype, None)


_LOSSES = frozenset(
    (
        torch.ops.aten.mse_loss.default,
        torch.ops.aten.smooth_l1_loss.default,
        torch.ops.aten.soft_margin_loss.default,
        torch.ops.aten.binary_cross_entropy.default,
    )
)
# Of the dtype of what they are gradients of; the meta kernels give them the one of both arguments.
_LOSS_GRADIENTS = frozenset(
    (torch.ops.aten.mse_loss_backward.default, torch.ops.aten.smooth_l1_loss_backward.default)
)
_NO_REDUCTION, _MEAN = 0, 1  # as the operators number them


def _loss_over_its_elements(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Made
) -> Made:
    """Gives a loss the memory of all of its elements.

    For a mean or a sum the kernels return the buffer in which they computed each element's loss,
    resized to a scalar. Meta kernels do not show that.
    """
    given = by_name(func, args, kwargs)
    if given.get("reduction", _MEAN) == _NO_REDUCTION:
        return made
    shape = torch.broadcast_shapes(given["self"].shape, given["target"].shape)
    return made._replace(storage=math.prod(shape) * made.dtype.itemsize)
