"""A small GPT of torch.nn, and a few steps of its training on a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.support.blocks import GPT2Block

WORDS, LENGTH, BATCH, WIDTH = 31, 12, 3, 16


class GPT(nn.Module):
    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(GPT2Block(WIDTH, 2, p) for _ in range(3)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


@contextmanager
def _plain_attention() -> Iterator[None]:
    """The one kind of attention that every device has: no kernel of the CPU's alone."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


def train(
    device: str,
    change: Callable[[GPT], object] = lambda model: None,
    *,
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
    p: float = 0.0,
    steps: int = 2,
) -> tuple[list[Tensor], list[Tensor]]:
    """Losses of each step, then gradients of the last one and weights behind it, on the CPU.

    around: a context of forward.
    """
    torch.manual_seed(3)
    model = GPT(p).to(device)
    change(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    generator = torch.Generator().manual_seed(5)
    losses = []
    for _ in range(steps):
        tokens = torch.randint(WORDS, (BATCH, LENGTH + 1), generator=generator).to(device)
        optimizer.zero_grad()
        with _plain_attention(), around():
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        with _plain_attention():
            loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    parameters = dict(sorted(model.named_parameters()))
    final = [t.detach() for q in parameters.values() for t in (q.grad, q)]
    assert all(tensor.isfinite().all() for tensor in (*losses, *final))
    return [loss.cpu() for loss in losses], [tensor.cpu() for tensor in final]
