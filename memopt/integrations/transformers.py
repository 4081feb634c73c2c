"""A callback for transformers' Trainer, and the trainers of TRL that are made of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

try:
    from transformers import TrainerCallback
except ImportError as missing:
    raise ImportError(
        "memopt.integrations.transformers needs transformers: pip install transformers"
    ) from missing

from memopt._compat import add_note
from memopt.integrations.first_batch import first_batch
from memopt.integrations.wanted import Effect, Peak, Wanted, logger, on_device, put_on
from memopt.memory.batches import repeated
from memopt.memory.leaves import as_dict
from memopt.place import Place


class MemoptCallback(TrainerCallback):
    """Plans or converts the model before the first step of training, on all ranks.

        trainer = Trainer(model, args, ..., callbacks=[MemoptCallback(budget="22GiB")])

    The first batch of the training data is looked at for it; the data and all random generators
    are afterwards as before. With a budget, a plan takes the place of
    `TrainingArguments(gradient_checkpointing=True)`, which is turned off with a warning;
    `convert=True` leaves it on.

    A trainer whose loss is not what the model returns for a batch (those of TRL, or a
    `compute_loss` of your own) must be known to a plan:

        trainer.add_callback(MemoptCallback(budget="22GiB", trainer=trainer))

    Peaks and bytes are put into the trainer's log: `state.log_history`, and what loggers get that
    stand behind this callback (`trainer.callback_handler.callbacks`); the plan itself goes to the
    logger "memopt" at level INFO, and is `callback.effect.text`.

    Args:
        budget: bytes or a string such as "22GiB", for all of the step's memory on each rank.
        convert: `memopt.convert` in place of a plan; with `checkpoint` its blocks are regions.
        offload: "cpu", "disk" or a path: where activations may wait.
        plan: a file: a plan that was saved is read and applied; with a budget and without such a
            file, the plan is made and saved there (by the first rank).
        measure: whether a plan times its choices on real steps first; else it estimates.
        batch: what the model is planned with. Default: the first batch of the training data.
        trainer: the one that this is a callback of. Its `training_step` is then the step that is
            planned, and not `model(**batch).loss`.

    Raises:
        TypeError, ValueError: nothing is asked for, a plan together with `convert`, a budget that
            is no size, or a `trainer` without `training_step`.
        OSError: `plan` is not there and there is no budget to make it for, or cannot be saved.
        At the beginning of training: what `memopt.plan` and `memopt.convert` raise.
    """

    def __init__(
        self,
        budget: int | str | None = None,
        *,
        convert: bool = False,
        checkpoint: bool = False,
        offload: Place | None = None,
        plan: str | Path | None = None,
        measure: bool = True,
        batch: Any = None,
        trainer: Any = None,
    ) -> None:
        if trainer is not None and not callable(getattr(trainer, "training_step", None)):
            raise TypeError(
                "MemoptCallback: trainer must be a transformers.Trainer, got "
                f"{type(trainer).__name__}"
            )
        self._wanted = Wanted("MemoptCallback", budget, convert, checkpoint, offload, plan, measure)
        self._batch = batch
        self._trainer = trainer
        self._peak: Peak | None = None
        self.effect: Effect | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """Convert or plan, once."""
        if self.effect is not None:
            return
        model, loader = known["model"], known.get("train_dataloader")
        batch = self._batch
        if batch is None:
            batch = first_batch("MemoptCallback", loader)
        device = next(model.parameters()).device
        micro_batches = args.gradient_accumulation_steps
        optimizer = known.get("optimizer")
        autocast = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
        with self._noted():
            self.effect = put_on(
                self._wanted,
                model,
                repeated(on_device(as_dict(batch), device), micro_batches),
                getattr(optimizer, "optimizer", optimizer),
                # accelerate has put autocast around the model's forward
                None if hasattr(model, "_original_forward") else autocast,
                micro_batches,
                None if self._trainer is None else partial(self._step, args),
            )
        logger.info("%s", self.effect.text)
        self._peak = Peak(device)
        state.log_history.append({"step": state.global_step, **self.effect.metrics})

    def _step(self, args: Any, model: Any, batch: Any) -> None:
        """The trainer's own forward and backward."""
        self._trainer.current_gradient_accumulation_steps = args.gradient_accumulation_steps
        self._trainer.training_step(model, dict(batch))

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Errors of a plan say how the trainer is made known to it."""
        try:
            yield
        except (TypeError, ValueError) as error:
            if self._trainer is None and not self._wanted.convert:
                add_note(
                    error,
                    "MemoptCallback planned model(**batch).loss. If the trainer computes another "
                    "loss, as those of TRL do, it must be known: "
                    "trainer.add_callback(MemoptCallback(..., trainer=trainer))",
                )
            raise

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        """Add bytes to what is logged."""
        if logs is None or self.effect is None or self._peak is None:
            return
        found = {**self.effect.metrics, **self._peak.metrics()}
        logs.update(found)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(found)
