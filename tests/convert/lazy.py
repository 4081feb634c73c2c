"""A small model whose logits are lazy, losses of them, and the oracle's rule for both."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memopt
from memopt._head.call import HeadUse, watched_heads
from tests.support.losses import assert_as_right_as_pytorch

WORDS, WIDTH, ROWS, LENGTH = 23, 6, 3, 5

Loss = Callable[[Tensor, Tensor], Tensor]


class Model(nn.Module):
    """Words to logits."""

    def __init__(self, bias: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, WIDTH, dtype=dtype)
        self.inner = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.head = nn.Linear(WIDTH, WORDS, bias=bias, dtype=dtype)

    def forward(self, words: Tensor) -> Tensor:
        logits: Tensor = self.head(self.inner(self.embed(words)))
        return logits


def words(seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(WORDS, (ROWS, LENGTH), generator=generator)


def lazy_and_plain(**options: Any) -> tuple[Model, Model]:
    plain = Model(**options)
    lazy = copy.deepcopy(plain)
    (found,) = memopt.convert(lazy).heads
    assert found.path == "head"
    return lazy, plain


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def compare(loss: Loss, **options: Any) -> HeadUse:
    """The loss and its gradients are those of plain logits by the oracle's rule. What became of the
    lazy ones.
    """
    lazy, plain = lazy_and_plain(**options)
    exact = copy.deepcopy(plain).double()
    with watched_heads() as uses:
        ours = loss(lazy(words()), words(2))
    theirs, reference = loss(plain(words()), words(2)), loss(exact(words()), words(2))
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    found = [
        {"loss": loss.detach(), **gradients(model, loss)}
        for model, loss in ((lazy, ours), (plain, theirs), (exact, reference))
    ]
    assert found[0].keys() == found[1].keys()
    mine, plains, exacts = (list(each.values()) for each in found)
    assert_as_right_as_pytorch(mine, plains, exacts)
    (use,) = uses
    return use


def shifted(logits: Tensor, target: Tensor) -> Tensor:
    rows = logits[..., :-1, :].contiguous().view(-1, WORDS)
    return F.cross_entropy(rows, target[..., 1:].reshape(-1))


def as_transformers(logits: Tensor, target: Tensor) -> Tensor:
    """loss_utils.ForCausalLMLoss with num_items_in_batch."""
    logits = logits.float()
    target = F.pad(target, (0, 1), value=-100)[..., 1:].contiguous()
    loss = F.cross_entropy(logits.view(-1, WORDS), target.view(-1), reduction="sum")
    return loss / torch.tensor(17)


def label_smoother(logits: Tensor, target: Tensor) -> Tensor:
    """trainer_pt_utils.LabelSmoother."""
    log_probs = -F.log_softmax(logits, dim=-1)
    target = target.unsqueeze(-1)
    padding = target.eq(3)
    target = torch.clamp(target, min=0)
    nll, smooth = log_probs.gather(dim=-1, index=target), log_probs.sum(-1, True, dtype=torch.float)
    nll.masked_fill_(padding, 0.0)
    smooth.masked_fill_(padding, 0.0)
    count = padding.numel() - padding.long().sum()
    return 0.9 * nll.sum() / count + 0.1 * smooth.sum() / (count * log_probs.shape[-1])


def selective_log_softmax(logits: Tensor, target: Tensor) -> Tensor:
    """TRL's, of float32."""
    chosen = torch.gather(logits, dim=-1, index=target.unsqueeze(-1)).squeeze(-1)
    return (chosen - torch.stack([torch.logsumexp(row, dim=-1) for row in logits])).square().sum()


def selective_log_softmax_by_rows(logits: Tensor, target: Tensor) -> Tensor:
    """TRL's, of 16 bits."""
    found = []
    for row, chosen in zip(logits, target, strict=True):
        log_probs = F.log_softmax(row, dim=-1)
        found.append(log_probs.gather(dim=-1, index=chosen.unsqueeze(-1)).squeeze(-1))
    return torch.stack(found).exp().sum()


LOSSES: dict[str, Loss] = {
    "shifted": shifted,
    "transformers": as_transformers,
    "label smoother": label_smoother,
    "TRL": selective_log_softmax,
    "TRL by rows": selective_log_softmax_by_rows,
    "nanoGPT": lambda z, t: F.cross_entropy(z.view(-1, z.size(-1)), t.view(-1), ignore_index=-1),
    "module": lambda z, t: nn.CrossEntropyLoss()(z.flatten(0, 1), t.flatten()),
    "class dimension 1": lambda z, t: F.cross_entropy(z.transpose(1, 2), t),
    "permuted": lambda z, t: F.cross_entropy(z.permute(1, 2, 0), t.t()),
    "masked rows": lambda z, t: F.cross_entropy(z[t > 9], t[t > 9], reduction="none").sum(),
    "one row": lambda z, t: F.cross_entropy(z[1, 2], t[1, 2]),
    "last tokens": lambda z, t: F.cross_entropy(z[:, -1], t[:, -1]),
    "all classes sliced": lambda z, t: F.cross_entropy(z[:, 1:, :WORDS].mT, t[:, 1:].long()),
    "smoothing": lambda z, t: F.cross_entropy(
        z.reshape(-1, WORDS), t.view(-1), label_smoothing=0.2
    ),
    "class weights": lambda z, t: F.cross_entropy(
        z.reshape(-1, WORDS), t.view(-1), torch.linspace(0.5, 2, WORDS, dtype=z.dtype)
    ),
    "probabilities": lambda z, t: F.cross_entropy(
        z.view(-1, WORDS), F.one_hot(t.view(-1), WORDS).to(z.dtype) * 0.7 + 0.3 / WORDS
    ),
    "nll": lambda z, t: F.nll_loss(z.view(-1, WORDS).log_softmax(1), t.view(-1)),
    "keywords": lambda z, t: F.cross_entropy(input=z.view(-1, WORDS), target=t.view(-1)),
    "scaled": lambda z, t: shifted(z * 0.3 / 2, t),
    "scaled from the left": lambda z, t: shifted(0.5 * z, t),
    "softcap": lambda z, t: shifted(torch.tanh(z / 0.7) * 0.7, t),
    "softcap and scale": lambda z, t: shifted((z / 0.7).tanh().mul(0.7) * 3, t),
    "chunks": lambda z, t: sum(
        (shifted(a, b) for a, b in zip(z.split(1), t.split(1), strict=True)), torch.zeros(())
    ),
    "mean log-probability": lambda z, t: z.log_softmax(-1).mean(-1).sum(),
}


class Squares(torch.autograd.Function):
    """Code that PyTorch gives the tensor itself."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return logits.square().sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        gradient: Tensor = grads[0] * 2 * ctx.saved_tensors[0]
        return gradient
