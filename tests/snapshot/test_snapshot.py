"""Proves: a prediction that is written as a snapshot is read back with its categories at the peak,
to the byte, and by PyTorch's own reader; a snapshot with stacks as CUDA's allocator records them
has the categories that the stacks tell; and a file that is none is refused without running its
code.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.cuda import _memory_viz

import memopt
from memopt.__main__ import main


def frame(file: str, name: str, line: int = 1) -> dict[str, Any]:
    return {"filename": file, "name": name, "line": line}


CALL = frame("/x/torch/nn/modules/module.py", "_call_impl")
MAIN = frame("/home/me/train.py", "main", 7)
MODEL = [frame("/home/me/model.py", "forward", 12), CALL, MAIN]
LOSS = [frame("/x/torch/autograd/graph.py", "_engine_run_backward"), MAIN]
STEP = [frame("/x/torch/optim/adamw.py", "step"), MAIN]
INIT = frame("/x/torch/nn/modules/linear.py", "__init__")
MAKE = [INIT, frame("/home/me/model.py", "__init__", 3), MAIN]


def event(action: str, address: int, size: int, frames: list[dict[str, Any]]) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": size, "stream": 0, "frames": frames}


def block(address: int, size: int, state: str, frames: list[dict[str, Any]]) -> dict[str, Any]:
    return {"address": address, "size": size, "state": state, "frames": frames}


@pytest.fixture
def of_cuda(tmp_path: Path) -> Path:
    """Weights from before the history; then forward, backward and the optimizer's step.

    At the peak, in backward: weights 1000, an activation 400, a gradient 300. The optimizer's state
    comes later, and the temporary buffer of forward has gone.
    """
    history = [
        event("alloc", 2, 400, MODEL),
        event("alloc", 3, 200, MODEL),
        event("free_requested", 3, 200, MODEL),
        event("free_completed", 3, 200, MODEL),
        event("alloc", 4, 300, LOSS),
        event("free_completed", 2, 400, LOSS),
        event("alloc", 5, 350, STEP),
        event("free_completed", 4, 300, STEP),
        event("segment_alloc", 9, 4096, []),
    ]
    blocks = [
        block(1, 1000, "active_allocated", MAKE),
        block(5, 350, "active_allocated", STEP),
        block(6, 600, "inactive", []),
        block(7, 50, "inactive", []),
    ]
    segment = {"device": 0, "address": 1, "total_size": 2000, "blocks": blocks}
    path = tmp_path / "cuda.pickle"
    path.write_bytes(pickle.dumps({"segments": [segment], "device_traces": [history]}))
    return path


def test_stacks_tell_categories(of_cuda: Path) -> None:
    found = memopt.anatomy.read_snapshot(of_cuda)
    assert found.peak == 1700
    assert found.by_category == {"weights": 1000, "activations": 400, "gradients": 300}
    assert ("model.py:12", "activations", 400) in found.by_line
    assert (found.allocated, found.reserved, found.largest_free) == (1350, 2000, 600)
    assert found.fragmented == 50 / 2000
    assert found.events == 7
    assert found.largest[0].line == "model.py:3"
    assert "peak 1,700 B allocated" in str(found)


def test_a_prediction_comes_back(tmp_path: Path) -> None:
    """Its peak and categories, in every byte; and PyTorch reads the same events."""
    layers = [layer for _ in range(3) for layer in (nn.Linear(32, 32), nn.ReLU())]
    model = nn.Sequential(*layers)
    anatomy = memopt.anatomy(model, torch.randn(16, 32), loss=lambda output: output.square().sum())
    path = tmp_path / "step.pickle"
    anatomy.to_snapshot(path)
    found = memopt.anatomy.read_snapshot(path)
    scratch = anatomy.peak.total - found.peak  # inside kernels, of which the ledger's log has none
    assert 0 <= scratch <= anatomy.peak.by_category["temporary buffers"]
    for category in ("weights", "gradients", "optimizer states", "activations"):
        assert found.by_category.get(category, 0) == anatomy.peak.by_category[category]
    assert {line for line, *_ in found.by_line} <= {piece.line for piece in anatomy.pieces}
    assert (found.free_blocks, found.fragmented) == (0, 0), "nobody predicts gaps"
    with path.open("rb") as file:
        read = pickle.load(file)
    assert _memory_viz.trace(read).count(" = ") == sum(p.nbytes > 0 for p in anatomy.pieces)


def test_the_command(of_cuda: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["snapshot", str(of_cuda), "--json", str(tmp_path / "a.json")]) == 0
    assert "activations" in capsys.readouterr().out
    assert '"peak": 1700' in (tmp_path / "a.json").read_text()
    assert main(["snapshot", str(tmp_path / "a.json")]) == 2
    assert "must be a snapshot of PyTorch's" in capsys.readouterr().err
    assert main(["snapshot", str(tmp_path / "none")]) == 2


def test_another_device(of_cuda: Path) -> None:
    with pytest.raises(
        ValueError, match=r"read_snapshot: device must be one of the snapshot's, got 3"
    ):
        memopt.anatomy.read_snapshot(of_cuda, device=3)


class Evil:
    def __reduce__(self) -> Any:
        return Path.write_text, (Path("evil"), "ran")


NO_SNAPSHOTS = (b"", b"text", pickle.dumps([1]), pickle.dumps({"segments": Evil()}))


@pytest.mark.parametrize("content", NO_SNAPSHOTS)
def test_what_is_no_snapshot(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"read_snapshot: path must be a snapshot of PyTorch's"):
        memopt.anatomy.read_snapshot(path)
    assert not (tmp_path / "evil").exists()


def test_without_a_history(tmp_path: Path) -> None:
    segment = {"device": 0, "total_size": 100, "blocks": [block(1, 80, "active_allocated", [])]}
    path = tmp_path / "plain.pickle"
    path.write_bytes(pickle.dumps({"segments": [segment], "device_traces": [[]]}))
    found = memopt.anatomy.read_snapshot(path)
    assert (found.peak, found.events, found.by_category) == (80, 0, {"not known": 80})
    assert "there is no history" in str(found)
