"""Proves: the demo trains all modes end to end and writes a strict JSON and a PNG; modes that
promise equal losses have them to the last bit; Ctrl-C leaves a report of what there is.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
import torch

from memopt.demo.modes import MODES
from memopt.demo.train import Trainer
from tests.demo.conftest import RunDemo


def read(out: Path) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise ValueError(f"not JSON: {constant}")

    record: dict[str, Any] = json.loads((out / "demo.json").read_text(), parse_constant=refuse)
    return record


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory, run_demo: RunDemo) -> Path:
    """Where one run of every mode has written."""
    out = tmp_path_factory.mktemp("demo")
    assert run_demo(out, "--steps", "3") == 0
    return out


@pytest.mark.slow
def test_the_record_is_whole(out: Path) -> None:
    record = read(out)
    assert [mode["mode"] for mode in record["modes"]] == list(MODES)
    assert not record["interrupted"]
    assert record["settings"]["steps"] == 3
    assert record["versions"]["torch"] == torch.__version__
    assert record["machine"]["cores"] >= 1
    for mode in record["modes"]:
        assert len(mode["losses"]) == len(mode["step_ms"]) == 3
        assert all(value > 0 for value in mode["figures"].values())
        assert len(mode["memory"]["ms"]) == len(mode["memory"]["live"])


@pytest.mark.slow
def test_the_figure_is_an_image_with_something_in_it(out: Path) -> None:
    image = matplotlib.image.imread(out / "demo.png")
    assert min(image.shape[:2]) > 500
    assert len({tuple(pixel) for pixel in image[::7, ::7].reshape(-1, image.shape[2])}) > 50


@pytest.mark.slow
def test_the_loss_falls(out: Path) -> None:
    for mode in read(out)["modes"]:
        assert mode["losses"][-1] < mode["losses"][0] - 0.5


@pytest.mark.slow
@pytest.mark.parametrize("name", MODES)
def test_promised_losses_are_equal_to_the_last_bit(out: Path, name: str) -> None:
    modes = {mode["mode"]: mode for mode in read(out)["modes"]}
    agreement, reference = modes[name]["agreement"], MODES[name].reference
    if name == "eager":
        assert agreement is None
    elif reference is None:
        assert agreement["reference"] == "eager"
        assert not agreement["promised"]
        assert agreement["largest_difference"] < 1e-4
    else:
        assert modes[name]["losses"] == modes[reference]["losses"]
        assert agreement == {
            "reference": reference,
            "promised": True,
            "bit_equal": True,
            "steps": 3,
            "largest_difference": 0.0,
        }


@pytest.mark.slow
def test_a_mode_alone_trains_as_among_others(out: Path, tmp_path: Path, run_demo: RunDemo) -> None:
    assert run_demo(tmp_path, "--steps", "3", "--modes", "checkpoint") == 0
    (alone,) = read(tmp_path)["modes"]
    (among,) = (mode for mode in read(out)["modes"] if mode["mode"] == "checkpoint")
    assert alone["losses"] == among["losses"]
    assert alone["agreement"] is None


@pytest.mark.slow
@pytest.mark.thorough
def test_bfloat16_and_a_text_of_ones_own(
    tmp_path: Path, run_demo: RunDemo, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "own.txt"
    text.write_text("only one sentence, over and over. " * 20)
    options = ("--dtype", "bfloat16", "--text", str(text), "--modes", "fused,fused+checkpoint")
    assert run_demo(tmp_path, "--steps", "2", *options) == 0
    record = read(tmp_path)
    assert record["settings"]["dtype"] == "bfloat16"
    assert record["modes"][1]["agreement"]["bit_equal"]
    assert "= fused's" in capsys.readouterr().out


@pytest.fixture
def ctrl_c_interrupts() -> Iterator[None]:
    """Also where a shell started the tests in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
@pytest.mark.usefixtures("ctrl_c_interrupts")
def test_ctrl_c_reports_what_there_is(
    tmp_path: Path,
    run_demo: RunDemo,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    original = Trainer.step
    calls = 0

    def step(self: Trainer, *batch: torch.Tensor) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            signal.raise_signal(signal.SIGINT)
        original(self, *batch)

    monkeypatch.setattr(Trainer, "step", step)
    assert run_demo(tmp_path, "--steps", "5", "--modes", "eager,torch-checkpoint") == 130
    record = read(tmp_path)
    assert record["interrupted"]
    assert [len(mode["losses"]) for mode in record["modes"]] == [2, 1]
    assert record["modes"][1]["agreement"]["steps"] == 1
    printed = capsys.readouterr()
    assert "Interrupted" in printed.out
    assert "Traceback" not in printed.out + printed.err
    assert (tmp_path / "demo.png").stat().st_size > 10_000


@pytest.mark.usefixtures("ctrl_c_interrupts")
def test_ctrl_c_before_the_first_step_says_so(
    tmp_path: Path,
    run_demo: RunDemo,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(Trainer, "measure_memory", lambda *_: signal.raise_signal(signal.SIGINT))
    assert run_demo(tmp_path, "--modes", "eager") == 130
    assert "Interrupted before the first step" in capsys.readouterr().out
