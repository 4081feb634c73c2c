"""Proves: a converted model under autocast keeps a float32 residual stream in float32, so that its
gradients are as right as PyTorch's; and what its blocks keep for backward, exactly. Per token, with
h the width (GPT-2, BLOOM: an MLP of 4 h; Llama: of m):

                     autocast_norms="keep"     "lower"          PyTorch
    GPT-2            22 h                      20 h             36 h
    BLOOM            22 h                      20 h             36 h
        and its embedding norm: 4 h; the first block's first norm reads its output, which has a
        recipe: 4 h less
    Llama            14 h + 4 m                12 h + 4 m

"keep" costs every second norm 2 bytes an element: its input is float32. For the others what the
branch before returned is kept, 2 bytes, and added again (test_residual_sums.py). The copies that
autocast makes of a norm's output for each linear are not kept.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memopt
from tests.convert import modules

WIDTH, HEADS, WORDS = 64, 4, 100
LOW = torch.bfloat16


class Attention(nn.Module):
    def __init__(self, one_linear: bool, bias: bool) -> None:
        super().__init__()
        outs = (3 * WIDTH,) if one_linear else (WIDTH,) * 3
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, out, bias=bias) for out in outs)
        self.proj = nn.Linear(WIDTH, WIDTH, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        qkv = torch.cat([linear(x) for linear in self.qkv], -1) if len(self.qkv) > 1 else None
        qkv = self.qkv[0](x) if qkv is None else qkv
        q, k, v = qkv.unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.proj(y.transpose(1, 2).flatten(2))
        return out


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.act(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        llama = kind == "Llama"
        self.post = kind == "BERT"
        self.attention = Attention(one_linear=not llama, bias=not llama)
        self.first, self.second = (
            modules.PlainRMSNorm(WIDTH) if llama else nn.LayerNorm(WIDTH) for _ in range(2)
        )
        self.mlp = (
            Gated()
            if llama
            else nn.Sequential(
                nn.Linear(WIDTH, 4 * WIDTH), nn.GELU("tanh"), nn.Linear(4 * WIDTH, WIDTH)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.post:
            x = self.first(x + self.attention(x))
            return self.second(x + self.mlp(x))
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x))


class Model(nn.Module):
    """BLOOM and BERT have a norm behind the embedding."""

    def __init__(self, kind: str, blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH) if kind in ("BLOOM", "BERT") else nn.Identity()
        self.blocks = nn.Sequential(*(Block(kind) for _ in range(blocks)))
        self.last = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        out: Tensor = self.head(self.last(self.blocks(self.norm(self.embedding(words)))))
        return out


def saved_per_token(run: Callable[[Tensor], Tensor], make: Callable[[int], Tensor]) -> int:
    """What grows with the tokens: casts of weights do not."""

    def saved(tokens: int) -> int:
        with torch.autocast("cpu", LOW):
            return int(memopt.saved_bytes(run, make(tokens)))

    more, rest = divmod(saved(48) - saved(32), 16)
    assert rest == 0
    return more


def tokens_in(tokens: int) -> Tensor:
    return torch.randn(1, tokens, WIDTH, requires_grad=True)


# Bytes a token in terms of h, beside the statistics of two norms and attention's logsumexp.
KEPT = {
    ("GPT-2", "keep"): 22,
    ("GPT-2", "lower"): 20,
    ("Llama", "keep"): 22,  # m = 2 h
    ("Llama", "lower"): 20,
}


@pytest.mark.parametrize(("kind", "choice"), KEPT)
def test_bytes_of_a_block(kind: str, choice: str) -> None:
    block = Block(kind)
    plain = saved_per_token(block, tokens_in)
    memopt.convert(block, autocast_norms=choice)
    statistics = 2 * (4 if kind == "Llama" else 8)
    expected = KEPT[kind, choice] * WIDTH + statistics + 4 * HEADS
    assert saved_per_token(block, tokens_in) == expected < plain


@pytest.mark.parametrize(("choice", "embedding_norm"), [("keep", 4), ("lower", 2)])
def test_bytes_of_an_embedding_norm_and_a_block(choice: str, embedding_norm: int) -> None:
    """The block's first norm reads what the embedding norm's recipe gives."""
    both = nn.Sequential(nn.LayerNorm(WIDTH), Block("BLOOM"))
    memopt.convert(both, autocast_norms=choice)
    input = {"keep": 4, "lower": 2}[choice]
    block = KEPT["GPT-2", choice] - input
    expected = (embedding_norm + block) * WIDTH + 3 * 8 + 4 * HEADS
    assert saved_per_token(both, tokens_in) == expected


def loss_of(model: nn.Module, words: Tensor, targets: Tensor, autocast: bool) -> Tensor:
    with torch.autocast("cpu", LOW, enabled=autocast):
        logits = model(words)
    return F.cross_entropy(logits.flatten(0, 1).double(), targets.flatten())


def errors(model: nn.Module, exact: list[Tensor], *data: Tensor) -> list[float]:
    parameters = list(model.parameters())
    found = torch.autograd.grad(loss_of(model, *data, autocast=True), parameters)
    pairs = zip(found, exact, strict=True)
    return [float((g.double() - e).norm() / e.norm()) for g, e in pairs if e.norm() > 1e-12]


@pytest.mark.parametrize("kind", ["BLOOM", "BERT", "GPT-2"])
def test_gradients_are_as_right_as_pytorchs(kind: str) -> None:
    """Against float64, the geometric mean over all parameters of several models."""
    logs: list[float] = []
    for seed in range(4):
        torch.manual_seed(seed)
        model, data = Model(kind, blocks=3), torch.randint(WORDS, (2, 2, 24)).unbind()
        wide = copy.deepcopy(model).double()
        exact = list(
            torch.autograd.grad(loss_of(wide, *data, autocast=False), list(wide.parameters()))
        )
        plain = errors(model, exact, *data)
        memopt.convert(model)
        ours = errors(model, exact, *data)
        logs += [math.log(a / b) for a, b in zip(ours, plain, strict=True)]
    assert math.exp(sum(logs) / len(logs)) <= 1.2


@pytest.mark.parametrize("kind", ["GPT-2", "BLOOM", "BERT", "Llama"])
def test_the_residual_stream_stays_float32(kind: str) -> None:
    model = Model(kind, blocks=2)
    memopt.convert(model)
    seen: list[torch.dtype] = []
    for block in model.blocks:
        block.register_forward_hook(lambda *args: seen.append(args[2].dtype))
    with torch.autocast("cpu", LOW):
        model(torch.randint(WORDS, (1, 8)))
    assert seen == [torch.float32] * 2


def test_an_explicit_float32_activation_is_left_alone() -> None:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.act = nn.Linear(WIDTH, 4), nn.Sigmoid()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.act(self.linear(x).float())
            return out

    router, x = Router(), torch.randn(3, WIDTH)
    with torch.autocast("cpu", LOW):
        expected = router(x)
        memopt.convert(router)
        actual = router(x)
    assert actual.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7)
