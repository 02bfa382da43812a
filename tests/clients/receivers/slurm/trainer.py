"""A trainer for tests: its gold turns at once, it saves on SIGUSR1 and trains on, and may be deaf to SIGTERM.

`python trainer.py RUN FOLDER [--slow-save-seconds S] [--deaf]` writes what happens to
it, with the time, to FOLDER/story.
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
    """Goes step by step until it is ended."""

    def __init__(self, run: Run, folder: Path, slow_save_seconds: float) -> None:
        self._run = run
        self._folder = folder
        self._slow_save_seconds = slow_save_seconds
        self._wanted = False
        self._step = 0

    def tell(self, what: str) -> None:
        """Write a line of the story."""
        with (self._folder / "story").open("a") as story:
            story.write(f"{time.time():.3f} {what}\n")
            story.flush()
            os.fsync(story.fileno())

    def want_checkpoint(self, number: int, frame: FrameType | None) -> None:
        """SIGUSR1."""
        self.tell("asked")
        self._wanted = True

    def end(self, number: int, frame: FrameType | None) -> None:
        """SIGTERM."""
        self.tell("terminated")
        sys.exit(0)

    def train(self) -> None:
        """Rise five evals long, then fall for ever."""
        self.tell("started")
        while True:
            self._step += 1
            gold = self._step if self._step <= 5 else 10 - self._step
            if self._step == 5:
                self._save()
            self._run.log({"gold": float(gold)}, step=self._step)
            if self._wanted:
                self._wanted = False
                time.sleep(self._slow_save_seconds)
                self._save()
                self.tell("saved")
            time.sleep(EVAL_SECONDS)

    def _save(self) -> None:
        path = self._folder / f"step-{self._step}"
        path.write_text(f"the model of step {self._step}")
        self._run.checkpoint(path.as_uri(), step=self._step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--slow-save-seconds", type=float, default=0.0)
    parser.add_argument("--deaf", action="store_true")
    options = parser.parse_args()
    with Run(options.run, metrics={"gold": {"role": "eval"}}, policy="paper", mode="enforce") as run:
        trainer = Trainer(run, options.folder, options.slow_save_seconds)
        signal.signal(signal.SIGUSR1, trainer.want_checkpoint)
        signal.signal(signal.SIGTERM, signal.SIG_IGN if options.deaf else trainer.end)
        trainer.train()


if __name__ == "__main__":
    main()
