"""Proves, where there is a GPU: the larger preset trains there, keeps the promises on losses, and
holds fewer bytes with each of memopt's pieces.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import memopt
from tests.demo.conftest import RunDemo

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not memopt.build_info()["cuda"],
        reason="needs a GPU and memopt's CUDA kernels",
    ),
]


def test_the_gpu_preset(tmp_path: Path, run_demo: RunDemo) -> None:
    assert run_demo(tmp_path, "--device", "cuda", "--steps", "3") == 0
    modes = {
        mode["mode"]: mode for mode in json.loads((tmp_path / "demo.json").read_text())["modes"]
    }
    assert not any(mode["failure"] for mode in modes.values())
    promised = [
        m["agreement"] for m in modes.values() if m["agreement"] and m["agreement"]["promised"]
    ]
    assert len(promised) == 4
    assert all(agreement["bit_equal"] for agreement in promised)
    saved = {name: mode["memory"]["saved"] for name, mode in modes.items()}
    assert saved["fused"] < saved["convert"] < saved["eager"]  # convert leaves the head alone
    assert saved["fused+checkpoint+offload"] < saved["fused+checkpoint"] < saved["fused"]
