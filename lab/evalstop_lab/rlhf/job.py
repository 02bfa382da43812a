"""`evalstop-lab train`: trains the example, saves checkpoints, reports to EvalStop and obeys its stops."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import Any

from evalstop_client import MetricRole, Run

from evalstop_lab.arguments import positive_number, whole_number
from evalstop_lab.rlhf.checkpoint import save_checkpoint
from evalstop_lab.rlhf.trainer import PRESETS, Config, Trainer, hasten_run

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

Event = dict[str, Any]
"""What is printed: a "begin", an "eval" or an "end", and its fields."""


def format_row(event: Event) -> str:
    """An event for people: the head of a table, a row of it, or how the run ended."""
    match event["event"]:
        case "begin":
            head = f"{'step':>7}  {'proxy':>7}  {'eval':>7} {'':8}  {'KL':>6}"
            config = event["config"]
            return f"{event['run_name']}: an eval every {config['eval_every']} of {config['steps']} steps\n{head}"
        case "eval":
            gold = f"{event['gold']:7.2f} ± {event['gold_stderr']:4.2f}"
            return f"{event['step']:7d}  {event['proxy']:7.2f}  {gold}    {event['kl']:6.1f}"
    return f"{event['how']} at step {event['step']}; last checkpoint: {event['checkpoint']}"


SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def catch_termination() -> Iterator[Sequence[signal.Signals]]:
    """Only record SIGTERM and SIGINT within the block; yields those that have arrived. Only for the main thread."""
    received: list[signal.Signals] = []

    def record(number: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(number))

    before = {number: signal.signal(number, record) for number in SIGNALS}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def train(
    run: Run,
    config: Config,
    checkpoints: Path,
    show: Callable[[Event], None],
    *,
    polls: bool,
    received: Sequence[signal.Signals] = (),
) -> None:
    """Train to the end or a signal, and save a checkpoint of each eval and of the last step.

    `polls`: also end the run when the service answers `should_stop`.
    """
    trainer, how = Trainer(config), "completed"

    def save() -> Path:
        path = save_checkpoint(checkpoints, trainer)
        run.checkpoint(path.as_uri(), step=trainer.state.step)
        return path

    show({"event": "begin", "run_name": run.name, "step": 0, "config": asdict(config)})
    saved = Path()
    for logged in trainer.evals(interrupted=lambda: bool(received)):
        saved = save()
        run.log(
            {"proxy": logged.proxy, "gold": logged.gold, "kl": logged.kl},
            step=logged.step,
            stderr={"proxy": logged.proxy_stderr, "gold": logged.gold_stderr},
        )
        show({"event": "eval", **asdict(logged)})
        if polls and run.should_stop:
            how = "stopped"
            break
    if trainer.state.step % config.eval_every:
        saved = save()
    end = {"how": received[0].name if received else how, "step": trainer.state.step, "checkpoint": str(saved)}
    show({"event": "end", **end})


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

    def show(event: Event) -> None:
        sys.stdout.write((json.dumps(event) if args.json else format_row(event)) + "\n")
        sys.stdout.flush()

    reported = Run(name=run_name, metrics=METRICS, policy=args.policy, mode=args.mode, total_steps=config.steps)
    with catch_termination() as received:
        try:
            polls = args.stop_by == "poll"
            train(reported, config, args.checkpoints, show, polls=polls, received=received)
        except BaseException:
            reported.finish("failed")
            raise
    if received:
        # It has neither failed nor completed.
        reported.flush()
        return 128 + received[0]
    reported.finish("completed")
    return 0
