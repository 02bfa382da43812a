"""Lightning's Trainer.

    trainer = Trainer(..., callbacks=[EvalStopCallback(name="sft-7b")])

Only loggers receive a module's metrics as soon as they are logged, so the callback adds its own logger to those of the
trainer. Only rank 0 talks to the service; all ranks stop at the same step.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any, Unpack

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, GradientAccumulationScheduler
from lightning.pytorch.loggers.logger import DummyLogger

from evalstop_client.callbacks.arguments import (
    CallbackArguments,
    choose_monitor,
    filled,
    is_plan_meant,
    keep_numbers,
    open_run,
    repeats_steps,
    to_uri,
)
from evalstop_client.eval_request import Evaluate, answer_requests
from evalstop_client.run import Run

logger = logging.getLogger("evalstop_client")

AGREE_EVERY_STEPS = 10


class EvalStopCallback(Callback):
    """Reports a run of Lightning's Trainer to EvalStop and ends it at a stop.

    Takes the keyword arguments of `evalstop_client.Run`; a name is required, here or in EVALSTOP_RUN_NAME. Steps are
    the trainer's `global_step`. Checkpoints are those that a ModelCheckpoint keeps, except `last.ckpt`, which each save
    overwrites. The ranks agree on stopping after every tenth step.
    `evaluate` answers requests to evaluate now when a checkpoint is saved, on rank 0 while the others wait. Its
    arguments are a checkpoint's uri, a multiple of the usual number of prompts, and a seed.
    """

    def __init__(self, *, evaluate: Evaluate | None = None, **arguments: Unpack[CallbackArguments]) -> None:
        self._arguments = arguments if evaluate is None else {"evaluates": True, **arguments}
        self._evaluate = evaluate
        self._logger: _RunLogger | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open the run, and report a resume from a checkpoint."""
        if trainer.is_global_zero:
            planned = trainer.estimated_stepping_batches  # computed from epochs, too; infinite or -1 if unknown
            # Of manual optimization it counts batches, where `global_step` counts the steps of all optimizers. An
            # accumulation that a schedule changes counts as it begins.
            callbacks: list[Callback] = getattr(trainer, "callbacks", [])
            is_steady = not any(isinstance(item, GradientAccumulationScheduler) for item in callbacks)
            is_known = 0 < planned < math.inf and pl_module.automatic_optimization and is_steady
            is_constant = all(config.reduce_on_plateau for config in trainer.lr_scheduler_configs)
            is_meant = is_plan_meant(is_constant=is_constant, stops_early=bool(trainer.early_stopping_callbacks))
            total_steps = int(planned) if is_known and is_meant else None
            resumes = trainer.global_step > 0
            saving = [item for item in trainer.checkpoint_callbacks if getattr(item, "save_top_k", 0)]
            monitors = [
                (getattr(item, "monitor", None), getattr(item, "mode", ""))
                for item in (*trainer.early_stopping_callbacks, *saving)
            ]
            best_by = choose_monitor(monitors)
            run = open_run(filled(self._arguments, total_steps=total_steps, resumes=resumes, best_by=best_by))
            if repeats_steps(trainer.global_step):
                run.resume(step=trainer.global_step)
            kept = [getattr(callback, "save_top_k", -1) for callback in trainer.checkpoint_callbacks]
            if any(count > 0 for count in kept):
                logger.warning(
                    "evalstop: ModelCheckpoint(save_top_k=%d) may delete the checkpoint that EvalStop calls the best; "
                    "save_top_k=-1 keeps all",
                    max(kept),
                )
            self._logger = _RunLogger(run, trainer, self._evaluate)
            trainer.loggers = [*trainer.loggers, self._logger]  # added late, so that no folder is named after it

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End the training when the service asks for it."""
        every = AGREE_EVERY_STEPS if trainer.world_size > 1 else 1
        if trainer.global_step % every == 0:
            stop_wanted = self._logger is not None and self._logger.run.should_stop
            if trainer.strategy.broadcast(stop_wanted):
                trainer.should_stop = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report that the run has ended, once the last checkpoint is registered."""
        if self._logger is not None:
            self._logger.done = True

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Release the run: if the training failed, the service considers it lost."""
        if self._logger is not None:
            trainer.loggers = [logger for logger in trainer.loggers if logger is not self._logger]
            if self._logger.done:
                self._logger.run.finish()
            self._logger = None


class _RunLogger(DummyLogger):
    """Reports what the trainer logs. If it is the only logger, a module that draws with its own finds a dummy."""

    def __init__(self, run: Run, trainer: Trainer, evaluate: Evaluate | None) -> None:
        super().__init__()
        self.run = run
        self._evaluate = evaluate
        self.done = False
        self._trainer = trainer

    @property
    def name(self) -> str:
        """The run's name at the service."""
        return self.run.name

    @property
    def save_dir(self) -> str:
        """The trainer's folder, as without a logger."""
        return self._trainer.default_root_dir

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Report new values, at the trainer's step, which also names checkpoints."""
        self.run.log(keep_numbers(metrics), step=self._trainer.global_step)

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Hyperparameters are ignored."""

    def after_save_checkpoint(self, checkpoint_callback: Checkpoint) -> None:
        """Register the checkpoint that was just saved; ModelCheckpoint may have overwritten an earlier file for it."""
        path = getattr(checkpoint_callback, "_last_checkpoint_saved", "")
        retained_paths = {
            *getattr(checkpoint_callback, "best_k_models", ()),
            getattr(checkpoint_callback, "best_model_path", ""),
        }
        if path and path in retained_paths:
            self.run.checkpoint(to_uri(path), step=self._trainer.global_step)
            if self._evaluate is not None:
                answer_requests(self.run.eval_requests(), self._evaluate, to_uri(path), self._trainer.global_step)
