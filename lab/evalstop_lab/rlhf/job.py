"""The training job as a process: it trains, saves checkpoints, reports to EvalStop and ends when told to."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Protocol

from evalstop_client import MetricRole, Run
from rich.console import Console

from evalstop_lab.arguments import positive_number, whole_number
from evalstop_lab.errors import UnusableArguments
from evalstop_lab.rlhf.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from evalstop_lab.rlhf.presets import PRESETS, hastened
from evalstop_lab.rlhf.progress import JsonLines, Progress, Rows
from evalstop_lab.rlhf.trainer import Config, Eval, State, Trainer

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interruption:
    """While entered, remembers the first of `SIGNALS` to arrive instead of dying of it; for the main thread only."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __call__(self) -> bool:
        """Say whether one has arrived."""
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """Return what a shell expects of a process that ended by the signal: 128 + its number, or 0."""
        return 128 + self.signal if self.signal is not None else 0

    def __enter__(self) -> Interruption:
        self._before = {number: signal.signal(number, self._remember) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or signal.Signals(number)


METRICS: dict[str, MetricRole] = {
    "gold": {"role": "eval", "direction": "maximize"},
    "proxy": {"role": "proxy", "direction": "maximize"},
    "kl": {"role": "kl"},
}

EXAMPLES = """examples:
  evalstop-lab train --preset overoptimizes --checkpoints /tmp/checkpoints
  EVALSTOP_URL=http://127.0.0.1:8787 EVALSTOP_KEY=esk_... evalstop-lab train --checkpoints /tmp/checkpoints
  evalstop-lab train --resume /tmp/checkpoints/step-004000.npz --checkpoints /tmp/checkpoints

SIGTERM and SIGINT save a checkpoint at the current step and end with 128 + the signal's number.
"""


class Watched(Protocol):
    """What of `evalstop_client.Run` the job calls while it trains."""

    @property
    def should_stop(self) -> bool:
        """Whether the service wants the run to end."""

    def log(self, values: Mapping[str, float], *, step: int, stderr: Mapping[str, float] | None = None) -> None:
        """Report metrics."""

    def checkpoint(self, uri: str, *, step: int) -> None:
        """Report a checkpoint."""

    def resume(self, *, step: int) -> None:
        """Report that training goes on from here."""


@dataclass(frozen=True, eq=False)
class Plan:
    """What is to be trained, under which name, and from which state if not from the start."""

    run_name: str
    config: Config
    state: State | None


class Job:
    """One run of the trainer with its checkpoints, its log and its reports."""

    def __init__(self, plan: Plan, checkpoints: Path, log: Path | None, progress: Progress, polls: bool) -> None:
        """`polls`: end when an answer of the service says `should_stop`; otherwise only a signal ends the run early."""
        self._trainer = Trainer(plan.config, plan.state)
        self._plan = plan
        self._checkpoints = checkpoints
        self._log = log
        self._progress = progress
        self._polls = polls
        self._saved: Path | None = None
        self._saved_step = plan.state.step if plan.state else None

    def train(self, run: Watched, interruption: Interruption) -> None:
        """Train to the end, to the service's word or to the interruption; leave a checkpoint of where it ended."""
        start = self._trainer.state.step
        self._progress.begin(self._plan.run_name, self._plan.config, start)
        if self._plan.state is not None:
            run.resume(step=start)
        how = "completed"
        for logged in self._trainer.evals(interrupted=interruption):
            self._report(run, logged)
            if self._polls and run.should_stop:
                how = "stopped"
                break
        if self._trainer.state.step != self._saved_step:
            self._save(run)
        if interruption.signal is not None:
            how = interruption.signal.name
        self._progress.end(how, self._trainer.state.step, self._saved)

    def _report(self, run: Watched, logged: Eval) -> None:
        path = self._save(run)
        if self._log is not None:
            with self._log.open("a", encoding="utf-8") as log:
                log.write(json.dumps(asdict(logged)) + "\n")
        run.log(
            {"proxy": logged.proxy, "gold": logged.gold, "kl": logged.kl, "entropy": logged.entropy},
            step=logged.step,
            stderr={"proxy": logged.proxy_stderr, "gold": logged.gold_stderr},
        )
        self._progress.show(logged, path)

    def _save(self, run: Watched) -> Path:
        state = self._trainer.state
        path = save_checkpoint(self._checkpoints, Checkpoint(self._plan.run_name, self._plan.config, state))
        self._saved, self._saved_step = path, state.step
        run.checkpoint(path.as_uri(), step=state.step)
        return path


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `train` to the command line."""
    parser = subparsers.add_parser(
        "train",
        help="train the example: a small RLHF run that over-optimizes, or one that stays healthy",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--preset", choices=sorted(PRESETS), help="which run (default: overoptimizes)")
    parser.add_argument("--seed", type=whole_number, help="decides all of its chance (default: 0)")
    parser.add_argument("--steps", type=positive_number, help="end after this step rather than the preset's last")
    parser.add_argument(
        "--hasten",
        type=positive_number,
        metavar="FACTOR",
        help="much the same curve in FACTOR times fewer, larger steps",
    )
    parser.add_argument("--checkpoints", type=Path, required=True, metavar="DIR", help="where step-*.npz are saved")
    parser.add_argument("--resume", type=Path, metavar="CHECKPOINT", help="go on from this step-*.npz, as what it was")
    parser.add_argument(
        "--run-name", help="what the run is called (default: EVALSTOP_RUN_NAME, then <preset>-seed<seed>)"
    )
    parser.add_argument("--url", help="the EvalStop service (default: EVALSTOP_URL; without either, nothing is posted)")
    parser.add_argument("--key", help="a key with the scope ingest (default: EVALSTOP_KEY)")
    parser.add_argument("--policy", help="the policy that watches the run (default: the project's)")
    parser.add_argument("--mode", choices=("shadow", "enforce"), help="record a stop, or act on it")
    parser.add_argument(
        "--stop-by",
        choices=("poll", "signal"),
        default="poll",
        help="poll: end when the service answers should_stop; signal: leave ending it to a receiver (default: poll)",
    )
    parser.add_argument("--log", type=Path, metavar="FILE", help="append every eval as a line of JSON")
    parser.add_argument("--json", action="store_true", help="print events as lines of JSON rather than rows")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run `evalstop-lab train`; return its exit code."""
    plan = plan_of(args)
    progress: Progress = JsonLines(sys.stdout) if args.json else Rows(Console(highlight=False))
    job = Job(plan, args.checkpoints, args.log, progress, polls=args.stop_by == "poll")
    reported = Run(
        url=args.url,
        key=args.key,
        name=plan.run_name,
        metrics=METRICS,
        policy=args.policy,
        mode=args.mode,
        total_steps=plan.config.steps,
        resume="allow" if plan.state is not None else None,
    )
    with Interruption() as interruption:
        try:
            job.train(reported, interruption)
        except BaseException:
            reported.finish("failed")
            raise
    if interruption():
        # The run may be resumed: whoever sent the signal knows what it means, so it is not said to have failed.
        reported.flush()
    else:
        reported.finish("completed")
    return interruption.exit_code


def plan_of(args: argparse.Namespace) -> Plan:
    """Work out what is to be trained; raise UnusableArguments when that cannot be."""
    if args.resume is None:
        preset, seed = args.preset or "overoptimizes", args.seed or 0
        config = hastened(replace(PRESETS[preset], seed=seed), args.hasten or 1)
        default_name, state = f"{preset}-seed{seed}", None
    else:
        decided = [f"--{name}" for name in ("preset", "seed", "hasten") if getattr(args, name) is not None]
        if decided:
            raise UnusableArguments(f"--resume goes on with what the checkpoint holds; leave out {', '.join(decided)}.")
        saved = load_checkpoint(args.resume)
        config, default_name, state = saved.config, saved.run_name, saved.state
    run_name = args.run_name or os.environ.get("EVALSTOP_RUN_NAME") or default_name
    return Plan(run_name, replace(config, steps=args.steps or config.steps), state)
