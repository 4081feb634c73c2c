"""Proves: outputs, gradients and what backward writes again have the strides that PyTorch's own ops
give them, on the CPU and on meta, so that a model's views work as they did; and a recipe gives them
back in the same strides.

Where a dimension has no or one element its stride means nothing, and PyTorch's devices differ.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import memopt
from memopt.memory.saved import SavedTensors
from tests.support.cases import OP_CASES, Call, OpCase, as_tuple
from tests.support.shapes import FLOAT32, LAYOUTS

SIZE = (2, 6, 4, 8)


def permuted(t: Tensor) -> Tensor:
    return t.permute(3, 1, 2, 0).contiguous().permute(3, 1, 2, 0)


STRIDES: dict[str, Callable[[Tensor], Tensor]] = {
    **{name: layout for name, layout in LAYOUTS.items() if name != "misaligned"},
    "heads": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "some heads": lambda t: t.transpose(1, 2).repeat(1, 1, 2, 1).transpose(1, 2)[:, ::2],
    "channels last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "permuted": permuted,
    "one row expanded": lambda t: t[:1].expand_as(t),
    "one column expanded": lambda t: t[..., :1].expand_as(t),
    "one head expanded": lambda t: t[:, :, :1].expand_as(t),
}

every_op = pytest.mark.parametrize("case", OP_CASES, ids=str)
every_layout = pytest.mark.parametrize("layout", STRIDES)


def laid_out(call: Call, layout: str) -> Call:
    return call.replace(**{name: STRIDES[layout](t) for name, t in call.activations.items()})


def strides(function: Callable[[Call], Tensor | tuple[Tensor, ...]], call: Call) -> list[tuple]:
    return [output.stride() for output in as_tuple(function(call))]


def gradient_strides(
    function: Callable[[Call], Tensor | tuple[Tensor, ...]], call: Call, contiguous: bool
) -> dict[str, tuple]:
    """With gradients that come in the outputs' own strides, or contiguous."""
    leaves = call.leaves()
    outputs = as_tuple(function(leaves))
    incoming = [torch.zeros_like(y.detach()) for y in outputs]
    if contiguous:
        incoming = [t.contiguous() for t in incoming]
    wanted = {name: leaves.given[name] for name in call.activations if name not in call.constants}
    gradients = torch.autograd.grad(outputs, list(wanted.values()), incoming)
    return {name: g.stride() for name, g in zip(wanted, gradients, strict=True)}


def on_meta(call: Call) -> Call:
    return call.map(
        lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
    )


@every_op
@every_layout
def test_outputs(case: OpCase, layout: str, device: torch.device) -> None:
    call = laid_out(case.make_call(SIZE, FLOAT32, device), layout)
    expected = strides(case.torch, call)
    assert strides(case.memopt, call) == expected
    assert strides(case.memopt, on_meta(call)) == expected


@every_op
@pytest.mark.parametrize("layout", ["heads", "transposed", "channels last"])
def test_outputs_of_inputs_that_differ(case: OpCase, layout: str, device: torch.device) -> None:
    call = case.make_call(SIZE, FLOAT32, device)
    for name, tensor in call.activations.items():
        changed = call.replace(**{name: STRIDES[layout](tensor)})
        expected = strides(case.torch, changed)
        assert strides(case.memopt, changed) == expected, name
        assert strides(case.memopt, on_meta(changed)) == expected, name


@every_op
@pytest.mark.parametrize("contiguous", [False, True], ids=["as outputs", "contiguous"])
@pytest.mark.parametrize("layout", ["every other row", "heads", "transposed", "channels last"])
def test_gradients(case: OpCase, layout: str, contiguous: bool, device: torch.device) -> None:
    call = laid_out(case.make_call(SIZE, FLOAT32, device), layout)
    expected = gradient_strides(case.torch, call, contiguous)
    assert gradient_strides(case.memopt, call, contiguous) == expected
    assert gradient_strides(case.memopt, on_meta(call), contiguous) == expected


@every_op
@every_layout
def test_output_written_again(case: OpCase, layout: str, device: torch.device) -> None:
    if not case.reemitted:
        pytest.skip("its backward writes no output")
    call = laid_out(case.make_call(SIZE, FLOAT32, device), layout)
    for meant in (call, on_meta(call)):
        outputs, saved = case.forward(meant)
        again = case.backward(meant, saved, recompute_output=True)
        for name in case.reemitted:
            assert again[name].stride() == outputs[name].stride()


@every_op
@pytest.mark.parametrize("size", [(0, 6, 4, 8), (2, 0, 4, 8)], ids=str)
def test_nothing_in_a_dimension(case: OpCase, size: tuple[int, ...], device: torch.device) -> None:
    """What PyTorch's output can be viewed as, memopt's can be."""
    call = case.make_call(size, FLOAT32, device)
    for layout in (STRIDES["heads"], STRIDES["channels last"], lambda t: t.transpose(0, 1)):
        changed = call.replace(**{name: layout(t) for name, t in call.activations.items()})
        for output in as_tuple(case.memopt(changed)):
            assert output.is_contiguous()
            assert output.view(-1).numel() == 0


def heads(x: Tensor) -> Tensor:
    return x.view(2, 4, 6, 8).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    """Works for what has kept the strides that heads() makes."""
    return x.transpose(1, 2).view(2, 4, 48)


CHAINS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "dropout": (F.dropout, memopt.functional.dropout),
    "gelu": (F.gelu, memopt.functional.gelu),
    "dropout of gelu": (
        lambda x: F.dropout(F.gelu(x)),
        lambda x: memopt.functional.dropout(memopt.functional.gelu(x)),
    ),
    "gelu_dropout": (lambda x: F.dropout(F.gelu(x)), memopt.functional.gelu_dropout),
    "swiglu": (lambda x: F.silu(x) * x, lambda x: memopt.functional.swiglu(x, x)),
}


@pytest.mark.parametrize("chain", CHAINS)
def test_a_model_views_it_and_a_recipe_gives_it_back(chain: str, device: torch.device) -> None:
    """A view of an output of transposed heads works as in PyTorch. Its recipe stands in for it."""
    plain, ours = CHAINS[chain]
    x = torch.randn(2, 4, 48, device=device, requires_grad=True)
    weight = torch.randn(5, 48, device=device, requires_grad=True)
    joined(plain(heads(x)))

    def gradients(recompute: bool) -> tuple[list[Tensor], int]:
        torch.manual_seed(0)
        with SavedTensors(exclude=[weight]) as saved:
            if recompute:
                with memopt.recipes():
                    loss = F.linear(joined(ours(heads(x))), weight).sum()
            else:
                loss = F.linear(joined(ours(heads(x))), weight).sum()
        return list(torch.autograd.grad(loss, (x, weight))), saved.bytes

    kept, bytes_kept = gradients(False)
    again, _ = gradients(True)
    for a, b in zip(kept, again, strict=True):
        assert torch.equal(a, b)
    assert bytes_kept >= x.nbytes


def test_channels_last_goes_through_a_network(device: torch.device) -> None:
    """Convolutions keep channels-last, and so does what stands between them."""
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.GELU(), torch.nn.Dropout(0.5), torch.nn.Conv2d(8, 4, 3)
    ).to(device=device, memory_format=torch.channels_last)
    x = torch.randn(2, 3, 12, 12, device=device).to(memory_format=torch.channels_last)
    seen: list[bool] = []
    for module in net:
        module.register_forward_hook(
            lambda *args: seen.append(args[2].is_contiguous(memory_format=torch.channels_last))
        )
    memopt.convert(net)
    net(x).sum().backward()
    assert seen == [True] * 4
