"""Prints the progress of a training run, as a table or as one JSON object per line."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.text import Text

from evalstop_lab.rlhf.trainer import Config, Eval


class Rows:
    """Prints a header and one row per eval; each new best gold is green."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._best_gold = -float("inf")

    def show_start(self, run_name: str, config: Config, step: int) -> None:
        self._console.print(f"{run_name}: steps {step} to {config.steps}, an eval every {config.eval_every} steps")
        self._console.print(Text(f"{'step':>7}  {'proxy':>7}  {'eval':>7} {'':8}  {'KL':>6}  {'entropy':>7}", "bold"))

    def show_eval(self, logged: Eval, checkpoint: Path) -> None:
        is_best, self._best_gold = logged.gold > self._best_gold, max(logged.gold, self._best_gold)
        row = Text(f"{logged.step:7d}  {logged.proxy:7.2f}  ")
        row.append(f"{logged.gold:7.2f} ± {logged.gold_stderr:4.2f}", "green" if is_best else "")
        row.append(f"    {logged.kl:6.1f}  {logged.entropy:7.1f}")
        self._console.print(row)

    def show_end(self, end: str, step: int, checkpoint: Path | None) -> None:
        self._console.print(f"{end} at step {step}; last checkpoint: {checkpoint}", soft_wrap=True)


class JsonLines:
    """Prints each event as one JSON object per line: "begin", "eval", "end"."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def show_start(self, run_name: str, config: Config, step: int) -> None:
        self._write({"event": "begin", "run_name": run_name, "step": step, "config": asdict(config)})

    def show_eval(self, logged: Eval, checkpoint: Path) -> None:
        self._write({"event": "eval", **asdict(logged), "checkpoint": str(checkpoint)})

    def show_end(self, end: str, step: int, checkpoint: Path | None) -> None:
        self._write({"event": "end", "how": end, "step": step, "checkpoint": checkpoint and str(checkpoint)})

    def _write(self, event: dict[str, object]) -> None:
        self._stream.write(json.dumps(event) + "\n")
        self._stream.flush()


Progress = Rows | JsonLines
