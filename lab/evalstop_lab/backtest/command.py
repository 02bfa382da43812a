"""`evalstop-lab backtest`: the past runs that a policy would have stopped, the savings, and which stops are wrong."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from evalstop_detectors import MetricRole, Policy
from evalstop_service.domain.statuses import DecisionOutcome, RunOutcome
from rich.console import Console
from rich.table import Table

from evalstop_lab.arguments import positive_number
from evalstop_lab.backtest import page
from evalstop_lab.backtest.cases import (
    FIGURES,
    Case,
    compare_policies,
    encode_case,
    explain_early_end,
    infer_early_stopping,
    judge_cases,
    summarize_policy,
)
from evalstop_lab.errors import UnreadableInput, UnusableArguments
from evalstop_lab.replay.command import describe_guesses, load_policy
from evalstop_lab.replay.runs import Run
from evalstop_lab.replay.sources import add_policy_options, add_source_options, read_history
from evalstop_lab.report import format_figure, format_percent, new_table, to_json_values
from evalstop_lab.worlds.scoring import Figure

EXAMPLES = """examples:
  evalstop-lab backtest runs.jsonl --policy default --against paper
  evalstop-lab backtest mlflow+http://mlflow:5000?experiment=rlhf --policy default --html mlflow.html
  evalstop-lab backtest wandb/ --policy our-policy.json --against default --eval eval/score --gpus 8

"""


def add_options(parser: argparse.ArgumentParser) -> None:
    add_source_options(parser, EXAMPLES)
    add_policy_options(parser)
    parser.add_argument("--against", metavar="NAME|FILE", help="another policy, compared on the same runs")
    parser.add_argument("--gpus", type=positive_number, help="GPUs of runs that do not report theirs")
    parser.add_argument(
        "--html",
        type=Path,
        default=Path("backtest.html"),
        metavar="FILE",
        help="page to write (default: backtest.html)",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object instead of a table, and write no page")


def run(args: argparse.Namespace) -> int:
    policies = _load_policies(args.policy, args.against)
    runs, errors = read_history(args)
    infer_early_stopping(runs)
    for item in runs:
        item.gpus = args.gpus if item.gpus is None else item.gpus
    guessed = [run for run in runs if run.is_guessed]
    cases = judge_cases([run for run in runs if not run.is_guessed], policies, args.jobs)
    labels = list(policies)
    report = build_report(cases, labels, errors, "evalstop-lab " + shlex.join(sys.argv[1:]))
    report["guessed"] = _count_guessed(guessed, policies, args.jobs)
    if args.json:
        sys.stdout.write(json.dumps(report | {"cases": [encode_case(case) for case in cases]}, allow_nan=False) + "\n")
        return 0
    try:
        page.write_page(args.html, report, cases, labels)
    except OSError as error:
        raise UnusableArguments(f"--html {args.html}: {error.strerror}; choose a writable file.") from error
    console = Console()
    console.print(_build_table(report))
    if guessed:
        stopped = ", ".join(f"{label} {count:,}" for label, count in report["guessed"]["stopped"].items())
        text = f"Not counted: {describe_guesses(guessed)}. Then would be stopped: {stopped}."
        console.print(text, highlight=False, soft_wrap=True, markup=False)
    if report["without_eval"]:
        console.print(
            f"{_format_runs(report['without_eval'])} without an eval, which no shipped policy stops;"
            " --eval COLUMN names it",
            highlight=False,
            soft_wrap=True,
        )
    console.print(f"Every run, worst first: {args.html}", highlight=False, soft_wrap=True)
    return 0


def build_report(
    cases: Sequence[Case], labels: Sequence[str], errors: Sequence[UnreadableInput], command: str
) -> dict[str, Any]:
    """The report on all runs, as plain values; NaN is null."""
    runs = [case.run for case in cases]
    summaries = [summarize_policy(cases, label) for label in labels]
    report: dict[str, Any] = {
        "command": command,
        "runs": len(cases),
        "truths": {str(truth): sum(case.assessment.run_outcome is truth for case in cases) for truth in RunOutcome},
        "ended_early": sum(
            bool(explain_early_end(case.run)) for case in cases if case.assessment.run_outcome is RunOutcome.UNDECIDED
        ),
        "without_eval": sum(MetricRole.EVAL not in run.series for run in runs),
        "without_gpu_hours": sum(run.gpu_hours is None for run in runs),
        "gpu_hours": sum(run.gpu_hours or 0.0 for run in runs),
        "roles": _list_roles(runs),
        "policies": [item | {"figures": _encode_figures(item["figures"])} for item in summaries],
        "difference": _encode_figures(compare_policies(cases, *labels)) if len(labels) == 2 else None,
        "read_errors": [str(error) for error in errors],
    }
    encoded: dict[str, Any] = to_json_values(report)
    return encoded


def _encode_figures(figures: Mapping[str, Figure]) -> dict[str, dict[str, Any]]:
    return {name: {"label": FIGURES[name].label} | asdict(figure) for name, figure in figures.items()}


def _count_guessed(runs: Sequence[Run], policies: Mapping[str, Policy], jobs: int | None) -> dict[str, Any]:
    """The runs that are judged on a guess, and how many of them each policy would stop once it is confirmed."""
    confirmed = [replace(run, roles=replace(run.roles, guessed=frozenset())) for run in runs]
    cases = judge_cases(confirmed, policies, jobs)
    stopped = {label: sum(case.outcomes[label].stop_step is not None for case in cases) for label in policies}
    return {"runs": len(runs), "stopped": stopped}


def _load_policies(name: str, against: str | None) -> dict[str, Policy]:
    policies = {(first := load_policy(name)).name: first}
    if against is not None:
        second = load_policy(against)
        policies[second.name if second.name != first.name else f"{second.name} (against)"] = second
    return policies


def _list_roles(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The columns, their roles, and the number of runs with each."""
    count = Counter(
        (str(role), name, run.roles.sign(role) < 0)
        for run in runs
        for role in run.series
        for name in [run.roles.eval_name if role is MetricRole.EVAL else run.roles.columns[role]]
    )
    return [
        {"role": role, "metric": metric, "minimized": minimized, "runs": number}
        for (role, metric, minimized), number in sorted(count.items(), key=lambda item: (item[0][0], -item[1]))
    ]


def _format_runs(runs: int) -> str:
    return f"{runs:,} run" if runs == 1 else f"{runs:,} runs"


def _build_table(report: Mapping[str, Any]) -> Table:
    truths = report["truths"]
    caption = (
        f"{_format_runs(report['runs'])}: {truths['turned']:,} turned, {truths['healthy']:,} healthy,"
        f" {truths['undecided']:,} undecided"
        + (f", {report['ended_early']:,} of them ended early" if report["ended_early"] else "")
    )
    columns = [item["policy"] for item in report["policies"]] + (["difference"] if report["difference"] else [])
    table = new_table("backtest", "", *columns, caption=caption)
    for row in ("stopped", *DecisionOutcome):
        cells = (item["stopped"] if row == "stopped" else item["stops"][row] for item in report["policies"])
        label = "runs stopped" if row == "stopped" else f"  {row}"
        table.add_row(label, *(f"{cell:,}" for cell in cells), *([""] if report["difference"] else []))
    compared = [*(item["figures"] for item in report["policies"]), *filter(None, [report["difference"]])]
    for name, item in FIGURES.items():
        table.add_row(item.label, *(_format_interval(figures[name]) for figures in compared))
    return table


def _format_interval(cell: Mapping[str, Any]) -> str:
    if cell["value"] is None or not cell["n"]:
        return "-"
    if cell["low"] == cell["high"]:  # there is no interval for one run, nor for identical ones
        return format_percent(cell["value"])
    return format_figure(cell)
