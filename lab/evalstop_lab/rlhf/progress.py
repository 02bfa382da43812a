"""What whoever started a training run gets to see of it: rows for eyes, or one JSON object a line for programs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Protocol, TextIO

from rich.console import Console
from rich.text import Text

from evalstop_lab.rlhf.trainer import Config, Eval


class Progress(Protocol):
    """Receives the evals of a run as they come, and its end."""

    def begin(self, run_name: str, config: Config, step: int) -> None:
        """Tell that the run starts, or goes on, at this step."""

    def show(self, logged: Eval, checkpoint: Path) -> None:
        """Tell of an eval and of the checkpoint saved with it."""

    def end(self, how: str, step: int, checkpoint: Path | None) -> None:
        """Tell how the run ended ("completed", "stopped" or a role's name), where, and the last checkpoint saved."""


class Rows(Progress):
    """A header and a row for each eval, the best gold so far in green."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._best_gold = -float("inf")

    def begin(self, run_name: str, config: Config, step: int) -> None:
        self._console.print(f"{run_name}: steps {step} to {config.steps}, an eval every {config.eval_every}")
        self._console.print(Text(f"{'step':>7}  {'proxy':>7}  {'eval':>7} {'':8}  {'KL':>6}  {'entropy':>7}", "bold"))

    def show(self, logged: Eval, checkpoint: Path) -> None:
        best, self._best_gold = logged.gold > self._best_gold, max(logged.gold, self._best_gold)
        row = Text(f"{logged.step:7d}  {logged.proxy:7.2f}  ")
        row.append(f"{logged.gold:7.2f} ± {logged.gold_stderr:4.2f}", "green" if best else "")
        row.append(f"    {logged.kl:6.1f}  {logged.entropy:7.1f}")
        self._console.print(row)

    def end(self, how: str, step: int, checkpoint: Path | None) -> None:
        self._console.print(f"{how} at step {step}; last checkpoint: {checkpoint}", soft_wrap=True)


class JsonLines(Progress):
    """The same for programs, each event flushed as one JSON object: "begin", "eval", "end"."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def begin(self, run_name: str, config: Config, step: int) -> None:
        self._write({"event": "begin", "run_name": run_name, "step": step, "config": asdict(config)})

    def show(self, logged: Eval, checkpoint: Path) -> None:
        self._write({"event": "eval", **asdict(logged), "checkpoint": str(checkpoint)})

    def end(self, how: str, step: int, checkpoint: Path | None) -> None:
        self._write({"event": "end", "how": how, "step": step, "checkpoint": checkpoint and str(checkpoint)})

    def _write(self, event: dict[str, object]) -> None:
        self._stream.write(json.dumps(event) + "\n")
        self._stream.flush()
