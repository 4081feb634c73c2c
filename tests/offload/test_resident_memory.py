"""Proves: on a machine without an accelerator, memopt.offload("disk") trains the demo's model in
less resident memory (what the operating system counts) with the same losses in every bit, and a
process that is killed in the middle of a step leaves no file behind.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # processes that import torch

# argv: a directory, or nothing. Prints a line of losses and bytes; after the second step's forward
# a line "forward", and goes on.
TRAIN = """
    import json, os, sys
    import torch, memopt
    from contextlib import nullcontext
    from memopt.demo.model import GPT, ModelSize

    torch.set_num_threads(1)  # with more, matrix products may differ in bits on a busy machine
    size = ModelSize(layers=5, width=128, heads=4, context=256)
    model = GPT(size, torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(256, (3, 16, 257), generator=torch.Generator().manual_seed(1))
    losses = []
    for step, batch in enumerate(tokens):
        directory = sys.argv[1] if len(sys.argv) > 1 else None
        to_disk = directory and memopt.offload("disk", directory=directory)
        with to_disk or nullcontext():
            loss = model(batch[:, :-1], batch[:, 1:])
        if step == 1:
            print("forward", flush=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with open("/proc/self/status") as status:
        peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    away = memopt.offload.stats(wait=True).bytes_out // len(tokens)
    print(json.dumps([losses, peak * 1024, away]))
"""


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(TRAIN), *arguments],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )


def result(process: subprocess.Popen[str]) -> tuple[list[float], int, int]:
    out, _ = process.communicate()
    assert process.returncode == 0
    losses, peak, away = json.loads(out.splitlines()[-1])
    return losses, peak, away


def test_training_to_disk_takes_less_memory(tmp_path: Path) -> None:
    losses, peak, _ = result(start())
    again, less, away = result(start(str(tmp_path)))
    assert again == losses
    # What counts are resident pages. The C library keeps some of what the rest of the step frees,
    # in holes between its blocks, so that the peak falls by about half of what is away.
    assert away > 170e6
    assert peak - less > away / 4, (peak, less, away)
    assert list(tmp_path.iterdir()) == []


def test_a_killed_process_leaves_no_file(tmp_path: Path) -> None:
    process = start(str(tmp_path))
    assert process.stdout is not None
    assert process.stdout.readline() == "forward\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []
