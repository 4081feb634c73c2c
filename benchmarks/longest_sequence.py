"""The longest sequence of a model in the shape of Llama-3-8B that trains on one device, by what is
done about its memory. Nothing runs: steps are predicted on tensors without values.

One sequence a step, weights in bfloat16, AdamW (fused); LoRA is PEFT's, of rank 16 on every linear
of the layers, its weights in bfloat16 too. The ways:

- **eager**: transformers' model as it is;
- **checkpointing**: `model.gradient_checkpointing_enable()`;
- **loss in chunks**: with it, the head in chunks of rows with its loss;
- **offloading**: each layer a region whose inputs wait in host memory, and the head in chunks;
- **planned**: what `Plan.longest_sequence` says: each layer a region with recipes, its largest
  parts regions inside it and its MLP in chunks, and the head in chunks;
- **planned, offloading**: the same with `offload="cpu"`.

A device has its size less 1 GiB, for the CUDA context and libraries' workspaces. Lengths are
multiples of 1,024 tokens: the longest whose step fits.

Layers are alike, so each adds the same bytes to what is held, to gradients, weights and states. A
step is predicted with three and with four layers, stage by stage; the stages of the layers between
follow, and with them the peak of all instants. With offloading, the inputs of regions are not held,
and on the slowest link as many copies as the engine allows wait to leave and are back early.

`python -m benchmarks.longest_sequence [--jobs N] [--out FILE.json]` writes the JSON and the figure,
with so many processes.
`tests/benchmarks/test_longest_sequence.py` holds each way's arithmetic to a step that runs, of a
small model of the same shape.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import nn

from benchmarks import record
from benchmarks.cli import RESULTS
from benchmarks.summary import table
from memopt._plan.bytes import StageBytes, StepBytes, step_bytes
from memopt._plan.least import least_choices
from memopt._plan.live import Live
from memopt._plan.watch import Watch
from memopt.applied import assign
from memopt.assignment import Assignment, Choice, Paths
from memopt.memory.asked import asked_step
from memopt.memory.predicted.predict import hollow_step
from memopt.memory.search import search
from memopt.memory.step import Step
from memopt.memory.totals import Position, position_of
from memopt.place import copies_in_flight
from memopt.show.figure import write_figure

OP = "longest_sequence"
TOKENS = 1024
"""Lengths are multiples of this."""
RESERVE = 1 << 30
DEVICES = {"24 GB": 24 * 10**9, "80 GB": 80 * 10**9, "141 GB": 141 * 10**9}
TRAININGS = ("LoRA", "full")
EAGER, CHECKPOINTED, CHUNKED = "eager", "checkpointing", "loss in chunks"
OFFLOADED, PLANNED, PLANNED_AWAY = "offloading", "planned", "planned, offloading"
WAYS = (EAGER, CHECKPOINTED, CHUNKED, OFFLOADED, PLANNED, PLANNED_AWAY)
AWAY = (OFFLOADED, PLANNED_AWAY)
PLANS = (PLANNED, PLANNED_AWAY)
REGIONS = (OFFLOADED, *PLANS)
COLORS = ("#8ab6d6", "#3b7dd8", "#1d3f72")
FEW = (3, 4)
"""Layers of the models that are predicted."""
_MOST = 1 << 12
"""Times 1,024 tokens. Predictions know the values of positions up to some 8 million."""


@dataclass(frozen=True)
class Shape:
    """The shape of a Llama, and how it is trained."""

    training: str = "LoRA"
    hidden: int = 4096
    inner: int = 14336
    layers: int = 32
    heads: int = 32
    key_heads: int = 8
    words: int = 128256
    dtype: torch.dtype = torch.bfloat16
    device: str = "meta"
    target: str = "cuda"
    with_optimizer: bool = True


def model_of(shape: Shape, layers: int) -> nn.Module:
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads,
        vocab_size=shape.words,
        max_position_embeddings=1 << 30,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    with torch.device(shape.device):
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=shape.dtype)
    if shape.training == "LoRA":
        import peft

        lora = peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, lora, autocast_adapter_dtype=False)
    return model.train()  # type: ignore[no-any-return]


def step_of(shape: Shape, layers: int, length: int) -> Step:
    ids = torch.zeros(1, length, dtype=torch.long, device=shape.device)
    optimizer: Any = partial(torch.optim.AdamW, fused=True) if shape.with_optimizer else None
    batch = {"input_ids": ids, "labels": ids}
    return asked_step(OP, model_of(shape, layers), batch, optimizer, None, None, 1)


def layer_paths(model: nn.Module) -> tuple[str, ...]:
    import transformers

    kind = transformers.models.llama.modeling_llama.LlamaDecoderLayer
    return tuple(path for path, module in model.named_modules() if isinstance(module, kind))


def head_of(model: nn.Module) -> str:
    return next(path for path, _ in model.named_modules() if path.endswith("lm_head"))


def planned_choices(shape: Shape) -> tuple[Choice, Choice]:
    """The choices of the plan that needs least: those of the first layer, whose input may have no
    gradient, and those of the others.
    """
    step = step_of(shape, FEW[0], TOKENS)
    blocks = layer_paths(step.model)
    live = Live(step, blocks, shape.target, steps=0, runs=shape.device != "meta")
    first, *others = (least_choices(live)[path,] for path in blocks)
    (other,) = set(others)
    return first, other


@dataclass(frozen=True)
class Way:
    """A way to run steps of a shape."""

    name: str
    shape: Shape
    regions: tuple[Choice, Choice] = (Choice(checkpoint=True),) * 2
    """The choices of the first layer and of the others, in the ways whose layers are regions."""

    def put_on(self, model: Any) -> None:
        """Change a model so, but for offloading."""
        if self.name in (CHECKPOINTED, CHUNKED):
            options = {"use_reentrant": False}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        choices: dict[Paths, Choice] = {}
        if self.name not in (EAGER, CHECKPOINTED):
            choices[head_of(model),] = Choice(head=True)
        if self.name in REGIONS:
            first, *others = layer_paths(model)
            choices |= {(first,): self.regions[0], **{(path,): self.regions[1] for path in others}}
        assign(model, Assignment(choices))

    def predicted(self, layers: int, length: int) -> StepBytes:
        """The bytes of a step with so many layers, that offloads nothing."""
        step = step_of(self.shape, layers, length)
        watches: list[Watch[Position]] = []

        def watch(copy: nn.Module, ledger: Any) -> Watch[Position]:
            watches.append(Watch(copy, layer_paths(step.model), lambda: position_of(ledger)))
            return watches[0]

        ledger = hollow_step(step, self.put_on, self.shape.target, watch).ledger
        start = watches[0].start
        assert start is not None
        return step_bytes(ledger, start, watches[0].calls)

    def peak(self, length: int) -> int:
        """The peak of a step with all layers."""
        less, more = (self.predicted(layers, length) for layers in FEW)
        found = deeper(less, more, self.shape.layers)
        return offloading(found) if self.name in AWAY else found.peak


def deeper(less: StepBytes, more: StepBytes, layers: int) -> StepBytes:
    """The step with so many layers, of those of one with n layers and one with n + 1, n >= 3.

    The stages are those of `more`, with its second layer's again and again. A layer adds to what is
    there before the step, to what the optimizer's step takes, and to the gradients that are there
    when backward comes to the stages before it.
    """
    extra = layers - (len(more.stages) - 2)
    second, third = more.stages[2], more.stages[3]
    of_layer = second.gradients - third.gradients

    def with_more(stage: StageBytes, count: int) -> StageBytes:
        return replace(stage, gradients=stage.gradients + count * of_layer)

    stages = (
        *(with_more(stage, extra) for stage in more.stages[:2]),
        *(with_more(second, count) for count in range(extra, -1, -1)),
        *more.stages[3:],
    )
    base = more.base + extra * (more.base - less.base)
    optimizer = more.optimizer + extra * (more.optimizer - less.optimizer)
    above = above_of(stages)
    return StepBytes(base, above, optimizer, stages, base + max(above, optimizer), more.in_order)


def above_of(stages: Sequence[StageBytes]) -> int:
    """The most of forward and backward, above what is there before."""
    held = most = 0
    for stage in stages:
        most = max(most, held + stage.forward, held + stage.gradients + stage.backward)
        held += stage.resident
    return most


def offloading(step: StepBytes) -> int:
    """The peak where what layers keep waits elsewhere: copies that leave late, and copies that are
    back early, are as many as the engine has under way.
    """
    layers = [replace(s, resident=s.resident - s.away(1.0)) for s in step.stages[1:-1]]
    above = above_of((step.stages[0], *layers, step.stages[-1]))
    largest = max((nbytes for s in step.stages[1:-1] for nbytes in s.may_leave), default=0)
    under_way = 2 * copies_in_flight(OP, "cpu") * largest
    return step.base + max(above + under_way, step.optimizer)


def way_of(shape: Shape, name: str) -> Way:
    return Way(name, shape, planned_choices(shape)) if name in PLANS else Way(name, shape)


def cases_of(training: str, name: str) -> list[dict[str, Any]]:
    """A way's row of the table."""
    way = way_of(Shape(training), name)
    peak = remembered(way.peak)
    found = []
    for device, memory in DEVICES.items():
        budget = memory - RESERVE
        most = search(peak, budget, (1, 2), _MOST) if peak(1) <= budget else 0
        found.append(
            {
                "training": training,
                "way": name,
                "device": device,
                "tokens": most * TOKENS,
                "peak_bytes": peak(most) if most else None,
                "next_peak_bytes": peak(most + 1),
                "regions": list(map(str, way.regions)) if name in REGIONS else [],
            }
        )
    return found


def remembered(peak: Callable[[int], int]) -> Callable[[int], int]:
    """The peak of so many times 1,024 tokens, each asked once."""
    known: dict[int, int] = {}

    def at(times: int) -> int:
        if times not in known:
            known[times] = peak(times * TOKENS)
        return known[times]

    return at


def tokens_of(run: Mapping[str, Any]) -> dict[str, dict[tuple[str, str], int]]:
    """The tokens by way and device, of each training that the run has whole."""
    cases = run["cases"].values()
    found = {
        training: {(c["way"], c["device"]): c["tokens"] for c in cases if c["training"] == training}
        for training in TRAININGS
    }
    whole = len(WAYS) * len(DEVICES)
    return {training: tokens for training, tokens in found.items() if len(tokens) == whole}


def tables(run: Mapping[str, Any]) -> str:
    """A row for each training and way, with the tokens on each device."""
    rows = [
        [training, way, *(f"{tokens[way, device]:,}" for device in DEVICES)]
        for training, tokens in tokens_of(run).items()
        for way in WAYS
    ]
    return table(["training", "way", *DEVICES], rows)


def draw(run: Mapping[str, Any], out: Path) -> None:
    """A panel for each training, a group of bars for each way, a bar for each device."""
    found = tokens_of(run)

    def panels(figure: Any) -> None:
        grid = figure.subplots(1, len(found), sharey=True, squeeze=False)[0]
        for axes, (training, of_training) in zip(grid, found.items(), strict=True):
            for number, (device, color) in enumerate(zip(DEVICES, COLORS, strict=True)):
                places = [place + 0.27 * (number - 1) for place in range(len(WAYS))]
                tokens = [of_training[way, device] / TOKENS for way in WAYS]
                axes.barh(places, tokens, 0.25, color=color, label=device)
                for place, count in zip(places, tokens, strict=True):
                    axes.text(max(count, 0.8), place, f" {count:,.0f}", va="center", fontsize=7)
            axes.set_yticks(range(len(WAYS)), WAYS)
            axes.set_xscale("log")
            axes.set_xlim(0.8, 2.5 * max(of_training.values()) / TOKENS)
            axes.set_xlabel("longest sequence, thousands of tokens (1,024)")
            axes.set_title(f"Llama-3-8B, {training}")
        axes.invert_yaxis()
        axes.legend(frameon=False, loc="upper right")

    write_figure(out, (5 * len(found), 4), panels)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{OP}")
    parser.add_argument("--out", type=Path, default=RESULTS / f"cpu_{OP}.json")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    args = parser.parse_args(argv)
    settings = {"shape": "Llama-3-8B", "optimizer": "AdamW fused", "reserve_bytes": RESERVE}
    run = record.begin(args.out, OP, {}, settings, argv)
    rows = list(itertools.product(TRAININGS, WAYS))
    with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
        for found in pool.map(cases_of, *zip(*rows, strict=True)):
            for case in found:
                key = f"{case['training']}/{case['way']}/{case['device']}"
                run.add(key, case)
                print(key, f"{case['tokens']:,}", flush=True)
    figure = args.out.with_suffix(".png")
    draw(run.run, figure)
    print(f"{tables(run.run)}\n{args.out}\n{figure}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
