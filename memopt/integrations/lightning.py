"""A callback for Lightning's Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

try:
    from lightning.pytorch import Callback
except ImportError:
    try:
        from pytorch_lightning import Callback
    except ImportError as missing:
        raise ImportError(
            "memopt.integrations.lightning needs Lightning: pip install lightning"
        ) from missing

from memopt.integrations.wanted import Effect, Peak, Wanted, logger, put_on
from memopt.memory.batches import repeated
from memopt.memory.leaves import is_packed
from memopt.place import Place

_AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


class MemoptLightningCallback(Callback):
    """Plans or converts a LightningModule before its first training step, on all ranks.

        trainer = Trainer(..., callbacks=[MemoptLightningCallback(budget="22GiB")])

    The step that is planned is the module's `training_step` with the first batch, without what it
    logs. Peaks and bytes go to the trainer's loggers with the first batch and at the end of each
    epoch; the plan itself to the logger "memopt" at level INFO, and is `callback.effect.text`.

    Args:
        budget, convert, checkpoint, offload, plan, measure: see
            `memopt.integrations.transformers.MemoptCallback`.

    Raises:
        TypeError, ValueError: nothing is asked for, a plan together with `convert`, a budget that
            is no size, or a plan for a module with manual optimization, whose training_step runs
            backward itself.
        OSError: `plan` is not there and there is no budget to make it for, or cannot be saved.
        At the first batch: what `memopt.plan` and `memopt.convert` raise.
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
    ) -> None:
        self._wanted = Wanted(
            "MemoptLightningCallback", budget, convert, checkpoint, offload, plan, measure
        )
        self._peak: Peak | None = None
        self.effect: Effect | None = None

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Convert or plan, once."""
        if self.effect is not None:
            return
        if not self._wanted.convert and not pl_module.automatic_optimization:
            raise ValueError(
                "MemoptLightningCallback: a plan needs automatic optimization, got "
                f"{type(pl_module).__name__} with automatic_optimization=False; memopt.plan takes "
                "the model inside it"
            )
        step = training_step_of(pl_module, batch)
        micro_batches = trainer.accumulate_grad_batches
        optimizer = trainer.optimizers[0] if len(trainer.optimizers) == 1 else None
        with step.quiet():
            self.effect = put_on(
                self._wanted,
                step,
                repeated(step.arguments, micro_batches),
                optimizer,
                _AUTOCAST.get(trainer.precision),
                micro_batches,
            )
        logger.info("%s", self.effect.text)
        self._peak = Peak(pl_module.device)
        self._log(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Log the peak since the last time."""
        if self.effect is not None:
            self._log(trainer)

    def _log(self, trainer: Any) -> None:
        assert self.effect is not None
        assert self._peak is not None
        metrics = {**self.effect.metrics, **self._peak.metrics()}
        for each in trainer.loggers:
            each.log_metrics(metrics, step=trainer.global_step)


def training_step_of(module: Any, batch: Any) -> TrainingStep:
    """The training step of a LightningModule, which reports call by that module's class."""
    named: type[TrainingStep] = type(type(module).__name__, (TrainingStep,), {})
    return named(module, batch)


class TrainingStep(nn.Module):
    """A LightningModule's training_step as the forward of a module with the same children, under
    the same names.

    `arguments` are the first batch as this forward takes it: a mapping, or positional ones.
    """

    module: Any
    _trainer: Callable[[], Any]

    def __init__(self, module: Any, batch: Any) -> None:
        super().__init__()
        object.__setattr__(self, "module", module)  # no child, which names would begin with
        self._modules, self._parameters = module._modules, module._parameters
        self._buffers = module._buffers
        self._non_persistent_buffers_set = module._non_persistent_buffers_set
        trainer = module.trainer
        self._trainer = lambda: trainer  # copies of the module have none
        self._kind = type(batch)
        is_one = is_packed(batch) or not isinstance(batch, (dict, tuple, list))
        self.arguments = (batch,) if is_one else batch
        self._is_one = is_one
        self.training = module.training  # that of children is theirs

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.module._trainer is None:
            self.module.trainer = self._trainer()
        batch = kwargs if kwargs else args[0] if self._is_one else self._kind(args)
        output = self.module.training_step(batch, 0)
        return output["loss"] if isinstance(output, dict) else output

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """A scope in which the module logs nothing."""
        names = ("log", "log_dict")
        for name in names:
            object.__setattr__(self.module, name, lambda *_, **__: None)
        try:
            yield
        finally:
            for name in names:
                object.__delattr__(self.module, name)
