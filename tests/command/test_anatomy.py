"""Proves that `python -m memopt anatomy` predicts a model by name, and explains what it cannot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from memopt.__main__ import main
from tests.anatomy.models import Mlp

SMALL = json.dumps({"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96})


def job() -> tuple[torch.nn.Module, Any]:
    return Mlp(blocks=2), torch.empty(8, 32)


def nothing() -> int:
    return 3


def test_a_function_of_yours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / f"a.{kind}" for kind in ("json", "html", "png")]
    command = ["anatomy", "tests.command.test_anatomy:job", "--device", "cpu"]
    options = [str(x) for file in files for x in (f"--{file.suffix[1:]}", file)]
    assert main([*command, *options]) == 0
    assert "Mlp: 0.0 million parameters, batch of 8" in capsys.readouterr().out
    read = json.loads(files[0].read_text())
    assert read["device"] == "cpu"
    assert read["parameters"] == sum(p.numel() for p in Mlp(blocks=2).parameters())
    assert all(file.stat().st_size > 1000 for file in files)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "LlamaConfig"])
def test_a_config_by_name(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    command = ["anatomy", "--config", name, "--set", SMALL, "--batch", "2", "--seq", "32"]
    options = ["--autocast", "bfloat16", "--optimizer", "sgd", "--checkpoint", "1", "--advice"]
    assert main([*command, *options]) == 0
    out = " ".join(capsys.readouterr().out.split())  # lines end where the width asks for it
    assert "LlamaForCausalLM" in out
    assert "checkpoint=1, autocast bfloat16, SGD" in out


@pytest.mark.slow
def test_bert_large_names_what_was_published(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    assert main(["anatomy", "--preset", "bert-large", "--recipes"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "335.1 million parameters, batch of 4, recipes, AdamW, on cuda" in out
    assert "14,949 MB in all" in out


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        (
            "must be module:callable of a module that is found from here, got 'nowhere:f'",
            ["nowhere:f"],
        ),
        ("must be module:callable, such as my_module:model_and_batch, got 'os'", ["os"]),
        ("must be module:callable, such as my_module:model_and_batch, got 'os:'", ["os:"]),
        ("got 'os:nothing': module 'os' has no attribute 'nothing'", ["os:nothing"]),
        ("must be callable without arguments, got 'json:loads'", ["json:loads"]),
        ("must return a model and its batch, got int", ["tests.command.test_anatomy:nothing"]),
        ("--batch and --seq: must be at least 1, got 0", ["--preset", "gpt2", "--batch", "0"]),
        ("--measure: needs --preset", ["--config", "gpt2", "--measure"]),
        ("--set: must be a JSON object, got '[1]'", ["--config", "gpt2", "--set", "[1]"]),
        (
            "--set: must have names of GPT2Config, got 'n_layers' (did you mean 'n_layer'?)",
            ["--config", "gpt2", "--set", '{"n_layers": 2}'],
        ),
        (
            "--set: must have values that LlamaConfig takes: ",
            ["--config", "llama", "--set", '{"hidden_size": "wide"}'],
        ),
        ("--config: must be a folder with a config.json, got 'tests'", ["--config", "tests"]),
        ("checkpoint must be", ["tests.command.test_anatomy:job", "--checkpoint", "few"]),
    ],
)
def test_bad_input(words: str, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    if any(argument.startswith(("--preset", "--config")) for argument in arguments):
        pytest.importorskip("transformers")
    assert main(["anatomy", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("memopt anatomy: ")
    assert words in error
    assert error.count("\n") == 1


def test_a_config_of_no_name_fails_at_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub is asked once; transformers would ask again and again."""
    pytest.importorskip("transformers")
    hub = pytest.importorskip("huggingface_hub")
    asked = []

    def model_info(self: Any, name: str, **options: Any) -> None:
        asked.append((name, options["timeout"]))
        raise ConnectionError("no such host")

    monkeypatch.setattr(hub.HfApi, "model_info", model_info)
    assert main(["anatomy", "--config", "lama"]) == 2
    assert asked == [("lama", 2.0)]
    error = capsys.readouterr().err
    assert "got 'lama' (did you mean 'llama'?); the hub: no such host" in error
    assert "model type or class of transformers, a folder with a config.json" in error
    assert "Retrying" not in error


def test_a_folder_is_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.LlamaConfig(**json.loads(SMALL)).save_pretrained(tmp_path)
    changed = ["--set", '{"num_hidden_layers": 1}', "--batch", "1", "--seq", "16"]
    assert main(["anatomy", "--config", str(tmp_path), *changed]) == 0
    assert "LlamaForCausalLM" in capsys.readouterr().out
