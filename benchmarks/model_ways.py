"""Models of transformers, and ways to train them, which benchmarks/models.py measures."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memopt
from benchmarks.compile import begin_compiling, own_backend
from benchmarks.convert_models.sizes import Sizes
from benchmarks.memory import step_bytes
from memopt._checkpoint.blocks import find_blocks

TIMES = {"cpu": 2, "cuda": 8}
"""A batch is so many times two sequences."""
DROPOUT = {
    "GPT-2": ("attn_pdrop", "embd_pdrop", "resid_pdrop"),
    "BERT": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    "T5": ("dropout_rate",),
    "ViT": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
}
"""The names of the config's probabilities."""
EAGER = "eager"
SHARE = 0.5
"""The share of eager's peak that a plan may take."""


Made = tuple[nn.Module, dict[str, Tensor]]
"""A model and its batch."""
Change = Callable[[nn.Module, dict[str, Tensor]], Any]
"""Changes a model, to train in some way; returns what is called in its place, or None."""


@dataclasses.dataclass(frozen=True)
class Way:
    """A step as it is run, and its bytes."""

    run: Callable[[], None]
    held: int
    peak: int
    row: float | None
    """Bytes that another row adds to the peak; None of a compiled step, which another size would
    compile anew."""
    token: float | None
    """Bytes that another token of every row adds; None too where inputs are no tokens."""


def measured(model: nn.Module, batch: Mapping[str, Tensor], call: Any = None) -> Way:
    """The way of a model that is changed already; `call` is its compiled form."""
    is_compiled, call = call is not None, model if call is None else call
    device = next(model.parameters()).device

    def run(inputs: Mapping[str, Tensor] = batch) -> None:
        model.zero_grad(set_to_none=True)
        call(**inputs).loss.backward()

    def bytes_of(inputs: Mapping[str, Tensor]) -> tuple[int, int]:
        run(inputs)
        model.zero_grad(set_to_none=True)
        return step_bytes(lambda: call(**inputs).loss, device)

    rows = len(next(iter(batch.values())))
    held, peak = bytes_of(batch)
    row = token = None
    if not is_compiled:
        half = {name: tensor[: rows // 2].contiguous() for name, tensor in batch.items()}
        row = (peak - bytes_of(half)[1]) / (rows // 2)
    if not is_compiled and "input_ids" in batch:
        tokens = batch["input_ids"].shape[1]
        shorter = {name: tensor[:, : tokens // 2].contiguous() for name, tensor in batch.items()}
        token = (peak - bytes_of(shorter)[1]) / (tokens // 2)
    run()
    return Way(run, held, peak, row, token)


def every_block(model: nn.Module, wrap: Callable[[nn.Module], object]) -> None:
    for block in find_blocks(model):
        wrap(block)


def torch_checkpoint(block: nn.Module) -> None:
    forward = block.forward
    block.forward = lambda *args, **kwargs: checkpoint(  # type: ignore[method-assign]
        forward, *args, use_reentrant=False, **kwargs
    )


def planned(model: nn.Module, batch: Mapping[str, Tensor], share: float = SHARE) -> None:
    """A plan for a share of eager's peak, beside the weights."""
    weights = sum(p.nbytes for p in model.parameters())
    sgd = {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.0)}
    everything = memopt.plan(model, dict(batch), 1 << 50, **sgd)
    budget = weights + share * (everything.plain_peak - weights)
    try:
        memopt.plan(model, dict(batch), int(budget), **sgd).apply()
    except memopt.BudgetTooSmall as error:
        print(f"plan: {error}", flush=True)
        every_block(model, memopt.checkpoint_wrapper)


def both(model: nn.Module, batch: Mapping[str, Tensor], offload: str | None = None) -> None:
    """Recipes, and each block a region, whose inputs wait where `offload` says."""
    memopt.convert(model)
    every_block(model, functools.partial(memopt.checkpoint_wrapper, offload=offload))


def torch_within(share: float) -> Change:
    """torch.compile with a share of what it would save, which it reads when it compiles."""

    def change(model: nn.Module, batch: Mapping[str, Tensor]) -> Callable[..., Any]:
        compiled = torch.compile(model, backend=own_backend())

        def call(**inputs: Tensor) -> Any:
            with torch._functorch.config.patch(activation_memory_budget=share):
                return compiled(**inputs)

        return call

    return change


def memopt_within(share: float) -> Change:
    """memopt.compile with the peak of torch.compile's step as its budget."""

    def change(model: nn.Module, batch: Mapping[str, Tensor]) -> Callable[..., Any]:
        peak = measured(model, batch, torch_within(share)(model, dict(batch))).peak
        compiled: Callable[..., Any] = memopt.compile(model, budget=peak)
        return compiled

    return change


SHARES = (0.7, 0.5, 0.3, 0.0)
"""Values of torch.compile's `activation_memory_budget`."""
COMPILED_WAYS: dict[str, Change] = {
    "torch.compile": torch_within(1.0),
    **{f"torch.compile, budget {share}": torch_within(share) for share in SHARES},
    "memopt.compile": lambda model, batch: memopt.compile(model),
    "memopt.compile, peak of torch's": memopt_within(1.0),
    **{f"memopt.compile, peak of {share}": memopt_within(share) for share in SHARES},
}


def ways_of(make: Callable[[], Made], compiles: bool, hides: bool) -> dict[str, Way]:
    """The ways, by name; `hides`: with one whose regions' inputs wait in the host's memory."""
    ways: dict[str, Way] = {}

    def add(name: str, change: Change) -> None:
        begin = time.monotonic()
        model, batch = make()
        ways[name] = measured(model, batch, change(model, batch))
        print(f"  {name}: made in {time.monotonic() - begin:.0f} s", flush=True)

    add(EAGER, lambda model, batch: None)
    add("torch.utils.checkpoint", lambda model, batch: every_block(model, torch_checkpoint))
    if find_spec("fairscale") is not None:
        fairscale = import_module("fairscale.nn.checkpoint").checkpoint_wrapper
        add("FairScale", lambda model, batch: every_block(model, fairscale))
    add("memopt.convert", lambda model, batch: memopt.convert(model) and None)
    add(
        "memopt.checkpoint_wrapper",
        lambda model, batch: every_block(model, memopt.checkpoint_wrapper),
    )
    add("convert and regions", both)
    if hides:
        add("convert and regions, offloaded", functools.partial(both, offload="cpu"))
    add("memopt.plan, half", planned)
    begin_compiling()
    for name, change in COMPILED_WAYS.items() if compiles else ():
        try:
            add(name, change)
        except torch._dynamo.exc.BackendCompilerFailed as error:  # a budget that is not kept
            print(f"  {name}: {error}", flush=True)
    return ways


def maker(
    name: str, sizes: Sizes, dropout: float, device: torch.device, times: int | None = None
) -> Callable[[], Made]:
    """Makes the family's model and `times` two sequences; default: as many as TIMES says."""
    from benchmarks.convert_models.model_terms import MODEL_TERMS  # needs transformers
    from benchmarks.convert_models.models import MODELS

    terms = MODEL_TERMS[name]
    on_cuda = device.type == "cuda"
    dtype = torch.bfloat16 if on_cuda else torch.float32
    times = times or TIMES[device.type]

    def repeated(tensor: Tensor) -> Tensor:
        tensor = torch.cat([tensor] * times).to(device)
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    def make() -> Made:
        changes = {**terms.changes(sizes), **dict.fromkeys(DROPOUT.get(name, ()), dropout)}
        model = MODELS[name].make(**changes).to(device, dtype).train()
        inputs = MODELS[name].inputs(**terms.inputs(sizes))
        return model, {key: repeated(tensor) for key, tensor in inputs.items()}

    return make
