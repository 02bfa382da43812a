"""`evalstop-lab backtest`: which past runs a policy would have stopped, when, what that saves, and which stops are
wrong."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from evalstop_detectors import MetricRole, Policy
from evalstop_service.rules.statuses import DecisionOutcome, RunOutcome
from rich.console import Console
from rich.table import Table

from evalstop_lab.arguments import positive_number
from evalstop_lab.backtest import page
from evalstop_lab.backtest.cases import Case, Passed, cases
from evalstop_lab.backtest.figures import Summary, difference, summary
from evalstop_lab.errors import UnreadableInput, UnusableArguments
from evalstop_lab.replay import Run, Runs, Troubles, load_policy, read
from evalstop_lab.replay.command import report_conflicts
from evalstop_lab.replay.sources import add_policy_options, add_source_parser, asked_by
from evalstop_lab.report import format_percent, new_table, to_json_values
from evalstop_lab.worlds.scoring import Share

MOST_TROUBLES_SHOWN = 20

EXAMPLES = """examples:
  evalstop-lab backtest runs.jsonl --policy default --against paper
  evalstop-lab backtest mlflow+http://mlflow:5000?experiment=rlhf --policy default --html mlflow.html
  evalstop-lab backtest wandb/ --policy our-policy.json --against default --eval eval/score --gpus 8

"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `backtest` to the command line."""
    summary = "backtest policies on past runs: what each would have stopped and saved, and which stops are wrong"
    parser = add_source_parser(subparsers, "backtest", summary, EXAMPLES)
    add_policy_options(parser)
    parser.add_argument("--against", metavar="NAME|FILE", help="another policy, compared on the same runs")
    parser.add_argument("--gpus", type=positive_number, help="GPUs of runs that do not report theirs")
    parser.add_argument(
        "--html", type=Path, default=Path("backtest.html"), metavar="FILE", help="default: backtest.html"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object instead of a table, and write no page")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run `evalstop-lab backtest`; return its exit code."""
    policies = _policies(args.policy, args.against)
    runs, troubles = history(args)
    for item in runs.by_name.values():
        item.gpus = args.gpus if item.gpus is None else item.gpus
    found = cases(list(runs.by_name.values()), policies, args.jobs)
    labels = list(policies)
    report = report_of(found, labels, troubles.found, "evalstop-lab " + shlex.join(sys.argv[1:]))
    if args.json:
        sys.stdout.write(json.dumps(report | {"cases": [_case(case) for case in found]}, allow_nan=False) + "\n")
        return 0
    try:
        page.write(args.html, report, found, labels)
    except OSError as error:
        raise UnusableArguments(f"--html {args.html}: {error.strerror}; choose a writable file.") from error
    console = Console()
    console.print(_table(report))
    console.print(f"Every run, worst first: {args.html}", highlight=False, soft_wrap=True)
    return 0


def history(args: argparse.Namespace) -> tuple[Runs, Troubles]:
    """The settled runs of the sources, read with these options, and what could not be read.

    Raises UnreadableInput if there are no runs.
    """
    troubles = Troubles(strict=False)
    runs = read(args.sources, asked_by(args), troubles)
    report_conflicts(runs.settle())
    for error in troubles.found[:MOST_TROUBLES_SHOWN]:
        sys.stderr.write(f"evalstop-lab: {error}\n")
    if len(troubles.found) > MOST_TROUBLES_SHOWN:
        sys.stderr.write(f"evalstop-lab: and {len(troubles.found) - MOST_TROUBLES_SHOWN} more like these\n")
    runs.by_name = {name: item for name, item in runs.by_name.items() if item.series}
    if not runs.by_name:
        raise UnreadableInput(args.sources[0], "it has no readable run")
    for item in runs.by_name.values():
        item.total_steps = item.total_steps or args.total_steps
    return runs, troubles


def report_of(
    found: Sequence[Case], labels: Sequence[str], troubles: Sequence[UnreadableInput], command: str
) -> dict[str, Any]:
    """The report on all runs, as plain values; NaN is null."""
    runs = [case.run for case in found]
    summaries = [summary(found, label) for label in labels]
    report: dict[str, Any] = {
        "command": command,
        "runs": len(found),
        "truths": {str(truth): sum(case.found.run_outcome is truth for case in found) for truth in RunOutcome},
        "without_eval": sum(MetricRole.EVAL not in run.series for run in runs),
        "without_gpu_hours": sum(run.gpu_hours is None for run in runs),
        "gpu_hours": sum(run.gpu_hours or 0.0 for run in runs),
        "roles": _roles(runs),
        "policies": [_summary(item) for item in summaries],
        "difference": asdict(difference(found, *labels)) if len(labels) == 2 else None,
        "troubles": [str(error) for error in troubles],
    }
    whole: dict[str, Any] = to_json_values(report)
    return whole | {"story": [_story(item, len(found)) for item in summaries]}


def _policies(name: str, against: str | None) -> dict[str, Policy]:
    policies = {(first := load_policy(name)).name: first}
    if against is not None:
        second = load_policy(against)
        policies[second.name if second.name != first.name else f"{second.name} (against)"] = second
    return policies


def _roles(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Which columns had which role, in how many runs."""
    count = Counter(
        (str(role), run.roles.columns[role], run.roles.sign(role) < 0) for run in runs for role in run.series
    )
    return [
        {"role": role, "metric": metric, "minimized": minimized, "runs": number}
        for (role, metric, minimized), number in sorted(count.items(), key=lambda item: (item[0][0], -item[1]))
    ]


def _summary(item: Summary) -> dict[str, Any]:
    shares = {name: _share(getattr(item, name)) for name in ("precision", "false_stops", "caught")}
    return asdict(item) | {"stopped": item.stopped} | shares


def _share(share: Share) -> dict[str, Any]:
    return asdict(share) | {"value": share.value}


def _story(item: Summary, runs: int) -> str:
    """The figures as sentences."""
    if not item.stopped:
        return f"{item.policy} would have stopped none of {_counted(runs)}."
    right, wrong, unknown = (
        item.stops[said] for said in (DecisionOutcome.RIGHT, DecisionOutcome.WRONG, DecisionOutcome.UNKNOWN)
    )
    return (
        f"{item.policy} would have stopped {item.stopped:,} of {_counted(runs)}: {right:,} rightly, {wrong:,} wrongly"
        f" as far as their own later evals show, {unknown:,} too late or too close to tell. Right stops would have"
        f" saved {format_percent(item.saved.value)} of all steps a run;"
        f" wrong ones would have cut off {format_percent(item.cut.value)}."
    )


def _counted(runs: int) -> str:
    return f"{runs:,} run" if runs == 1 else f"{runs:,} runs"


def _case(case: Case) -> dict[str, Any]:
    document: dict[str, Any] = to_json_values(
        {
            "run": case.run.name,
            "truth": case.found.run_outcome,
            "why": case.found.reason,
            "turn_step": case.turn_step,
            "last_step": case.run.last_step,
            "gpu_hours": case.run.gpu_hours,
            "policies": {label: _passed(item) for label, item in case.passed.items()},
        }
    )
    return document


def _passed(item: Passed) -> dict[str, Any]:
    judged = item.judged
    return {
        "stop_step": judged.stop_step,
        "suspect_step": judged.suspect_step,
        "best_step": judged.best_step,
        "said": item.said,
        "saved": item.saved,
        "gpu_hours": item.gpu_hours,
        "later": item.later,
        "reason": judged.reason,
    }


ROWS = (
    ("false_stops", "healthy runs stopped wrongly"),
    ("caught", "turned runs stopped rightly"),
    ("saved", "steps saved by right stops"),
    ("cut", "steps cut off by wrong stops"),
)
"""The compared figures: the field of `Summary` and `Difference`, and its label."""


def _table(report: Mapping[str, Any]) -> Table:
    truths = report["truths"]
    caption = (
        f"{_counted(report['runs'])}: {truths['turned']:,} turned, {truths['healthy']:,} healthy,"
        f" {truths['undecided']:,} undecided"
    )
    columns = [item["policy"] for item in report["policies"]] + (["difference"] if report["difference"] else [])
    table = new_table("backtest", "", *columns, caption=caption)
    for word in ("stopped", *DecisionOutcome):
        cells = (item["stopped"] if word == "stopped" else item["stops"][word] for item in report["policies"])
        label = "runs stopped" if word == "stopped" else f"  {word}"
        table.add_row(label, *(f"{cell:,}" for cell in cells), *([""] if report["difference"] else []))
    for name, words in ROWS:
        columns = [*report["policies"], *([report["difference"]] if report["difference"] else [])]
        table.add_row(words, *(_interval(item[name]) for item in columns))
    return table


def _interval(cell: Mapping[str, Any]) -> str:
    if cell["value"] is None or not cell["n"]:
        return "-"
    if cell["low"] == cell["high"]:  # the bootstrap gives no interval for identical runs
        return format_percent(cell["value"])
    return f"{format_percent(cell['value'])} [{format_percent(cell['low'])}, {format_percent(cell['high'])}]"
