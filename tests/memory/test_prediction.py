"""Proves that a step that computes nothing has the memory of the step: every category, at every
moment, byte for byte on the CPU.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import weight_norm

import memopt
from memopt._anatomy.report import Anatomy
from memopt.memory.predicted.on_cuda import AsOnCuda
from tests.anatomy.models import NAMES, Mlp, tiny

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "autocast": {"autocast": torch.bfloat16},
    "recipes": {"recipes": True},
    "checkpointed": {"checkpoint": "all"},
    "every second with recipes": {"checkpoint": 2, "recipes": True},
    "accumulated": {"micro_batches": 3, "set_to_none": False},
}
OPTIMIZERS: dict[str, Any] = {
    "sgd": torch.optim.SGD,
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, fused=True),
    "adagrad": torch.optim.Adagrad,
    "none": None,
}


def assert_predicted(report: Anatomy) -> None:
    predicted, measured = report.predicted, report.measured
    assert predicted is not None
    assert measured is not None
    names = ["peak", *(moment.name for moment in measured.moments)]
    for name in names:
        assert predicted.moment(name).by_category == measured.moment(name).by_category, name
    assert predicted.category_peaks() == measured.category_peaks()
    assert predicted.fates == measured.fates
    assert [p.nbytes for p in predicted.largest] == [p.nbytes for p in measured.largest]
    assert predicted.work == measured.work


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, "plain") for name in NAMES),
        *((name, "every second with recipes") for name in NAMES),
        ("gpt2", "autocast"),
        ("llama", "autocast"),
        ("bert", "accumulated"),
    ],
)
@pytest.mark.slow
def test_the_prediction_is_what_is_measured(name: str, options: str) -> None:
    model, batch = tiny(name)
    assert_predicted(memopt.anatomy(model, batch, measure=True, **OPTIONS[options]))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_blocks_of_ones_own(options: dict[str, Any]) -> None:
    model = Mlp(blocks=3, dropout=0.1)
    assert_predicted(memopt.anatomy(model, torch.randn(7, 32), measure=True, **options))


class WithLoss(nn.Module):
    """A layer and one of PyTorch's losses."""

    def __init__(self, name: str, reduction: str) -> None:
        super().__init__()
        self.linear, self.name, self.reduction = nn.Linear(16, 16), name, reduction

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = getattr(F, self.name)(self.linear(x).sigmoid(), y, reduction=self.reduction)
        return loss.mean() if self.reduction == "none" else loss


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    "name",
    [
        *("mse_loss", "smooth_l1_loss", "soft_margin_loss", "binary_cross_entropy"),
        *("l1_loss", "huber_loss", "binary_cross_entropy_with_logits"),
    ],
)
def test_a_scalar_that_keeps_the_losses_of_all_elements(name: str, reduction: str) -> None:
    batch = {"x": torch.randn(64, 16), "y": torch.rand(64, 16)}
    assert_predicted(memopt.anatomy(WithLoss(name, reduction), batch, measure=True))


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizers(optimizer: Any) -> None:
    model = Mlp(blocks=2)
    assert_predicted(memopt.anatomy(model, torch.randn(7, 32), measure=True, optimizer=optimizer))


@pytest.mark.slow
def test_long_sequences_ask_for_positions() -> None:
    """transformers looks whether positions are those of packed sequences."""
    model, batch = tiny("gpt2", rows=2, length=300)
    assert_predicted(memopt.anatomy(model, batch, measure=True))


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "length"), [(1, 7), (2, 65)])
@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_other_shapes(name: str, rows: int, length: int) -> None:
    model, batch = tiny(name, rows, length)
    assert_predicted(memopt.anatomy(model, batch, measure=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    model = Mlp(blocks=2).to(dtype)
    assert_predicted(memopt.anatomy(model, torch.randn(6, 32, dtype=dtype), measure=True))


def test_frozen_parameters_have_no_gradients_and_no_states() -> None:
    model = Mlp()
    for parameter in model.blocks[:-1].parameters():
        parameter.requires_grad_(False)
    report = memopt.anatomy(model, torch.randn(6, 32), measure=True)
    assert_predicted(report)
    trained = sum(4 * p.numel() for p in model.parameters() if p.requires_grad)
    assert report.trace.category_peaks()["gradients"] == trained
    states = report.trace.category_peaks()["optimizer states"]
    assert states == 2 * trained + 4 * len(list(model.blocks[-1].parameters()))


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["sqrt", "optimal"])
def test_segments_of_a_sequential(rule: Any) -> None:
    plain = memopt.anatomy(Mlp(), torch.randn(64, 32))
    report = memopt.anatomy(Mlp(), torch.randn(64, 32), measure=True, checkpoint=rule)
    assert_predicted(report)
    assert report.trace.fates["recomputed"] > 0
    assert report.peak.by_category["activations"] < plain.peak.by_category["activations"]


def test_an_optimizer_with_states_keeps_their_values() -> None:
    """The count of steps decides the bias correction, and is read."""
    model, batch = Mlp(blocks=2), torch.randn(6, 32)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(batch).backward()
        optimizer.step()
    before = [p.clone() for p in model.parameters()]
    assert_predicted(memopt.anatomy(model, batch, optimizer=optimizer, measure=True))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert all(int(state["step"]) == 2 for state in optimizer.state.values())


def test_nothing_changes() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
    batch = torch.randn(4, 8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    generator = torch.get_rng_state()
    memopt.anatomy(model, batch, loss=torch.sum, measure=True, recipes=True)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(generator, torch.get_rng_state())
    assert type(model[2]) is nn.Dropout


def test_tied_weights_and_views_count_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(50, 16)
            self.head = nn.Linear(16, 50, bias=False)
            self.head.weight = self.table.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            rows = self.table(ids)
            return self.head(rows.view(-1, 16)).logsumexp(-1).sum() + rows[::2].sum()

    report = memopt.anatomy(Tied(), torch.randint(0, 50, (4, 6)), measure=True)
    assert_predicted(report)
    assert report.peak.by_category["weights"] == 50 * 16 * 4


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
def test_weights_that_are_computed_before_each_forward() -> None:
    """By torch.nn.utils.weight_norm: the last one is an attribute, and PyTorch cannot copy it."""
    model = nn.Sequential(
        weight_norm(nn.Linear(16, 400)), nn.GELU(), weight_norm(nn.Linear(400, 16))
    )
    batch = torch.randn(4, 16)
    model(batch)
    held = model[0].weight
    assert_predicted(memopt.anatomy(model, batch, loss=torch.sum, measure=True))
    assert model[0].weight is held


@pytest.mark.slow
def test_a_model_on_meta_is_the_same() -> None:
    here = memopt.anatomy(*tiny("gpt2"), device="cpu")
    with torch.device("meta"):
        model, batch = tiny("gpt2")
    there = memopt.anatomy(model, batch, device="cpu")
    assert here.predicted is not None
    assert there.predicted is not None
    assert here.predicted.timeline == there.predicted.timeline


def test_cuda_has_masks_of_bools_and_rounds_up() -> None:
    model = Mlp(blocks=1, width=64, dropout=0.5)
    batch = torch.empty(64, 64, device="meta")
    on_cpu = memopt.anatomy(model.to("meta"), batch, device="cpu").moment_bytes("end of forward")
    on_cuda = memopt.anatomy(model, batch, device="cuda").moment_bytes("end of forward")
    masks = 64 * 256
    rounding = 512  # each of the norm's two statistics, of 256 bytes
    assert on_cpu["activations"] - on_cuda["activations"] == 4 * masks - masks - rounding


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"checkpoint": "all"}])
def test_cuda_chooses_flash_attention(options: dict[str, Any]) -> None:
    model, batch = tiny("llama")
    report = memopt.anatomy(model.to(torch.bfloat16), batch, device="cuda", **options)
    assert report.predicted is not None
    ops = {large.op for large in report.predicted.largest} | {
        share.path for share in report.predicted.by_op
    }
    if not options:
        assert any("flash_attention" in op and "for_cpu" not in op for op in ops)
    assert not any("for_cpu" in op for op in ops)


class LooksAtPositions(nn.Module):
    """As transformers asks whether a batch is of packed sequences. Its forward is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1]).expand(x.shape[0], -1).contiguous()
        if not (positions.diff() == 1).all():
            raise AssertionError("they are consecutive")
        return self.linear(x).mean()


def test_integers_that_follow_from_the_sizes_have_values() -> None:
    """Of 8,192 rows they are 4 MB."""
    report = memopt.anatomy(LooksAtPositions(), torch.randn(8192, 64))
    assert report.predicted is not None


class Cubes(nn.Module):
    """Its forward is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).pow(3).mean()


def test_cuda_autocast_runs_more_in_float32() -> None:
    """A power keeps its input: on the CPU in 16 bits, on CUDA as a copy in 32."""
    held = {
        device: memopt.anatomy(
            Cubes(), torch.randn(64, 64), device=device, autocast=torch.bfloat16
        ).moment_bytes("end of forward")["activations"]
        for device in ("cpu", "cuda")
    }
    assert held["cuda"] - held["cpu"] == 2 * 64 * 64


def test_cuda_keeps_probabilities_where_no_fused_attention_takes_the_arguments() -> None:
    """Fewer key heads than query heads in float32, and a mask that is learnt."""
    query = torch.randn(2, 4, 16, 8, requires_grad=True)
    for heads, mask in ((2, None), (4, nn.Parameter(torch.zeros(16, 16)))):
        key = torch.randn(2, heads, 16, 8)
        saved: list[tuple[int, ...]] = []
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda tensor, saved=saved: saved.append(tuple(tensor.shape)), lambda _: None
        )
        with AsOnCuda(), hooks:
            F.scaled_dot_product_attention(query, key, key, attn_mask=mask, enable_gqa=heads != 4)
        assert any(math.prod(shape) == 2 * 4 * 16 * 16 for shape in saved)


def offloading(model: nn.Module, **options: Any) -> Callable[[bool], dict[str, int]]:
    return lambda offload: memopt.anatomy(
        model, torch.randn(1024, 32), optimizer=None, offload="cpu" if offload else None, **options
    ).moment_bytes("end of forward")


def test_offloading_leaves_the_last_tensor_and_small_ones() -> None:
    model = Mlp()
    run = offloading(model)
    kept, away = run(False)["activations"], run(True)["activations"]
    small = 2 * 9 * 4 * 1024  # the norms' statistics
    last = 4 * 32 * 1024
    assert away == small + last < kept / 10


def test_offloading_the_inputs_of_regions() -> None:
    run = offloading(Mlp(), checkpoint="all")
    kept, away = run(False)["activations"], run(True)["activations"]
    one = 4 * 32 * 1024
    assert kept == 9 * one  # of 9 blocks; the first reads the batch, the square the last output
    assert away == one


@pytest.mark.slow
def test_bert_large_takes_little_memory() -> None:
    """And finds what is known: 335 million parameters; 16 bytes for each with AdamW."""
    pytest.importorskip("transformers")
    code = (
        "import memopt; from memopt.command.presets import preset; "
        "job = preset('bert-large', 4, 512); "
        "r = memopt.anatomy(job.model, job.batch); "
        # Not getrusage's: that of a new process begins at what the process that made it had held.
        "peak = [line.split()[1] for line in open('/proc/self/status') if 'VmHWM' in line]; "
        "print(peak[0], r.peak.total, r.parameters, "
        "r.formula['activations'] / r.moment_bytes('end of forward')['activations'])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    kilobytes, peak, parameters, ratio = map(float, out.split())
    assert kilobytes < 2e6
    assert parameters == 335_143_938
    assert 12 * parameters < peak < 14_949e6 - 1_343e6
    assert abs(ratio - 1) < 0.01


class Pictures(nn.Module):
    """Attention between convolutions, as in diffusion's U-Nets: what it returns has its channels
    last, and so has what follows, in forward and in backward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))
        self.norms = nn.ModuleList(nn.GroupNorm(2, 8) for _ in range(2))
        self.mix = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norms[0](self.before(x))
        mixed = self.mix(x.flatten(2).transpose(1, 2)).transpose(1, 2)
        x = self.norms[1](self.after(mixed.unflatten(2, x.shape[2:])))
        return x.contiguous().square().mean()


def test_pictures_with_channels_last() -> None:
    x = torch.randn(4, 8, 16, 16)
    assert_predicted(memopt.anatomy(Pictures(), x, measure=True))
    last = x.to(memory_format=torch.channels_last)
    assert_predicted(memopt.anatomy(Pictures(), last, measure=True))


def test_transposed_convolutions_over_volumes() -> None:
    """Without oneDNN, of one image, the result has the memory of a tensor like the input."""
    for rows in (1, 2):
        volumes = torch.randn(rows, 4, 6, 6, 6)
        model = nn.Sequential(
            nn.Conv3d(4, 8, 3, padding=1), nn.ConvTranspose3d(8, 2, 3, padding=1), nn.GELU()
        )
        assert_predicted(memopt.anatomy(model, volumes, loss=Tensor.sum, measure=True))


@pytest.mark.skipif(sys.platform != "linux", reason="other systems hand out what they do not have")
def test_tensors_larger_than_the_memory_of_this_machine() -> None:
    """Weights, activations and temporary buffers alike: nothing is reserved for them."""
    rows, width = 1 << 10, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 11
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(512, width, bias=False), nn.GELU())
        batch = torch.empty(rows, 512)
    found = memopt.anatomy(
        model, batch, loss=Tensor.sum, device="cpu", measure=False, optimizer=None
    )
    weights, activations = 4 * 512 * width, 4 * rows * width
    assert found.peak.by_category["weights"] == weights
    assert found.peak.by_category["activations"] >= activations
    assert activations > 1.9 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
