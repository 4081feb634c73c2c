"""Proves: a head that convert made lazy returns a tensor that looks like its logits and is not
computed; losses and log-probabilities of it, and of its views, casts, scales and caps, are memopt's
op in chunks of rows; anything else gets the logits, computed once, with gradients that are as
right. Modes and hooks never see logits that are not there.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import memopt
from memopt._convert.head_call import HeadUse, watched_heads
from memopt._convert.head_logits import LazyLogits
from tests.support.losses import assert_as_right_as_pytorch

WORDS, WIDTH, ROWS, LENGTH = 23, 6, 3, 5
OP = torch.ops.memopt._linear_cross_entropy.default

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


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_the_chunked_op(name: str, bias: bool) -> None:
    use = compare(LOSSES[name], bias=bias)
    assert use.losses
    assert not use.were_made


@pytest.mark.parametrize("name", ["shifted", "transformers", "TRL by rows", "softcap"])
def test_in_bfloat16(name: str) -> None:
    assert not compare(LOSSES[name], dtype=torch.bfloat16).were_made


def with_item(logits: Tensor) -> Tensor:
    logits[0, :, 3] = -1.0
    return logits


OTHERS: dict[str, Loss] = {
    "squares": lambda z, t: z.square().mean(),
    "probabilities of softmax": lambda z, t: z.softmax(-1).square().sum(),
    "some classes": lambda z, t: F.cross_entropy(z[..., 1:].flatten(0, 1), t.flatten() % 7),
    "a factor with a gradient": lambda z, t: shifted(z * z.detach().mean(), t),
    "in place": lambda z, t: shifted(z.mul_(0.5), t),
    "in place, seen by a view": lambda z, t: (v := z[:, 1:], z.mul_(2), v.square().sum())[2],
    "in place, not seen by a copy": lambda z, t: (
        v := (z * 1.5)[:, 1:],
        z.mul_(2),
        v.square().sum(),
    )[2],
    "an item set": lambda z, t: shifted(with_item(z), t),
    "distillation": lambda z, t: F.kl_div(
        z.log_softmax(-1), z.detach().flip(-1).softmax(-1), reduction="sum"
    ),
    "K dimensions, classes last": lambda z, t: F.cross_entropy(
        z, (t[:, :1] % LENGTH).expand(ROWS, WORDS)
    ),
    "entropy": lambda z, t: (z.softmax(-1) * z.log_softmax(-1)).sum(),
    "joined": lambda z, t: shifted(torch.cat([z, z]), torch.cat([t, t])),
    "by NumPy's name": lambda z, t: z.add(1).T.sum(),
    "flipped classes": lambda z, t: shifted(z.flip(-1), t),
}


@pytest.mark.filterwarnings("ignore:The use of `x.T`")
@pytest.mark.parametrize("name", OTHERS)
def test_anything_else_gets_the_logits(name: str) -> None:
    use = compare(OTHERS[name])
    assert use.were_made
    assert not use.losses


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


@pytest.mark.parametrize("cut", [lambda z: z, lambda z: z.float()[:, 1:] * 3], ids=["all", "some"])
def test_an_autograd_function_gets_the_logits(cut: Callable[[Tensor], Tensor]) -> None:
    apply: Loss = Squares.apply
    use = compare(lambda z, t: apply(cut(z)), bias=True)  # type: ignore[call-arg]
    assert use.were_made


def test_a_distribution_gets_both() -> None:
    """Its logsumexp is of chunks, the rest needs the logits."""
    lazy, plain = lazy_and_plain()
    entropies = [
        torch.distributions.Categorical(logits=model(words())).entropy() for model in (lazy, plain)
    ]
    torch.testing.assert_close(*entropies)


def test_the_logits_are_computed_once() -> None:
    lazy, plain = lazy_and_plain()
    calls: list[Any] = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.shape[-1:] == (WORDS,) and "mm" in str(func):
                calls.append(func)
            return out

    logits = lazy(words())
    with Products():  # type: ignore[no-untyped-call]
        first, view = logits.sum(), logits[:, 1:].square().sum()
        with torch.no_grad():
            best = logits.argmax(-1)
    assert len(calls) == 1
    assert torch.equal(best, plain(words()).argmax(-1))
    expected = plain(words())
    ours = gradients(lazy, first + view)
    theirs = gradients(plain, expected.sum() + expected[:, 1:].square().sum())
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


SHAPES: list[Callable[[Tensor], Tensor]] = [
    lambda z: z,
    lambda z: z[:, 1:].float(),
    lambda z: z.transpose(1, 2),
]


def test_it_looks_like_the_logits() -> None:
    lazy, plain = lazy_and_plain(dtype=torch.bfloat16)
    with watched_heads() as uses:
        for shape in SHAPES:
            ours, theirs = shape(lazy(words())), shape(plain(words()))
            assert isinstance(ours, Tensor)
            for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf"):
                assert getattr(ours, name) == getattr(theirs, name), name
            for name in ("size", "dim", "numel", "stride", "is_contiguous", "is_floating_point"):
                assert getattr(ours, name)() == getattr(theirs, name)(), name
            assert len(ours) == len(theirs)
            assert ours.grad_fn is not None
            assert hash(ours) != hash(theirs)
    assert not any(use.were_made or use.losses for use in uses)


def test_a_view_that_pytorch_refuses_is_refused() -> None:
    lazy, plain = lazy_and_plain()
    for model in (plain, lazy):
        with pytest.raises(RuntimeError, match="view size is not compatible"):
            model(words())[:, :-1].view(-1, WORDS)
        with pytest.raises(ValueError, match="Expected input batch_size"):
            F.cross_entropy(model(words()).view(-1, WORDS), torch.zeros(4, dtype=torch.long))
        with pytest.raises(IndexError, match=r"out of bounds|must be in"):
            F.cross_entropy(model(words()).view(-1, WORDS), torch.full((15,), WORDS))


@pytest.mark.parametrize("change", ["eval", "no_grad", "inference_mode", "frozen"])
def test_plain_outside_of_training(change: str) -> None:
    lazy, _ = lazy_and_plain()
    if change == "eval":
        lazy.eval()
    if change == "frozen":
        lazy.requires_grad_(False)
    context: Any = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}.get(
        change, torch.enable_grad
    )
    with context():
        assert type(lazy(words())) is Tensor
    assert type(lazy.train().requires_grad_()(words())) is LazyLogits


def test_pickled_and_saved_it_is_the_logits() -> None:
    lazy, plain = lazy_and_plain()
    file = io.BytesIO()
    torch.save(lazy(words()), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for copied in (pickle.loads(pickle.dumps(lazy(words()))), loaded):
        assert type(copied) is Tensor
        assert torch.equal(copied, plain(words()))
    for model in (lazy, plain):
        with pytest.raises(RuntimeError, match="support the deepcopy"):
            copy.deepcopy(model(words()))
    assert repr(lazy(words()).detach()) == repr(plain(words()).detach())


def test_hooks_and_retained_gradients_see_the_gradient() -> None:
    lazy, plain = lazy_and_plain()
    found: list[list[Tensor]] = []
    for model in (lazy, plain):
        seen: list[Tensor] = []
        logits = model(words())
        logits.retain_grad()
        shifted(logits, words(2)).backward()
        seen.append(logits.grad)
        logits = model(words())
        logits.register_hook(seen.append)
        removed = logits.register_hook(seen.append)
        removed.remove()
        shifted(logits, words(2)).backward()
        logits = model(words())
        seen += torch.autograd.grad(logits.square().sum(), logits)
        found.append(seen)
    assert len(found[0]) == len(found[1]) == 3
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


def test_a_gradient_of_logits_that_a_loss_went_around_is_an_error() -> None:
    lazy, _ = lazy_and_plain()
    logits = lazy(words())
    loss = shifted(logits, words(2))
    with pytest.raises(RuntimeError, match="head=False"):
        torch.autograd.grad(loss, logits)


def test_a_head_with_hooks_of_others_returns_its_logits() -> None:
    lazy, plain = lazy_and_plain()
    seen: list[Any] = []
    handle = lazy.head.register_forward_hook(lambda *call: seen.append(call[-1]))
    assert type(lazy(words())) is Tensor
    assert torch.equal(seen[0], plain(words()))
    handle.remove()
    assert type(lazy(words())) is LazyLogits
    handle = lazy.head.register_full_backward_hook(lambda *call: seen.append(call))
    shifted(lazy(words()), words(2)).backward()
    assert len(seen) == 2
    handle.remove()
    lazy.head.register_forward_pre_hook(lambda *call: None)
    assert type(lazy(words())) is LazyLogits


def test_weights_written_since_are_an_error() -> None:
    lazy, _ = lazy_and_plain()
    for change in (lazy.head.weight, None):
        logits = lazy(words())
        with torch.no_grad():
            (logits._pending.call.input if change is None else change).mul_(1.0)
        for use in (lambda z: z.sum(), lambda z: shifted(z, words(2))):
            with pytest.raises(RuntimeError, match="written in place since"):
                use(logits)
    logits = lazy(words())
    values = logits.argmax(-1)  # computed before
    with torch.no_grad():
        lazy.head.weight.mul_(-1)
    assert torch.equal(logits.argmax(-1), values)


class Watching(TorchDispatchMode):
    """Keeps a copy of every tensor that it sees, and compares at the end."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[Tensor, Tensor]] = []
        self.ops: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.ops.append(func)
        for leaf in torch.utils._pytree.tree_leaves((args, kwargs, out)):
            if isinstance(leaf, Tensor):
                assert type(leaf) is not LazyLogits, func
                assert not leaf.is_meta, func
                self.seen.append((leaf, leaf.detach().clone()))
        return out


@pytest.mark.parametrize("name", ["shifted", "masked rows", "label smoother", "TRL", "softcap"])
def test_a_mode_sees_the_op_and_nothing_of_the_logits(name: str) -> None:
    lazy, _ = lazy_and_plain()
    lazy(words())
    with Watching() as watching:
        loss = LOSSES[name](lazy(words()), words(2))
        loss.backward()
    assert OP in watching.ops
    logits = ROWS * LENGTH * WORDS
    for tensor, before in watching.seen:
        assert tensor.numel() < logits or tensor.shape[-1] != WORDS
        is_gradient = tensor.shape == before.shape and tensor._version
        assert is_gradient or torch.equal(tensor, before)


def test_retain_graph_and_accumulation() -> None:
    lazy, plain = lazy_and_plain()
    for model in (lazy, plain):
        loss = shifted(model(words()), words(2))
        loss.backward(retain_graph=True)
        loss.backward()
        shifted(model(words(3)), words(4)).backward()
    for ours, theirs in zip(lazy.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("outside", [False, True], ids=["loss in autocast", "loss outside"])
def test_autocast(outside: bool) -> None:
    lazy, plain = lazy_and_plain()
    results = []
    for model in (lazy, plain):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(words())
            loss = None if outside else shifted(logits, words(2))
        assert logits.dtype == torch.bfloat16
        loss = shifted(logits, words(2)) if loss is None else loss
        results.append((loss, gradients(model, loss)))
    (ours, of_lazy), (theirs, of_plain) = results
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)
    for name, gradient in of_lazy.items():
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(gradient, of_plain[name], rtol=3e-2, atol=3e-3)


def test_a_bias_for_all_classes_is_the_heads() -> None:
    """BART's final_logits_bias."""
    bias = torch.linspace(-1, 1, WORDS)
    use = compare(lambda z, t: shifted(z + bias.to(z.dtype)[None], t), bias=True)
    assert use.losses
    assert not use.were_made
    use = compare(lambda z, t: shifted(z + torch.ones(LENGTH, 1, dtype=z.dtype), t))
    assert use.were_made


def test_compiled_models_step_aside() -> None:
    lazy, plain = lazy_and_plain()
    torch.compiler.reset()
    with watched_heads() as uses:
        compiled = torch.compile(lazy, backend="aot_eager", fullgraph=True)
        loss = shifted(compiled(words()), words(2))
    assert not uses
    torch.testing.assert_close(loss, shifted(plain(words()), words(2)))


@pytest.mark.filterwarnings("ignore:Dynamo does not know")
def test_a_compiled_loss_gets_the_logits() -> None:
    lazy, plain = lazy_and_plain()
    torch.compiler.reset()
    loss = torch.compile(shifted, backend="aot_eager")
    for seed in (1, 3):
        ours, theirs = loss(lazy(words(seed)), words(2)), shifted(plain(words(seed)), words(2))
        torch.testing.assert_close(ours, theirs)
        for a, b in zip(
            gradients(lazy, ours).values(), gradients(plain, theirs).values(), strict=True
        ):
            torch.testing.assert_close(a, b)
