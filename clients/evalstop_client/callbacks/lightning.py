"""Lightning's Trainer.

    trainer = Trainer(..., callbacks=[EvalStopCallback(name="sft-7b")])

What a module logs reaches loggers alone at the moment it is new, so the callback puts a logger of its own beside those
of the trainer. Rank 0 alone talks to the service; all ranks stop at the same step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Unpack

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers import Logger

from evalstop_client.callbacks.arguments import RunArguments, filled, keep_numbers, to_uri
from evalstop_client.eval_request import Evaluate, answer_requests
from evalstop_client.run import Run

AGREE_EVERY_STEPS = 10


class EvalStopCallback(Callback):
    """Report a run of Lightning's Trainer to EvalStop and ends it at a stop.

    Takes the arguments of `evalstop_client.Run`, by name; a name is needed, here or in EVALSTOP_RUN_NAME. Steps are
    the trainer's `global_step`. Checkpoints are those that a ModelCheckpoint keeps, `last.ckpt` left aside, which is
    another one at every save. The ranks agree on stopping after every `agree_every_steps`-th step.
    `evaluate` answers requests to evaluate now when a checkpoint is kept, on rank 0 while the others wait: it is given
    a checkpoint's uri, how many times the usual prompts, and a seed.
    """

    def __init__(
        self,
        *,
        agree_every_steps: int = AGREE_EVERY_STEPS,
        evaluate: Evaluate | None = None,
        **arguments: Unpack[RunArguments],
    ) -> None:
        self._arguments = arguments if evaluate is None else {"evaluates": True, **arguments}
        self._evaluate = evaluate
        self._agree_every_steps = max(1, agree_every_steps)
        self._logger: _RunLogger | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open the run, and report a resume from a checkpoint."""
        if trainer.is_global_zero:
            planned = trainer.estimated_stepping_batches  # of epochs, too; infinite or -1 where nobody knows
            total_steps = int(planned) if 0 < planned < math.inf else None
            resumes = trainer.global_step > 0
            run = Run(**filled(self._arguments, total_steps=total_steps, resumes=resumes))
            if resumes:
                run.resume(step=trainer.global_step)
            self._logger = _RunLogger(run, trainer, self._evaluate)
            trainer.loggers = [*trainer.loggers, self._logger]  # so late that no folder is named after it

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End the training when the service asks for it."""
        every = self._agree_every_steps if trainer.world_size > 1 else 1
        if trainer.global_step % every == 0:
            wanted = self._logger is not None and self._logger.run.should_stop
            if trainer.strategy.broadcast(wanted):
                trainer.should_stop = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report that the run has ended, once the last checkpoint is registered."""
        if self._logger is not None:
            self._logger.done = True

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Release the run: the service finds one whose training failed to be lost."""
        if self._logger is not None:
            trainer.loggers = [logger for logger in trainer.loggers if logger is not self._logger]
            if self._logger.done:
                self._logger.run.finish()
            self._logger = None


class _RunLogger(Logger):
    """Forwards what the trainer logs."""

    def __init__(self, run: Run, trainer: Trainer, evaluate: Evaluate | None) -> None:
        self.run = run
        self._evaluate = evaluate
        self.done = False
        self._trainer = trainer
        self._registered: set[str] = set()

    @property
    def name(self) -> str:
        """How the service knows the run."""
        return self.run.name

    @property
    def version(self) -> str:
        """There are no versions."""
        return ""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Report what is new, at the trainer's step, by which checkpoints are named too."""
        self.run.log(keep_numbers(metrics), step=self._trainer.global_step)

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing is made of them."""

    def after_save_checkpoint(self, checkpoint_callback: Checkpoint) -> None:
        """Register the checkpoints that are new."""
        kept = {*getattr(checkpoint_callback, "best_k_models", ()), getattr(checkpoint_callback, "best_model_path", "")}
        for path in sorted(kept - self._registered - {""}):
            self._registered.add(path)
            self.run.checkpoint(to_uri(path), step=self._trainer.global_step)
            if self._evaluate is not None:
                answer_requests(self.run.eval_requests(), self._evaluate, to_uri(path), self._trainer.global_step)
