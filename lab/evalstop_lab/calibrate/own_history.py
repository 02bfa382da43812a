"""`evalstop-lab calibrate SOURCE`: thresholds for your own past runs, and how well they hold.

The healthy runs, by their later evals, are split in two by a hash of their names. The threshold is found on one part;
the
stops are counted on the other, which was not used. Right stops are counted on the turned runs of the second part.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import msgspec
from evalstop_detectors import Detector, policy_from_document, policy_to_document
from evalstop_service.rules.outcome import Turn, judge_decision, locate_turn
from evalstop_service.rules.statuses import DecisionOutcome, RunOutcome
from rich.console import Console

from evalstop_lab.backtest.cases import assess
from evalstop_lab.backtest.command import history
from evalstop_lab.calibrate.evidence import Records, records_of_run, to_alarm
from evalstop_lab.calibrate.thresholds import threshold
from evalstop_lab.errors import UnusableArguments
from evalstop_lab.replay import Run
from evalstop_lab.report import format_percent
from evalstop_lab.sweep import cores, sweep
from evalstop_lab.worlds.scoring import CONFIDENCE, clopper_pearson, wilson

SUSPECT_TIMES = 5
"""A policy suspects at the threshold that stops this multiple of healthy runs."""


def run(args: argparse.Namespace, detector: Detector[Any]) -> int:
    """Run `evalstop-lab calibrate SOURCE --false-stops SHARE`; return its exit code."""
    runs, _ = history(args)
    document = calibrated(list(runs.by_name.values()), detector, args.false_stops, args.jobs, args.name)
    if args.output is not None:
        args.output.write_text(json.dumps(document["policy"], indent=2) + "\n", encoding="utf-8")
    if args.json:
        sys.stdout.write(json.dumps(document) + "\n")
    else:
        console = Console(soft_wrap=True, highlight=False)
        for words in document["words"]:
            console.print(words, markup=False)
        if args.output is None:
            console.print(json.dumps(document["policy"], indent=2), markup=False)
    return 0


def calibrated(
    runs: Sequence[Run], detector: Detector[Any], rate: float, jobs: int | None = None, name: str = "ours"
) -> dict[str, Any]:
    """The policy that stops at most `rate` of the healthy runs of the first part, and its results on the second.

    Raises UnusableArguments if there are too few runs to find a threshold.
    """
    truths = sweep(assess, runs, "assessing outcomes")
    healthy = [run for run, found in zip(runs, truths, strict=True) if found.run_outcome is RunOutcome.HEALTHY]
    turned = [
        (run, locate_turn(found))
        for run, found in zip(runs, truths, strict=True)
        if found.run_outcome is RunOutcome.TURNED and not is_first(run.name)
    ]
    first = [run for run in healthy if is_first(run.name)]
    second = [run for run in healthy if not is_first(run.name)]
    if not first or not second:
        raise UnusableArguments(
            f"Of {len(runs)} runs {len(healthy)} are healthy by their later evals, which is too few to split in two;"
            " add more runs, or set the column of the eval score with --eval."
        )
    jobs = jobs or cores()
    seen = {
        run.name: found
        for some in (first, second, [run for run, _ in turned])
        for run, found in zip(
            some, sweep(partial(records_of_run, detector), some, f"calibrating {detector.name}", jobs), strict=True
        )
    }
    kind = next((found.kind for found in seen.values() if found.kind is not None), None)
    if kind is None:
        raise UnusableArguments("The detector saw none of its roles in any of the runs; give runs that have them.")
    highest = [seen[run.name].highest for run in first]
    found = threshold(kind, highest, rate)
    if found.value is None:
        raise UnusableArguments(
            f"No threshold of {detector.name} is strict enough for {format_percent(rate, 2)};"
            " try another detector or parameters."
        )
    alarm = to_alarm(kind, found.value)
    suspect = threshold(kind, highest, min(SUSPECT_TIMES * rate, 0.5)).value
    stopped = clopper_pearson(sum(seen[run.name].highest >= alarm for run in second), len(second))
    caught = wilson(sum(_rightly(seen[run.name], alarm, turn) for run, turn in turned), len(turned))
    document: dict[str, Any] = {
        "rate": rate,
        "runs": len(runs),
        "healthy": len(healthy),
        "calibrated_on": len(first),
        "reported_on": len(second),
        "threshold": found.value,
        "interval": [found.low, found.high],
        "false_stops": asdict(stopped) | {"value": stopped.value},
        "caught": asdict(caught) | {"value": None if math.isnan(caught.value) else caught.value},
        "runs_needed": runs_needed(rate),
        "promise": promise(rate, len(first), stopped.hits, len(second)),
    }
    document["words"] = _words(document, detector.name)
    member = {"detector": detector.name, "params": msgspec.to_builtins(detector), "stop_at": found.value}
    if suspect is not None and suspect != found.value:
        member["suspect_at"] = suspect
    policy = {"name": name, "description": " ".join(document["words"]), "members": [member]}
    return document | {"policy": policy_to_document(policy_from_document(policy))}


def is_first(name: str) -> bool:
    """Whether the run of this name belongs to the part for finding thresholds; the same on every machine."""
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()[0] % 2 == 0


def runs_needed(rate: float) -> int:
    """How many healthy runs without a stop it takes to show that at most `rate` are stopped."""
    return math.ceil(math.log((1 - CONFIDENCE) / 2) / math.log(1 - rate))


def promise(rate: float, first: int, stopped: int, second: int) -> str:
    """`shown`: the interval lies below the rate; `broken`: above it; `open`: it contains the rate, and there are enough
    runs to show it; `too_few`: there are not enough runs to show it or to find such a threshold."""
    share = clopper_pearson(stopped, second)
    if share.low > rate:
        return "broken"
    if share.high <= rate:
        return "shown"
    return "too_few" if second < runs_needed(rate) or first * rate < 1 else "open"


def _rightly(found: Records, alarm: float, turn: Turn) -> bool:
    step = found.first_at(alarm)
    return step is not None and judge_decision(RunOutcome.TURNED, step, turn) is DecisionOutcome.RIGHT


def _words(found: dict[str, Any], detector: str) -> list[str]:
    stopped, caught, rate = found["false_stops"], found["caught"], format_percent(found["rate"], 2)
    words = [
        f"{detector} stops at {found['threshold']:.6g}, found on {found['calibrated_on']:,} healthy runs for at most"
        f" {rate} of them (by chance of these runs anything from {found['interval'][0]:.4g} to"
        f" {found['interval'][1]:.4g}).",
        f"Of {found['reported_on']:,} other healthy runs it stops {stopped['hits']:,}:"
        f" {format_percent(stopped['value'], 2)}"
        f" [{format_percent(stopped['low'], 2)}, {format_percent(stopped['high'], 2)}].",
    ]
    if caught["n"]:
        words.append(
            f"Of {caught['n']:,} turned ones it stops {caught['hits']:,} rightly: {format_percent(caught['value'])}"
            f" [{format_percent(caught['low'])}, {format_percent(caught['high'])}]."
        )
    words.append(
        {
            "shown": f"That no more than {rate} are stopped is shown.",
            "broken": f"More than {rate} are stopped: the threshold does not hold on runs that it has not seen.",
            "open": f"Whether no more than {rate} are stopped is open: the interval holds it.",
            "too_few": f"There are too few runs for this promise: even if none were stopped it would take"
            f" {found['runs_needed']:,} healthy runs to report on to show {rate},"
            f" and {math.ceil(1 / found['rate']):,} to find the threshold on.",
        }[found["promise"]]
    )
    return words
