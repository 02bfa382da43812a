"""Keras' `fit`, on any backend.

    saving = ModelCheckpoint(path, monitor="val_accuracy", save_best_only=True)
    model.fit(..., callbacks=[saving, EvalStopCallback(name="classifier", checkpoints=saving)])

Steps are epochs, counted from 1: within an epoch Keras logs running means.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
from pathlib import Path
from typing import Any, Unpack

from keras.callbacks import Callback, ModelCheckpoint

from evalstop_client.callbacks.arguments import (
    URI,
    CallbackArguments,
    choose_monitor,
    filled,
    keep_numbers,
    open_run,
    repeats_steps,
    to_uri,
)
from evalstop_client.run import Run

logger = logging.getLogger("evalstop_client")


class EvalStopCallback(Callback):  # type: ignore[misc]  # Keras has no types
    """Reports a `fit` to EvalStop and ends it at a stop, even within an epoch.

    Takes the keyword arguments of `evalstop_client.Run`; a name is required, here or in EVALSTOP_RUN_NAME.
    `checkpoints` is a ModelCheckpoint earlier in the list, or its path with its `{epoch}`: Keras does not report what
    it saves, so the callback looks for a file that the epoch wrote, in an object store as Keras does, through
    TensorFlow. What it monitors to save only the best is declared as the eval. `fit` with an `initial_epoch` resumes
    from a checkpoint; another `fit` of the same model with the same callback, as in a loop, continues its run.
    """

    def __init__(
        self,
        *,
        checkpoints: str | os.PathLike[str] | ModelCheckpoint | None = None,
        **arguments: Unpack[CallbackArguments],
    ) -> None:
        super().__init__()
        self._arguments = arguments
        self._best_by: tuple[str | None, str] = (None, "")
        if isinstance(checkpoints, ModelCheckpoint):
            if checkpoints.save_best_only:
                self._best_by = choose_monitor([(checkpoints.monitor, checkpoints.mode)])
            checkpoints = checkpoints.filepath
        self._checkpoints = None if checkpoints is None else os.fspath(checkpoints)
        self._run: Run | None = None
        self._saved_before: tuple[str, int] | None = None
        self._fitted: Any = None  # the model of the last `fit`
        self._epochs = self._epochs_before = 0  # of the run, and those of earlier calls of `fit`

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Open the run, and report a resume from a checkpoint."""
        if self._run is None:
            continues = epoch == 0 and self._fitted is not None and self._fitted is self.model
            self._epochs_before = self._epochs if continues else 0
            planned = self._epochs_before + self.params["epochs"] if "epochs" in self.params else None
            resumes = continues or epoch > 0
            self._run = open_run(filled(self._arguments, total_steps=planned, resumes=resumes, best_by=self._best_by))
            if repeats_steps(epoch) and not continues:
                self._run.resume(step=epoch)
        with contextlib.suppress(Exception):  # a metric in its name is known at the epoch's end
            self._saved_before = self._find_saved(epoch, {})

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """End the training when the service asks for it."""
        if self._run is not None and self._run.should_stop:
            self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Report the epoch's metrics and its checkpoint."""
        if self._run is None:
            return
        step = self._epochs = self._epochs_before + epoch + 1
        self._run.log(keep_numbers(logs), step=step)
        try:
            saved = self._find_saved(epoch, logs or {})
        except Exception as error:  # {batch}, a metric that this epoch lacks, an object store that does not answer
            logger.warning("evalstop: no checkpoint of epoch %d: %r: %r", epoch + 1, self._checkpoints, error)
            return
        if saved is not None and saved != self._saved_before:  # `save_best_only` leaves it as it was
            self._run.checkpoint(to_uri(saved[0]), step=step)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Report that the run has ended; not called when `fit` fails: the service then considers the run lost."""
        if self._run is not None:
            self._run.finish()
            self._run, self._fitted = None, self.model

    def _find_saved(self, epoch: int, logs: dict[str, Any]) -> tuple[str, int] | None:
        """The file of an epoch's checkpoint and when it was written; None if there is none."""
        if self._checkpoints is None:
            return None
        path = self._checkpoints.format(epoch=epoch + 1, **logs)
        if URI.match(path):
            gfile = importlib.import_module("tensorflow.io.gfile")
            return (path, gfile.stat(path).mtime_nsec) if gfile.exists(path) else None
        file = Path(path)
        return (path, file.stat().st_mtime_ns) if file.exists() else None
