"""A training step of whole unmodified models of transformers: as they are, after
`memopt.convert(model)`, and with torch.utils.checkpoint around each block (transformers' own
gradient_checkpointing_enable).

A case is a model of two blocks with random weights, `rows` tokens in sequences of 128, `cols` the
hidden size, in PyTorch's fused attention, without dropout and without a cache: `convert_gpt2`
(heads of 64, an MLP of 4 cols) and `convert_llama` (half as many key heads, an MLP of 8/3 cols). A
step is forward, loss and backward; no optimizer. The variants have the same weights, each its own.

The goal is no time lost: a converted model's step is at most as long as eager's, beyond the spread
(a case misses it if three quarters of its rounds were slower). `saved_bytes` is what hooks around
the model are given; they do not see what a checkpointed region holds, `peak_bytes` does, and the
gradients that come during backward.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import memopt
from benchmarks import cli, runner
from benchmarks.harness import Case, Variant
from benchmarks.inputs import random_tokens
from benchmarks.op_linears import llama_width
from benchmarks.summary import describe, measured, table

BLOCKS, SEQUENCE, WORDS = 2, 128, 1024
GOALS = {"forward+backward": 1.0}
EAGER, CHECKPOINT = "eager", "torch.utils.checkpoint"


def gpt2(hidden: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=WORDS,
        n_positions=SEQUENCE,
        n_embd=hidden,
        n_layer=BLOCKS,
        n_head=max(1, hidden // 64),
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    model: nn.Module = GPT2LMHeadModel(config)
    return model


def llama(hidden: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=WORDS,
        max_position_embeddings=SEQUENCE,
        hidden_size=hidden,
        num_hidden_layers=BLOCKS,
        num_attention_heads=max(1, hidden // 64),
        num_key_value_heads=max(1, hidden // 128),
        intermediate_size=llama_width(hidden),
        use_cache=False,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model


MODELS = {"convert_gpt2": gpt2, "convert_llama": llama}


def as_it_is(model: nn.Module) -> None:
    """Eager."""


def checkpoint_blocks(model: Any) -> None:
    # Newer releases have it by another name and warn.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    EAGER: as_it_is,
    "memopt": memopt.convert,
    CHECKPOINT: checkpoint_blocks,
}


def build(
    name: str,
    direction: str,
    rows: int,
    cols: int,
    dtype: torch.dtype,
    device: str,
    peer_names: tuple[str, ...],
) -> list[Variant]:
    ids = random_tokens(rows, SEQUENCE, WORDS, device)

    def variant(variant_name: str) -> Variant:
        torch.manual_seed(0)
        model = MODELS[name](cols).to(device, dtype).train()
        CHANGES[variant_name](model)

        def forward() -> Tensor:
            loss: Tensor = model(input_ids=ids, labels=ids).loss
            return loss

        def run() -> None:
            forward().backward()
            model.zero_grad(set_to_none=True)

        constant = (*model.parameters(), *model.buffers())
        return Variant(variant_name, run, forward, constant)

    return [variant(variant_name) for variant_name in CHANGES]


def ideal_bytes(direction: str, rows: int, cols: int, dtype: torch.dtype) -> int:
    """Weights and their gradients of the matrices of the blocks (about 12 cols^2 each), once in
    each product. Far below what the products' arithmetic takes.
    """
    return 4 * BLOCKS * 12 * cols**2 * dtype.itemsize


def make_cases(args: argparse.Namespace) -> Iterator[Case]:
    args.direction = ("forward+backward",)
    if importlib.util.find_spec("transformers") is None:
        print("convert: transformers is not installed, nothing is measured", flush=True)
        return
    for name in MODELS:
        yield from runner.all_cases(name, functools.partial(build, name), ideal_bytes, args)


def report(run: Mapping[str, Any]) -> str:
    """The run as Markdown: a row for each case."""
    head = ["model", "hidden", "dtype", "threads", "eager, ms", "convert", CHECKPOINT]
    head += ["saved: eager, MB", "convert", "peak: eager, MB", "convert", CHECKPOINT]
    cases = measured(dict(run))
    rows = []
    for case in cases:
        found = case["variants"]
        eager = found[EAGER]
        row = [case["op"].removeprefix("convert_"), str(case["cols"]), case["dtype"]]
        row += [str(case["threads"]), f"{eager['us']['median'] / 1e3:.1f}"]
        row += [_spread(found[name]["ratio"]) for name in ("memopt", CHECKPOINT)]
        row += [f"{eager['saved_bytes'] / 1e6:.1f}", _share(found["memopt"], eager, "saved_bytes")]
        row += [f"{eager['peak_bytes'] / 1e6:.1f}"]
        row += [_share(found[name], eager, "peak_bytes") for name in ("memopt", CHECKPOINT)]
        rows.append(row)
    text = "Speed over eager in the same round, median and quartiles; bytes as a share of eager's."
    return "\n\n".join([describe(dict(run)), text, verdict(cases), table(head, rows)])


def verdict(cases: Sequence[Mapping[str, Any]]) -> str:
    slower = [case for case in cases if case["variants"]["memopt"]["ratio"]["q3"] < 1.0]
    return (
        f"convert is slower than eager beyond the spread in {len(slower)} of {len(cases)} cases: "
        f"goal {'missed' if slower else 'reached'}."
    )


def _spread(ratio: Mapping[str, float]) -> str:
    return f"{ratio['median']:.2f}x ({ratio['q1']:.2f}-{ratio['q3']:.2f})"


def _share(variant: Mapping[str, Any], eager: Mapping[str, Any], key: str) -> str:
    return f"{variant[key] / eager[key]:.2f}x"


def main(argv: Sequence[str] | None = None) -> int:
    status = runner.main("convert", make_cases, GOALS, argv)
    out = cli.parse("convert", argv).out
    if status != 2 and out.exists():
        print(f"\n{report(json.loads(out.read_text()))}\n\n{out}", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
