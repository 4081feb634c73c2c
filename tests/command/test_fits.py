"""Proves: `python -m memopt fits` answers yes or no by its exit status; and the commands take the
options that they heed, and no others.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memopt.__main__ import main

JOB = "tests.command.test_anatomy:job"


def test_yes_and_no(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "fits.json"
    command = ["fits", JOB, "--device", "cpu", "--json", str(file)]
    assert main([*command, "--memory", "1GB"]) == 0
    assert "fits, with" in capsys.readouterr().out
    read = json.loads(file.read_text())
    assert read["fits"] is True
    assert main([*command, "--memory", str(read["peak"] - 1)]) == 1
    assert "does not fit: 1 B are missing" in " ".join(capsys.readouterr().out.split())
    assert main([*command, "--memory", "1GB", "--ranks", "4", "--weight-bits", "4"]) == 0
    assert json.loads(file.read_text())["ranks"] == 4


def test_bad_input_is_said_in_the_command_s_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fits", JOB, "--device", "cpu", "--memory", "much"]) == 2
    assert capsys.readouterr().err.startswith("memopt fits: memory must be bytes or a string")


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("check", "--html=a.html"),
        ("check", "--png=a.png"),
        ("check", "--optimizer=sgd"),
        ("check", "--micro-batches=2"),
        ("fits", "--measure"),
        ("fits", "--png=a.png"),
    ],
)
def test_options_without_effect_are_refused(
    command: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    memory = ["--memory=1GB"] if command == "fits" else []
    with pytest.raises(SystemExit):
        main([command, JOB, option, *memory])
    assert option.split("=")[0] in capsys.readouterr().err
