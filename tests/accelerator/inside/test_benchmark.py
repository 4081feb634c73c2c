"""The benchmark of offloading on a device: every way runs, with the same bits, and frees memory;
and the peak of checkpointed blocks is the formula's.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

import memopt
from benchmarks import offload
from benchmarks.harness import Effort
from benchmarks.offload_peak import peak_on_accelerator
from benchmarks.offload_ways import BASELINE, CHECKPOINTED, STACKS, Size, Stack, Way, ways
from tests.accelerator import sim

SIM = torch.device("sim")
BARELY = Effort(rounds=2, min_rounds=2, sample_seconds=1e-6)
SIZE = Size(width=64, sequence=64, batch=4, blocks=7, dtype="float32")


@pytest.mark.parametrize("stack", STACKS)
def test_every_way_on_a_device(stack: str, tmp_path: Path, restore_num_threads: None) -> None:
    case = offload.measure(stack, SIZE, SIM, BARELY, tmp_path, threads=1)
    assert case["failed"] == {}
    assert all(found["same_bits"] for found in case["variants"].values())
    plain = case["variants"].pop(BASELINE)
    assert plain["bytes_out"] == plain["bytes_back"] == 0
    assert plain["formula_error"] == 0
    for name, found in case["variants"].items():
        assert found["peak_bytes"] < plain["peak_bytes"], name
        assert found["bytes_out"] >= found["bytes_back"] > 0, name
        if stack == CHECKPOINTED:
            inputs = SIZE.blocks * SIZE.input_bytes
            assert found["bytes_out"] == inputs, name


@pytest.mark.parametrize("width", [32, 64])
def test_the_peak_is_the_formula_s_where_the_host_is_ahead(width: int) -> None:
    # How many tensors the engine fetches ahead follows from times: one, where kernels take longer
    # than the link. Where the link sets the pace it is more, and so is the peak.
    sim.delay(sim.Kind.KERNEL, 5e-4)
    plain, offloaded = ways(CHECKPOINTED, SIM, Path(), 1.0, [])[:2]
    size = dataclasses.replace(SIZE, width=width)
    memopt.offload.configure(copies_in_flight=offload.COPIES_IN_FLIGHT)

    def peak(way: Way, of: Size) -> int:
        step = Stack(of, SIM).step_of(way)

        def ahead() -> None:
            with sim.paused():  # the host gives the device all of the step before it begins
                loss: Tensor = step()
            torch.accelerator.synchronize(SIM)
            del loss
            sim.memory()  # returns when autograd's thread has let go of this step's graph

        ahead()
        return peak_on_accelerator(ahead, SIM)

    one = peak(plain, dataclasses.replace(size, blocks=1))
    arithmetic = {"input_bytes": size.input_bytes}
    for way, fraction in ((plain, 0.0), (offloaded, 1.0)):
        expected = offload.formula(CHECKPOINTED, size, arithmetic, one, fraction)
        assert peak(way, size) == expected
    memopt.offload.configure()
