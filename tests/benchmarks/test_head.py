"""Proves what the benchmark of a language model's head promises, without timing anything: every way
computes the same loss and gradients, regions hold nothing of the head while it waits, chunks have a
chunk's logits at a time, memopt's chunks take a fifth of eager's bytes, and the file names all.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch

from benchmarks import head as benchmark
from benchmarks.harness import Effort
from benchmarks.head import CHUNKS, EAGER, Head, exact_gradient, made, ways_on

CPU = torch.device("cpu")
TOKENS, WIDTH, WORDS = 64, 16, 128


def inputs() -> tuple[Head, torch.Tensor, torch.Tensor]:
    return Head(WIDTH, WORDS), torch.randn(TOKENS, WIDTH), torch.randint(WORDS, (TOKENS,))


@pytest.mark.parametrize("way", ways_on(CPU, compiles=False))
def test_every_way_has_the_same_loss_and_gradients(way: str) -> None:
    head, x, target = inputs()
    found = []
    for name in (EAGER, way):
        mine, given = copy.deepcopy(head), x.clone().requires_grad_()
        loss = ways_on(CPU, compiles=False)[name](mine)(given, target)
        loss.backward()
        found.append([loss.detach(), given.grad, *(p.grad for p in mine.parameters())])
    for plain, other in zip(*found, strict=True):
        torch.testing.assert_close(other, plain)


def test_chunks_need_the_logits_of_one_chunk() -> None:
    head, x, target = inputs()
    ways = ways_on(CPU, compiles=False)
    exact = exact_gradient(head, x, target)
    eager, region, chunks = (
        made(ways[name], head, x, target, exact)
        for name in (EAGER, "memopt.checkpoint", f"memopt.checkpoint, {CHUNKS} chunks")
    )
    logits = TOKENS * WORDS * 4
    assert eager.held > logits
    assert region.held < logits / CHUNKS
    assert region.peak > logits
    assert chunks.held < logits / CHUNKS
    assert chunks.peak < logits
    assert max(eager.error, region.error, chunks.error) < 1e-6


def test_memopts_chunks_take_a_fifth_of_eagers_bytes() -> None:
    """Beyond the gradients, of which each has the same."""
    torch.manual_seed(0)
    tokens, width, words = 2048, 16, 4096
    head, x = Head(width, words), torch.randn(tokens, width)
    target = torch.randint(words, (tokens,))
    ways = ways_on(CPU, compiles=False)
    exact = exact_gradient(head, x, target)
    eager, chunks = (
        made(ways[name], head, x, target, exact) for name in (EAGER, "memopt, chunked")
    )
    gradients = 4 * (words * width + tokens * width)
    assert (chunks.peak - gradients) * 5 < eager.peak - gradients
    assert chunks.error <= 1.01 * eager.error


@pytest.mark.slow
def test_the_file_names_every_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    barely = Effort(rounds=3, min_rounds=3, sample_seconds=1e-6)
    monkeypatch.setattr("benchmarks.harness.QUICK", barely)
    out = tmp_path / "head.json"
    assert benchmark.main(["--quick", "--out", str(out)]) == 0
    (case,) = json.loads(out.read_text())["cases"].values()
    assert set(case["variants"]) == set(ways_on(CPU, compiles=False))
    assert all(way["error"] < 1e-5 for way in case["variants"].values())
    assert "# The head" in capsys.readouterr().out
