"""A trainer for tests: its eval falls after step 5, and it saves on SIGUSR1 and continues.

`python trainer.py RUN FOLDER [--slow-save-seconds S] [--peak N]` writes what happens, with
the time, to FOLDER/events.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from evalstop_client import Run

EVAL_SECONDS = 0.1


class Trainer:
    """Trains step by step until it is ended."""

    def __init__(self, run: Run, folder: Path, slow_save_seconds: float) -> None:
        self._run = run
        self._folder = folder
        self._slow_save_seconds = slow_save_seconds
        self._checkpoint_requested = False
        self._step = 0

    def write_event(self, event: str) -> None:
        """Append an event, and its time, to the file."""
        with (self._folder / "events").open("a") as file:
            file.write(f"{time.time():.3f} {event}\n")
            file.flush()
            os.fsync(file.fileno())

    def request_checkpoint(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGUSR1."""
        self.write_event("asked")
        self._checkpoint_requested = True

    def end(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGTERM."""
        self.write_event("terminated")
        sys.exit(0)

    def train(self, peak: int) -> None:
        """Five rising evals, then falling ones without end; `peak`: more rising ones."""
        self.write_event("started")
        while True:
            self._step += 1
            score = self._step if self._step <= peak else 2 * peak - self._step
            if self._step == 5:
                self._save()
            self._run.log({"score": float(score)}, step=self._step)
            if self._checkpoint_requested:
                self._checkpoint_requested = False
                time.sleep(self._slow_save_seconds)
                self._save()
                self.write_event("saved")
            time.sleep(EVAL_SECONDS)

    def _save(self) -> None:
        path = self._folder / f"step-{self._step}"
        path.write_text(f"model at step {self._step}")
        self._run.checkpoint(path.as_uri(), step=self._step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--slow-save-seconds", type=float, default=0.0)
    parser.add_argument("--peak", type=int, default=5)
    options = parser.parse_args()
    with Run(options.run, metrics={"score": {"role": "eval"}}, policy="paper", mode="enforce") as run:
        trainer = Trainer(run, options.folder, options.slow_save_seconds)
        signal.signal(signal.SIGUSR1, trainer.request_checkpoint)
        signal.signal(signal.SIGTERM, trainer.end)
        trainer.train(options.peak)


if __name__ == "__main__":
    main()
