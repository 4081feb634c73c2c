"""Proves what the benchmark of offloading promises, without timing anything: every way gives the
bits of the plain step, its bytes are counted, and what the file and the tables say of the formulas
and goals. How it runs on a device: tests/accelerator/inside/test_benchmark.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu, offload
from benchmarks.harness import Effort
from benchmarks.offload_peak import peak_in_a_process
from benchmarks.offload_ways import (
    BASELINE,
    CHECKPOINTED,
    STACKS,
    WHOLE,
    Size,
    Stack,
    Transfers,
    offload_name,
    ways,
)

CPU = torch.device("cpu")
SIZE = Size(width=64, sequence=64, batch=8, blocks=2, dtype="float32")


@pytest.mark.slow
def test_the_file_has_every_stack_and_way(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    restore_num_threads: None,
) -> None:
    """One of the peaks is measured in a process, which takes seconds."""
    measured: list[int | None] = []

    def peak(*asked: Any) -> int | None:
        if not measured:
            measured.append(peak_in_a_process(*asked))
        return measured[0]

    monkeypatch.setattr(offload, "peak_in_a_process", peak)
    barely = Effort(rounds=3, min_rounds=3, sample_seconds=1e-6)
    monkeypatch.setattr(offload, "QUICK", barely)
    monkeypatch.setattr(offload, "QUICK_SIZES", (SIZE,))
    out = tmp_path / "offload.json"
    argv = ["--quick", "--directory", str(tmp_path), "--out", str(out)]
    assert offload.main(argv) == 0
    run = json.loads(out.read_text())
    assert run["commands"] == [f"python -m benchmarks.offload {' '.join(argv)}"]
    assert [case["stack"] for case in run["cases"].values()] == list(STACKS)
    for case in run["cases"].values():
        assert case["failed"] == {}
        for found in case["variants"].values():
            assert found["same_bits"]
            assert len(found["samples_seconds"]) == case["rounds"] == 3
            assert found["peak_bytes"] > 0
        plain = case["variants"].pop(BASELINE)
        assert plain["over_baseline"] == {"median": 1.0, "q1": 1.0, "q3": 1.0}
        assert plain["bytes_out"] == 0
        for found in case["variants"].values():
            assert found["bytes_out"] >= found["bytes_back"] > 0
            if case["stack"] == CHECKPOINTED:
                assert found["bytes_out"] == SIZE.blocks * SIZE.input_bytes
    printed = capsys.readouterr().out
    assert all(f"**{key}**" in printed for key in run["cases"])
    assert [path.name for path in tmp_path.iterdir()] == ["offload.json"]  # no file is left


@pytest.mark.parametrize("stack", STACKS)
def test_every_way_gives_the_bits_of_the_plain_step(stack: str, tmp_path: Path) -> None:
    blocks = Stack(SIZE, CPU)
    found = ways(stack, CPU, tmp_path, 0.5, list(blocks.blocks.parameters()))
    assert found[0].name == BASELINE
    expected = blocks.results_of(blocks.step_of(found[0]))
    for way in found:
        results = blocks.results_of(blocks.step_of(way))
        assert all(torch.equal(a, e) for a, e in zip(results, expected, strict=True)), way.name
    assert expected[1].abs().sum() > 0
    assert list(tmp_path.iterdir()) == []


def test_hooks_write_what_is_saved_but_for_parameters(tmp_path: Path) -> None:
    blocks = Stack(SIZE, CPU)
    found = ways(CHECKPOINTED, CPU, tmp_path, 1.0, list(blocks.blocks.parameters()))
    for way in found:
        if way.files is not None:
            blocks.step_of(way)()
            assert way.files.out == way.files.back == SIZE.blocks * SIZE.input_bytes


def test_copies_between_devices_are_counted() -> None:
    there = torch.ones(4, device="meta")
    with Transfers() as seen:
        torch.ones(3).to("meta")
        there.copy_(torch.ones(4))
        torch.ones(5).to(torch.float64)
    assert (seen.back, seen.out) == ((3 + 4) * 4, 0)


def test_a_process_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)no such way: exit status 1: .*ValueError"):
        peak_in_a_process(SIZE, WHOLE, "no such way", 1.0, tmp_path, threads=1)


def test_the_formulas() -> None:
    size = Size(width=64, sequence=64, batch=8, blocks=10, dtype="float32")
    found = {"input_bytes": 10, "block_saved_bytes": 100, "largest_saved_bytes": 30}
    peak = lambda stack, fraction: offload.formula(stack, size, found, 200, fraction)  # noqa: E731
    assert peak(CHECKPOINTED, 0.0) == 200 + 9 * 10
    assert peak(CHECKPOINTED, 1.0) == 200 + (offload.COPIES_IN_FLIGHT + 1) * 10
    assert peak(WHOLE, 0.0) == 200 + 9 * 100
    assert peak(WHOLE, 1.0) == 200 - 100 + (offload.COPIES_IN_FLIGHT + 1) * 30
    assert peak(WHOLE, 0.4) == 200 + 9 * 60 - 40 + (offload.COPIES_IN_FLIGHT + 1) * 30


def test_the_operations_of_a_block() -> None:
    size = Size(width=8, sequence=6, batch=2, blocks=1, dtype="bfloat16")
    products = 2 * 12 * (8 * 24 + 8 * 8 + 8 * 32 + 32 * 8)  # 12 tokens
    pairs = 2 * 2 * 2 * 6 * 6 * 8 // 2  # query by key, and by value; half of them
    assert size.forward_operations == products + pairs
    assert size.input_bytes == 2 * 6 * 8 * 2


def a_case(stack: str, over: float, error: float, hides: bool) -> dict[str, Any]:
    common = {
        "seconds": {"median": 0.1, "q1": 0.1, "q3": 0.1},
        "over_baseline": {"median": over, "q1": over, "q3": over},
        "peak_bytes": 5_000_000,
        "formula_bytes": 5_000_000,
        "formula_error": error,
        "bytes_out": 1_000_000,
        "bytes_back": 1_000_000,
        "same_bits": True,
    }
    arithmetic = {
        "operations_per_second": 5e14,
        "link_bytes_per_second": {"out": 5e10, "back": 5e10},
        "left": 53248.0,
        "right": 10000.0,
        "hides_inputs": hides,
        "fraction_of_whole": 0.36,
    }
    stalls = {"out_stall_seconds": 0.001, "back_stall_seconds": 0.002}
    rates = {"out_bytes_per_second": 50 * 10**9, "back_bytes_per_second": 40 * 10**9}
    variants = {BASELINE: common, offload_name(0.36): {**common, **stalls, **rates}}
    key = {"stack": stack, "device": "cuda", "arithmetic": arithmetic}
    return {**key, "variants": variants, "failed": {"torch save_on_cpu": "RuntimeError: no"}}


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (a_case(CHECKPOINTED, 1.004, 0.049, True), ["+0.4%, goal +0.5% reached", "5% reached"]),
        (a_case(CHECKPOINTED, 1.006, -0.051, True), ["+0.6%, goal +0.5% missed", "5% missed"]),
        (a_case(CHECKPOINTED, 1.3, 0.0, False), ["link cannot hide the inputs", "goal 5% reached"]),
        (a_case(WHOLE, 1.004, 0.3, False), ["hides 36% of what is saved", "goal +0.5% reached"]),
    ],
)
def test_the_verdict_names_what_was_measured_and_the_goals(
    case: dict[str, Any], expected: list[str]
) -> None:
    text = offload.verdict(case)
    assert all(words in text for words in expected), text
    if not case["arithmetic"]["hides_inputs"] and case["stack"] == CHECKPOINTED:
        assert "time:" not in text  # no goal where the link cannot hide it


def test_the_gpu_run_has_it_in_its_summary(tmp_path: Path) -> None:
    (step,) = [step for step in gpu.steps(tmp_path, tmp_path) if step.name == "offload"]
    assert offload.parse(step.command[2:]).out == tmp_path / "cuda_offload.json"
    assert 60 * offload.parse(step.command[2:]).minutes < step.seconds
    run = {
        "op": offload.OP,
        "date": "2026-01-01T00:00:00",
        "machine": {"gpu": {"name": "a GPU", "driver": "1"}},
        "versions": {"torch": "2"},
        "copy_gb_per_s": {},
        "cases": {"a": a_case(CHECKPOINTED, 1.0, 0.0, True), "b": {"error": "OutOfMemoryError: x"}},
    }
    (tmp_path / "cuda_offload.json").write_text(json.dumps(run))
    text = gpu.write_summary(tmp_path, [], "Done.")
    assert "50 40" in text
    assert "3 ms" in text
    assert "b: not measured: OutOfMemoryError: x" in text
    assert "failed: RuntimeError: no" in text


def test_refuses_cuda_where_there_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is")
    assert offload.main(["--device", "cuda"]) == 2
    assert "sees no CUDA device" in capsys.readouterr().err
