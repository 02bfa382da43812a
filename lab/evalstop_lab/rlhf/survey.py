"""What a shipped policy makes of the example trainer over many seeds: `evalstop-lab survey`.

A single run can be lucky. The survey trains a preset once for each seed to its end, replays the log through the policy
and says where it would have stopped. Where gold truly peaked is read off a centered mean of `WINDOW` evals, since a
single eval is noisy.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from evalstop_detectors import POLICIES, MetricRole, Observation, Policy, replay
from rich.console import Console
from rich.table import Table

from evalstop_lab.arguments import positive_number, whole_number
from evalstop_lab.rlhf import PRESETS, Config, Eval, Trainer, hastened

WINDOW = 5

EXAMPLES = """examples:
  evalstop-lab survey --preset overoptimizes --seeds 10
  evalstop-lab survey --preset healthy --seeds 10 --hasten 20 --policy default --json
"""


@dataclass(frozen=True)
class Outcome:
    """One seed: gold at its peak and at the end (means of `WINDOW` evals), and where the policy stops, if it does."""

    preset: str
    seed: int
    first_gold: float
    peak_gold: float
    peak_step: int
    final_gold: float
    final_step: int
    stop_step: int | None
    train_seconds: float


def survey(preset: str, seeds: Sequence[int], policy: Policy, hasten: int = 1) -> Iterator[Outcome]:
    """Train the preset with each seed in turn; yield what came of it."""
    for seed in seeds:
        config = hastened(replace(PRESETS[preset], seed=seed), hasten)
        began = time.perf_counter()
        log = list(Trainer(config).evals())
        yield judge(preset, config, log, policy, time.perf_counter() - began)


def judge(preset: str, config: Config, log: Sequence[Eval], policy: Policy, train_seconds: float) -> Outcome:
    """Find the peak of a finished run of at least `WINDOW` evals, and where the policy would have stopped it."""
    means = [statistics.fmean(e.gold for e in log[start : start + WINDOW]) for start in range(len(log) - WINDOW + 1)]
    peak = max(range(len(means)), key=means.__getitem__)
    verdict = replay(policy, _observations(log, config.steps)).verdict
    return Outcome(
        preset,
        config.seed,
        first_gold=log[0].gold,
        peak_gold=means[peak],
        peak_step=log[peak + WINDOW // 2].step,
        final_gold=means[-1],
        final_step=log[-1].step,
        stop_step=verdict.step if verdict.stops else None,
        train_seconds=train_seconds,
    )


def _observations(log: Sequence[Eval], steps: int) -> Iterator[Observation]:
    for logged in log:
        progress = logged.step / steps
        yield Observation(MetricRole.KL, logged.step, logged.kl, progress=progress)
        yield Observation(MetricRole.PROXY, logged.step, logged.proxy, logged.proxy_stderr, progress)
        yield Observation(MetricRole.EVAL, logged.step, logged.gold, logged.gold_stderr, progress)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `survey` to the command line."""
    parser = subparsers.add_parser(
        "survey",
        help="train a preset on many seeds and see where a policy stops each",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--preset", choices=sorted(PRESETS), default="overoptimizes")
    parser.add_argument("--seeds", type=positive_number, default=10, help="how many (default: 10)")
    parser.add_argument("--first-seed", type=whole_number, default=0, help="the first of them (default: 0)")
    parser.add_argument("--policy", choices=sorted(POLICIES), default="paper", help="default: paper")
    parser.add_argument("--hasten", type=positive_number, default=1, metavar="FACTOR", help="as in `train`")
    parser.add_argument("--json", action="store_true", help="print one JSON object a seed rather than a table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run `evalstop-lab survey`; return its exit code."""
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    outcomes = []
    for outcome in survey(args.preset, seeds, POLICIES[args.policy], args.hasten):
        outcomes.append(outcome)
        if args.json:
            sys.stdout.write(json.dumps(asdict(outcome)) + "\n")
            sys.stdout.flush()
    if not args.json:
        Console().print(_table(outcomes, args.policy))
    return 0


def _table(outcomes: Sequence[Outcome], policy: str) -> Table:
    stopped = [outcome for outcome in outcomes if outcome.stop_step is not None]
    late = sum(outcome.stop_step is not None and outcome.stop_step > outcome.peak_step for outcome in outcomes)
    caption = f"policy {policy}: {len(stopped)} of {len(outcomes)} stopped, {late} of them after the peak"
    table = Table(caption=caption)
    for heading in ("seed", "gold at first", "at its peak", "peak step", "at the end", "stop step", "seconds"):
        table.add_column(heading, justify="right")
    for outcome in outcomes:
        table.add_row(
            str(outcome.seed),
            f"{outcome.first_gold:.2f}",
            f"{outcome.peak_gold:.2f}",
            str(outcome.peak_step),
            f"{outcome.final_gold:.2f}",
            "-" if outcome.stop_step is None else str(outcome.stop_step),
            f"{outcome.train_seconds:.1f}",
        )
    return table
