"""Proves: what cannot be offloaded raises an error that names the argument, or stays where it is
with one warning, and the results are those of the plain run.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt

ROWS, WIDTH = 64, 32


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"to": "gpu"}, ValueError, "to: must be 'cpu', 'disk' or a path, got 'gpu'"),
        ({"to": 3}, TypeError, "to: must be 'cpu', 'disk' or a path, got int"),
        ({"to": "disk"}, ValueError, r"'disk' needs a directory .* got none"),
        ({"directory": "x"}, ValueError, "directory must be None with 'cpu', got 'x'"),
        ({"to": "disk", "directory": 3}, TypeError, "directory must be a path, got int"),
        ({"to": "disk", "directory": "/nowhere/at/all"}, OSError, "/nowhere/at/all"),
        ({"min_bytes": -1}, ValueError, "min_bytes must be an int of at least 0, got -1"),
        ({"min_bytes": 1.5}, TypeError, "min_bytes must be an int of at least 0, got 1.5"),
        ({"fraction": 1.5}, ValueError, "fraction must be from 0 to 1, got 1.5"),
        ({"fraction": "all"}, TypeError, "fraction must be a number, got str"),
        ({"max_bytes": True}, TypeError, "max_bytes must be an int of at least 0, got True"),
        ({"keep_last": -2}, ValueError, "keep_last must be an int of at least 0, got -2"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_arguments(arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        memopt.offload(**arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"copies_in_flight": 0}, ValueError, "copies_in_flight must be .* at least 1, got 0"),
        ({"max_host_bytes": -1}, ValueError, "max_host_bytes must be an int of at least 0, got -1"),
        ({"checksums": "no"}, TypeError, "checksums must be True or False, got 'no'"),
        ({"directory": "/nowhere/at/all"}, OSError, "/nowhere/at/all"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_limits(arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        memopt.offload.configure(**arguments)


def test_faces_of_regions_name_themselves(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="checkpoint: offload: must be 'cpu', 'disk' or a path"):
        memopt.checkpoint(torch.exp, torch.ones(1), offload="host")  # type: ignore[arg-type]
    module = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="checkpoint_wrapper: offload: 'disk' needs a directory"):
        memopt.checkpoint_wrapper(module, offload="disk")
    with pytest.raises(ValueError, match="must be 'cpu' with offload_to_cpu=True, got"):
        memopt.checkpoint_wrapper(module, offload_to_cpu=True, offload=tmp_path)
    assert type(module) is nn.Linear
    memopt.offload.configure(directory=tmp_path)
    memopt.checkpoint_wrapper(module, offload="disk")
    memopt.offload.configure()


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    """A file in its place: for the user root, no directory is read-only."""
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        memopt.offload("disk", directory=tmp_path / "file")


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no file system in memory here")
def test_a_directory_in_memory_warns() -> None:
    with pytest.warns(UserWarning, match="/dev/shm is in memory itself"):
        memopt.offload("disk", directory="/dev/shm")


def test_a_cap_below_one_tensor_warns_once(directory: Path) -> None:
    x, weight = torch.randn(ROWS, WIDTH), torch.ones(ROWS, WIDTH, requires_grad=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with memopt.offload("disk", directory=directory, max_bytes=100, min_bytes=1, keep_last=0):
            loss = (weight * x).sum() + (weight * (x * 2)).sum()
    (warning,) = caught
    assert f"got max_bytes=100 for a tensor of {x.nbytes} bytes" in str(warning.message)
    assert memopt.offload.stats(wait=True).bytes_out == 0
    loss.backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, 3 * x)


KINDS = {
    "sparse": lambda: torch.eye(WIDTH).to_sparse_coo(),
    "sparse rows": lambda: torch.eye(WIDTH).to_sparse_csr(),
    "conjugate view": lambda: torch.randn(WIDTH, WIDTH, dtype=torch.complex64).conj(),
    "empty": lambda: torch.randn(0, WIDTH),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_without_plain_memory_stay(directory: Path, kind: str) -> None:
    matrix = KINDS[kind]()
    weight = torch.ones(WIDTH, 4, dtype=matrix.dtype, requires_grad=True)
    expected = torch.autograd.grad((matrix @ weight).abs().sum(), weight)[0]
    memopt.offload.stats(reset=True)
    with memopt.offload("disk", directory=directory, min_bytes=1, keep_last=0):
        product = matrix @ weight
    assert memopt.offload.stats(wait=True).bytes_out == 0
    assert torch.equal(torch.autograd.grad(product.abs().sum(), weight)[0], expected)


def test_quantized_arguments_of_a_region_stay(directory: Path) -> None:
    """Their values are more than a storage and its geometry."""
    weight = torch.ones(WIDTH, requires_grad=True)

    def scaled(quantized: Tensor) -> Tensor:
        return (quantized.dequantize() * weight).exp().sum()

    def quantized() -> Tensor:
        return torch.quantize_per_tensor(torch.linspace(-1, 1, WIDTH), 0.1, 0, torch.qint8)

    (expected,) = torch.autograd.grad(scaled(quantized()), weight)
    loss = memopt.checkpoint(scaled, quantized(), offload=directory)
    assert memopt.offload.stats(wait=True).bytes_out == 0
    assert torch.equal(torch.autograd.grad(loss, weight)[0], expected)


def test_a_full_disk_keeps_tensors_in_memory(tmp_path: Path) -> None:
    """A process that may write no file of more than 4 MB (the signal of that, ignored, is an error
    of the write). What has no room stays; one warning; the bits of the plain run."""
    script = """
        import resource, signal, sys, warnings
        import torch, memopt

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        weight = torch.ones(512, 512, requires_grad=True)
        torch.manual_seed(0)
        inputs = [torch.randn(512, 512) for _ in range(12)]
        expected = torch.autograd.grad(sum((weight * (x * 1)).sum() for x in inputs), weight)[0]
        limit = 4 * 1024 * 1024
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(3):
                with memopt.offload("disk", directory=sys.argv[1], keep_last=0):
                    loss = sum((weight * (x * 1)).sum() for x in inputs)
                assert torch.equal(torch.autograd.grad(loss, weight)[0], expected)
        (place,) = memopt.offload.stats(wait=True).places
        assert 0 < place.room_high_water <= limit, place
        assert place.refused_bytes > 0 and place.bytes_away == place.bytes_held == 0, place
        assert len(caught) == 1, [str(w.message) for w in caught]
        print(caught[0].message)
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert run.returncode == 0, run.stderr
    assert str(tmp_path) in run.stdout
