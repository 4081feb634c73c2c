"""Proves what the policy keeps of a joint graph, and that what it makes again is right: the halves
run op by op, without the code generator.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import aot_function, nop
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch.utils.checkpoint import checkpoint

from memopt._compile._inductor import Partitioner
from memopt._compile.ops import is_view

pytestmark = pytest.mark.usefixtures("minimum_cut")

H, ROWS = 16, 8


class Kept(Partitioner):
    """Notes what each graph keeps, by names and shapes."""

    def __call__(self, gm, joint_inputs, **kwargs):
        halves = super().__call__(gm, joint_inputs, **kwargs)
        (output,) = halves[0].graph.find_nodes(op="output")
        kept = output.args[0][kwargs["num_fwd_outputs"] :]
        self.kept = [
            n for n in kept if isinstance(n, fx.Node) and n.op != "placeholder" and not is_view(n)
        ]
        return halves

    @property
    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        return sorted(
            (n.target.__name__.split(".")[0], tuple(n.meta["val"].shape)) for n in self.kept
        )


def check(
    function: Callable[..., Tensor], *tensors: Tensor, budget=None, decompose: bool = True
) -> Kept:
    """Gradients of the divided graph are those of eager mode."""
    partitioner = Kept(budget)
    compiled = aot_function(
        function,
        fw_compiler=nop,
        bw_compiler=nop,
        partition_fn=partitioner,
        decompositions=select_decomp_table() if decompose else None,  # Inductor's
    )
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    torch.manual_seed(3)
    actual = torch.autograd.grad(compiled(*leaves).sum(), leaves)
    torch.manual_seed(3)
    expected = torch.autograd.grad(function(*leaves).sum(), leaves)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e)
    return partitioner


def nop_backend(partitioner: Partitioner) -> Callable[..., object]:
    return aot_autograd(
        fw_compiler=nop,
        bw_compiler=nop,
        partition_fn=partitioner,
        keep_inference_input_mutations=True,
    )


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape)


def test_norms_and_activations_are_made_again() -> None:
    def mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return F.gelu(F.layer_norm(x, (H,)) @ up) @ down

    kept = check(mlp, randn(ROWS, H), randn(H, 4 * H), randn(4 * H, H))
    big = [entry for entry in kept.shapes if entry[1][-1] > 1]
    assert big == [("mm", (ROWS, 4 * H))]  # beside the input, which is there anyway


def test_an_output_is_kept_and_not_its_copy() -> None:
    """Of which forward returns a view, as of a cache of keys."""

    def attend(q: Tensor, k: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        keys = (k @ w).view(2, ROWS // 2, H).transpose(1, 2)
        return q.expand(2, -1, -1) @ keys.contiguous(), keys

    partitioner = Kept(None)
    tensors = [randn(ROWS, H), randn(ROWS, H), randn(H, H)]
    compiled = aot_function(attend, fw_compiler=nop, bw_compiler=nop, partition_fn=partitioner)
    leaves = [tensor.requires_grad_() for tensor in tensors]
    actual = torch.autograd.grad(compiled(*leaves)[0].sum(), leaves)
    for a, e in zip(actual, torch.autograd.grad(attend(*leaves)[0].sum(), leaves), strict=True):
        torch.testing.assert_close(a, e)
    assert "clone" not in [name for name, _ in partitioner.shapes]


def test_statistics_are_kept() -> None:
    """To make them again would read all of the input once more."""

    def scaled(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        return y * y.square().mean(-1, keepdim=True).rsqrt()

    kept = check(scaled, randn(ROWS, H), randn(H, H))
    assert sorted(shape for _, shape in kept.shapes) == [(ROWS, 1), (ROWS, H)]


def test_the_smaller_of_two_ends_is_kept() -> None:
    """A product of two wide factors, of which backward reads the sum over a dimension alone."""
    kept = check(lambda a, b: (a @ b).double().relu(), randn(ROWS, H), randn(H, H))
    (entry,) = kept.kept
    assert entry.meta["val"].element_size() <= 4


def test_residual_streams_are_kept_and_not_the_branches() -> None:
    def stack(x: Tensor, *weights: Tensor) -> Tensor:
        for weight in weights:
            x = x + F.layer_norm(x, (H,)) @ weight
        return F.layer_norm(x, (H,))

    kept = check(stack, randn(ROWS, H), *(randn(H, H) for _ in range(4)))
    wide = [name for name, shape in kept.shapes if shape == (ROWS, H)]
    assert len(wide) == 4  # and the input
    assert "mm" not in wide


def test_regions_of_the_compiler_win() -> None:
    def region(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return (x @ up).relu() @ down

    def inside(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return checkpoint(region, x, up, down, use_reentrant=False).sin()

    tensors = randn(ROWS, H), randn(H, 4 * H), randn(4 * H, H)
    torch.compiler.reset()
    shapes = []
    for function in (region, inside):
        partitioner = Kept(None)
        backend = nop_backend(partitioner)
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        actual = torch.autograd.grad(
            torch.compile(function, backend=backend)(*leaves).sum(), leaves
        )
        expected = torch.autograd.grad(function(*leaves).sum(), leaves)
        for a, e in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, e)
        shapes.append(partitioner.shapes)
    assert (ROWS, 4 * H) in [shape for _, shape in shapes[0]]
    assert (ROWS, 4 * H) not in [shape for _, shape in shapes[1]]


def test_a_draw_is_kept() -> None:
    def dropped(x: Tensor, w: Tensor) -> Tensor:
        return F.dropout(x @ w, 0.5).square()

    # Decomposed, it would draw other numbers than eager mode's.
    kept = check(dropped, randn(ROWS, H), randn(H, H), decompose=False)
    assert torch.bool in {node.meta["val"].dtype for node in kept.kept}


def test_an_input_that_forward_writes_is_read_before() -> None:
    """exp(scale) is cheap, but backward cannot make it again from what forward wrote."""

    def function(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        y = (x @ w) * scale.exp()
        scale.add_(1)
        return y

    compiled = torch.compile(function, backend=nop_backend(Partitioner(None)), fullgraph=True)
    leaves = [randn(ROWS, H).requires_grad_(), randn(H, H).requires_grad_()]
    actual = torch.autograd.grad(compiled(*leaves, torch.zeros(H)).sum(), leaves)
    expected = torch.autograd.grad(function(*leaves, torch.zeros(H)).sum(), leaves)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e)


def test_custom_ops_are_not_run_again() -> None:
    calls = []

    @torch.library.custom_op("memopt_tests::noted", mutates_args=())
    def noted(x: Tensor) -> Tensor:
        calls.append(1)
        return x * 2

    noted.register_fake(lambda x: torch.empty_like(x))
    noted.register_autograd(lambda ctx, grad: grad * 2)
    compiled = aot_function(
        lambda x: noted(x).sin(), fw_compiler=nop, bw_compiler=nop, partition_fn=Partitioner(None)
    )
    x = randn(ROWS, H).requires_grad_()
    compiled(x).sum().backward()
    torch.testing.assert_close(x.grad, 2 * (2 * x).cos())
    assert len(calls) == 1


@pytest.mark.parametrize("budget", [0.6, 0.7, 0.8, 1.0])
def test_within_a_budget_gradients_stay(budget: float) -> None:
    def stack(x: Tensor, *weights: Tensor) -> Tensor:
        for up, down in zip(weights[::2], weights[1::2], strict=True):
            x = x + F.gelu(F.layer_norm(x, (H,)) @ up) @ down
        return F.layer_norm(x, (H,))

    weights = [randn(*shape) / 4 for _ in range(4) for shape in ((H, 4 * H), (4 * H, H))]
    check(stack, randn(64, H), *weights, budget=budget)
