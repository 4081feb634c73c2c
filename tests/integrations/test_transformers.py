"""Proves: MemoptCallback plans (or converts) the model of a transformers Trainer before its first
step: peaks by the allocator are within the budget, losses are those of the plain run but for the
rounding of recipes' kernels (the data and its random order are untouched), gradient checkpointing
is replaced with a warning or obeyed, forwards are counted, and what is logged is there.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memopt
from memopt.memory.allocator import LiveBytes

transformers = pytest.importorskip("transformers", minversion="5.23")

from memopt.integrations.transformers import MemoptCallback  # noqa: E402

LAYERS, ROWS, TOKENS = 4, 4, 32


class Peaks(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    """The peak of each step beyond what was there before, by the allocator; forwards of each layer,
    the most of its parts' in the step.
    """

    def __init__(self) -> None:
        self.most: list[int] = []
        self.forwards: dict[nn.Module, int] = {}
        self._of_parts: Counter[nn.Module] = Counter()

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        self.forwards.clear()
        self._of_parts.clear()
        self._hooks = [
            part.register_forward_pre_hook(partial(self._count, layer))
            for layer in model.model.layers
            for part in layer.modules()
            if part is not layer
        ]
        self._live = LiveBytes()
        self._live.__enter__()

    def _count(self, layer: nn.Module, part: nn.Module, *_: Any) -> None:
        self._of_parts[part] += 1
        self.forwards[layer] = max(self.forwards.get(layer, 0), self._of_parts[part])

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._live.__exit__(None, None, None)
        self.most.append(self._live.most)
        for hook in self._hooks:
            hook.remove()


def llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return transformers.LlamaForCausalLM(config)


def data() -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    ids = torch.randint(0, 64, (32, TOKENS))
    return [{"input_ids": row, "labels": row} for row in ids]


def trained(
    folder: Path, *callbacks: Any, model: Any = None, **options: Any
) -> tuple[Any, list[float], Peaks]:
    peaks = Peaks()
    arguments = transformers.TrainingArguments(
        folder,
        max_steps=3,
        per_device_train_batch_size=ROWS,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        seed=3,
        **options,
    )
    trainer = transformers.Trainer(
        llama() if model is None else model,
        arguments,
        train_dataset=data(),
        callbacks=[*callbacks, peaks],
    )
    trainer.train()
    return trainer, [row["loss"] for row in trainer.state.log_history if "loss" in row], peaks


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], Peaks]:
    _, losses, peaks = trained(tmp_path_factory.mktemp("plain"))
    return losses, peaks


def base(model: nn.Module) -> int:
    """Bytes of weights, gradients and AdamW's states, which are there between the steps."""
    return 3 * sum(p.nbytes for p in model.parameters())


def budget_of(peaks: Peaks, share: float = 0.45) -> int:
    """So that recipes alone do not do."""
    return base(llama()) + int(share * max(peaks.most[1:]))


def test_a_budget(plain: tuple[list[float], Peaks], tmp_path: Path) -> None:
    losses, peaks = plain
    budget = budget_of(peaks)
    callback = MemoptCallback(budget=budget)
    trainer, found, with_plan = trained(tmp_path, callback)
    torch.testing.assert_close(found, losses, rtol=1e-4, atol=0)
    assert base(trainer.model) + max(with_plan.most[1:]) <= budget
    assert max(with_plan.most[1:]) < 0.7 * max(peaks.most[1:])
    assert 2 in with_plan.forwards.values()
    assert callback.effect is not None
    row = next(row for row in trainer.state.log_history if "memopt/peak_bytes" in row)
    assert row["memopt/peak_bytes"] <= row["memopt/budget_bytes"] == budget
    assert row["memopt/plain_peak_bytes"] > budget
    assert all("memopt/peak_bytes" in r for r in trainer.state.log_history if "loss" in r)
    callback.effect.undo()
    assert memopt.saved_bytes(trainer.model, data()[0]["input_ids"][None]) == memopt.saved_bytes(
        llama(), data()[0]["input_ids"][None]
    )


def test_a_plan_takes_the_place_of_gradient_checkpointing(
    plain: tuple[list[float], Peaks], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    losses, peaks = plain
    budget = budget_of(peaks)
    with caplog.at_level(logging.WARNING, "memopt"):
        callback = MemoptCallback(budget=budget, measure=False)
        trainer, found, with_plan = trained(tmp_path, callback, gradient_checkpointing=True)
    assert "takes the place of the gradient checkpointing of LlamaForCausalLM" in caplog.text
    torch.testing.assert_close(found, losses, rtol=1e-4, atol=0)
    assert not trainer.model.is_gradient_checkpointing
    assert max(with_plan.forwards.values()) == 2


def test_convert_leaves_gradient_checkpointing_on(
    plain: tuple[list[float], Peaks], tmp_path: Path
) -> None:
    callback = MemoptCallback(convert=True)
    trainer, found, converted = trained(tmp_path, callback, gradient_checkpointing=True)
    torch.testing.assert_close(found, plain[0], rtol=1e-4, atol=0)
    assert trainer.model.is_gradient_checkpointing
    assert set(converted.forwards.values()) == {2}
    assert max(converted.most[1:]) < 0.7 * max(plain[1].most[1:])
    assert callback.effect is not None
    assert callback.effect.metrics["memopt/kept_bytes"] > 0


def test_convert_with_regions(plain: tuple[list[float], Peaks], tmp_path: Path) -> None:
    _, found, converted = trained(tmp_path, MemoptCallback(convert=True, checkpoint=True))
    torch.testing.assert_close(found, plain[0], rtol=1e-4, atol=0)
    assert set(converted.forwards.values()) == {2}
    assert len(converted.forwards) == LAYERS


def test_a_plan_is_saved_and_read(plain: tuple[list[float], Peaks], tmp_path: Path) -> None:
    losses, peaks = plain
    budget, file = budget_of(peaks), tmp_path / "plan.json"
    _, first, _ = trained(tmp_path, MemoptCallback(budget=budget, plan=file, measure=False))
    assert json.loads(file.read_text())
    read = MemoptCallback(plan=file)
    _, second, with_plan = trained(tmp_path, read)
    assert first == second
    torch.testing.assert_close(first, losses, rtol=1e-4, atol=0)
    assert 2 in with_plan.forwards.values()
    with pytest.raises(OSError, match="nowhere"):
        trained(tmp_path, MemoptCallback(plan=tmp_path / "nowhere.json"))


def test_gradient_accumulation_counts(tmp_path: Path) -> None:
    """Gradients are there while the second micro-batch runs: the budget holds with them."""
    options = {"gradient_accumulation_steps": 2}
    _, losses, peaks = trained(tmp_path, **options)
    budget = budget_of(peaks, 0.7)
    trainer, found, with_plan = trained(
        tmp_path, MemoptCallback(budget=budget, measure=False), **options
    )
    torch.testing.assert_close(found, losses, rtol=1e-4, atol=0)
    assert base(trainer.model) + max(with_plan.most[1:]) <= budget


def test_adapters(tmp_path: Path) -> None:
    """PEFT's LoRA on the attention's projections."""
    peft = pytest.importorskip("peft")

    def with_adapters() -> Any:
        model = llama()
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        return peft.get_peft_model(model, config)

    def losses_of(*callbacks: Any) -> list[float]:
        arguments = transformers.TrainingArguments(
            tmp_path, max_steps=2, logging_steps=1, report_to=[], use_cpu=True,
            save_strategy="no", disable_tqdm=True, per_device_train_batch_size=ROWS,
        )  # fmt: skip
        trainer = transformers.Trainer(
            with_adapters(), arguments, train_dataset=data(), callbacks=list(callbacks)
        )
        trainer.train()
        return [row["loss"] for row in trainer.state.log_history if "loss" in row]

    callback = MemoptCallback(budget="64MiB", measure=False)
    torch.testing.assert_close(losses_of(callback), losses_of(), rtol=1e-4, atol=0)
    assert callback.effect is not None


def test_bad_options() -> None:
    with pytest.raises(ValueError, match=r"MemoptCallback: one of budget, plan and convert=True"):
        MemoptCallback()
    with pytest.raises(ValueError, match=r"convert and checkpoint must not be given with a plan"):
        MemoptCallback(budget="1GiB", convert=True)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"budget": "foo"}, ValueError, r"budget must be bytes or a string .* got 'foo'"),
        ({"budget": 0}, ValueError, r"budget must be at least one byte .* got 0"),
        ({"budget": -5}, ValueError, r"budget must be at least one byte .* got -5"),
        ({"budget": [1]}, TypeError, r"budget must be bytes or a string .* got \[1\]"),
        ({"budget": 1, "measure": "no"}, TypeError, r"measure must be True or False, got 'no'"),
        ({"budget": 1, "offload": "gpu"}, ValueError, r"offload: must be 'cpu', .* got 'gpu'"),
        ({"plan": 3}, TypeError, r"plan must be a str or a path, got 3"),
        ({"plan": "."}, OSError, r"plan must be a file, got the directory '.'"),
        ({"plan": "missing.json"}, OSError, r"plan must be a file that .* got 'missing.json'"),
        ({"plan": "no/p.json", "budget": 1}, OSError, r"plan .* a directory that .* got 'no/p"),
    ],
)
def test_bad_options_are_refused_before_training(
    options: dict[str, Any],
    kind: type[Exception],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(kind, match="^MemoptCallback: " + message):
        MemoptCallback(**options)
