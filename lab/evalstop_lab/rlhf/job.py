"""`evalstop-lab train`: trains the example, saves checkpoints, reports to EvalStop and obeys its stops."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import TextIO

from evalstop_client import MetricRole, Run
from rich.console import Console
from rich.text import Text

from evalstop_lab.arguments import positive_number, whole_number
from evalstop_lab.rlhf.checkpoint import Checkpoint, save_checkpoint
from evalstop_lab.rlhf.trainer import PRESETS, Config, Eval, Trainer, hasten_run


class Rows:
    """Prints a header and one row per eval; each new best gold is green."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._best_gold = -float("inf")

    def show_start(self, run_name: str, config: Config) -> None:
        self._console.print(f"{run_name}: steps 0 to {config.steps}, an eval every {config.eval_every} steps")
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

    def show_start(self, run_name: str, config: Config) -> None:
        self._write({"event": "begin", "run_name": run_name, "step": 0, "config": asdict(config)})

    def show_eval(self, logged: Eval, checkpoint: Path) -> None:
        self._write({"event": "eval", **asdict(logged), "checkpoint": str(checkpoint)})

    def show_end(self, end: str, step: int, checkpoint: Path | None) -> None:
        self._write({"event": "end", "how": end, "step": step, "checkpoint": checkpoint and str(checkpoint)})

    def _write(self, event: dict[str, object]) -> None:
        self._stream.write(json.dumps(event) + "\n")
        self._stream.flush()


Progress = Rows | JsonLines


SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interruption:
    """Handles `SIGNALS` within its block: records the first one. Only for the main thread."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __call__(self) -> bool:
        """Return whether a signal has arrived."""
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """Return the exit code of a process that ended by the signal: 128 + its number, or 0 without a signal."""
        return 128 + self.signal if self.signal is not None else 0

    def __enter__(self) -> Interruption:
        self._before = {number: signal.signal(number, self._record) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _record(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or signal.Signals(number)


METRICS: dict[str, MetricRole] = {
    "gold": {"role": "eval", "direction": "maximize"},
    "proxy": {"role": "proxy", "direction": "maximize"},
    "kl": {"role": "kl"},
}

EXAMPLES = """examples:
  evalstop-lab train --preset overoptimizes --checkpoints /tmp/checkpoints
  EVALSTOP_URL=http://127.0.0.1:8787 EVALSTOP_KEY=esk_... evalstop-lab train --checkpoints /tmp/checkpoints

On SIGTERM or SIGINT it saves a checkpoint at the current step and exits with 128 + the signal's number.
"""


class Job:
    """Trains one run, and writes its checkpoints and reports."""

    def __init__(self, run_name: str, config: Config, checkpoints: Path, progress: Progress, polls: bool) -> None:
        """`polls`: end the run when the service answers `should_stop`; otherwise only a signal ends it early."""
        self._trainer = Trainer(config)
        self._run_name = run_name
        self._checkpoints = checkpoints
        self._progress = progress
        self._polls = polls
        self._saved: Path | None = None
        self._saved_step: int | None = None

    def train(self, run: Run, interruption: Interruption) -> None:
        """Train to the end, a requested stop or a signal, and save a checkpoint of the last step."""
        self._progress.show_start(self._run_name, self._trainer.config)
        end = "completed"
        for logged in self._trainer.evals(interrupted=interruption):
            self._report(run, logged)
            if self._polls and run.should_stop:
                end = "stopped"
                break
        if self._trainer.state.step != self._saved_step:
            self._save(run)
        if interruption.signal is not None:
            end = interruption.signal.name
        self._progress.show_end(end, self._trainer.state.step, self._saved)

    def _report(self, run: Run, logged: Eval) -> None:
        path = self._save(run)
        run.log(
            {"proxy": logged.proxy, "gold": logged.gold, "kl": logged.kl, "entropy": logged.entropy},
            step=logged.step,
            stderr={"proxy": logged.proxy_stderr, "gold": logged.gold_stderr},
        )
        self._progress.show_eval(logged, path)

    def _save(self, run: Run) -> Path:
        state = self._trainer.state
        path = save_checkpoint(self._checkpoints, Checkpoint(self._run_name, self._trainer.config, state))
        self._saved, self._saved_step = path, state.step
        run.checkpoint(path.as_uri(), step=state.step)
        return path


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument("--preset", choices=sorted(PRESETS), default="overoptimizes", help="the run to train")
    parser.add_argument("--seed", type=whole_number, default=0, help="random seed (default: 0)")
    parser.add_argument("--steps", type=positive_number, help="the last step (default: the preset's)")
    parser.add_argument(
        "--hasten",
        type=positive_number,
        default=1,
        metavar="FACTOR",
        help="divide the number of steps by FACTOR; the curve is nearly the same",
    )
    parser.add_argument("--checkpoints", type=Path, required=True, metavar="DIR", help="folder for step-*.npz")
    parser.add_argument("--policy", help="policy of the run (default: the project's)")
    parser.add_argument("--mode", choices=("shadow", "enforce"), help="only record a stop, or carry it out")
    parser.add_argument(
        "--stop-by",
        choices=("poll", "signal"),
        default="poll",
        help="poll: end when the service answers should_stop; signal: a receiver ends the run (default: poll)",
    )
    parser.add_argument("--json", action="store_true", help="print events as lines of JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    config = hasten_run(replace(PRESETS[args.preset], seed=args.seed), args.hasten)
    config = replace(config, steps=args.steps or config.steps)
    run_name = os.environ.get("EVALSTOP_RUN_NAME") or f"{args.preset}-seed{args.seed}"
    progress: Progress = JsonLines(sys.stdout) if args.json else Rows(Console(highlight=False))
    job = Job(run_name, config, args.checkpoints, progress, polls=args.stop_by == "poll")
    reported = Run(
        name=run_name,
        metrics=METRICS,
        policy=args.policy,
        mode=args.mode,
        total_steps=config.steps,
    )
    with Interruption() as interruption:
        try:
            job.train(reported, interruption)
        except BaseException:
            reported.finish("failed")
            raise
    if interruption():
        # It has neither failed nor completed.
        reported.flush()
    else:
        reported.finish("completed")
    return interruption.exit_code
