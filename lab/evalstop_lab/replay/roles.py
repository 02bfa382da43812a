"""`evalstop-lab roles`: explains which metrics of a log have which role."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from evalstop_detectors import ROLES, MetricRole, RoleOrigin
from evalstop_detectors.roles.recognition import NO_EVAL
from rich.console import Console
from rich.text import Text

from evalstop_lab.errors import UnreadableInput
from evalstop_lab.replay.folders import Findings
from evalstop_lab.replay.rows import NO_METRICS
from evalstop_lab.replay.runs import ReadErrors
from evalstop_lab.replay.sources import (
    Log,
    RequestedRoles,
    add_source_options,
    choose_roles,
    get_requested_roles,
    list_logs,
)
from evalstop_lab.report import new_table

EXAMPLES = """examples:
  evalstop-lab roles out/trainer_state.json
  evalstop-lab roles wandb/offline-run-20260101_120000-abc --json
  evalstop-lab roles mlflow+http://mlflow:5000?experiment=rlhf --eval exact_match

"""

REQUESTED, NAMED, DECLARED = "set by an option", "named like the role", "declared by the run"


def add_options(parser: argparse.ArgumentParser) -> None:
    add_source_options(parser, EXAMPLES)
    parser.add_argument("--json", action="store_true", help="print one JSON object per kind of log instead of tables")


def run(args: argparse.Namespace) -> int:
    errors: ReadErrors = []
    explanations = explain_roles(args.sources, get_requested_roles(args), errors)
    for error in errors:
        sys.stderr.write(f"evalstop-lab: {error}\n")
    for item in explanations:
        if args.json:
            sys.stdout.write(json.dumps(item) + "\n")
        else:
            _print_explanation(item)
    return 0 if explanations else 1


def explain_roles(sources: Sequence[str], requested: RequestedRoles, errors: ReadErrors) -> list[dict[str, Any]]:
    """The roles of the metrics of these sources; logs with the same metrics are explained once."""
    kinds: dict[tuple[frozenset[str], tuple[str, ...]], tuple[Log, int]] = {}
    with ExitStack() as stack:
        for log in (log for source in sources for log in list_logs(source, stack, Findings())):
            try:
                metrics = frozenset(log.metrics(errors))
            except UnreadableInput as error:
                errors.append(error)
                continue
            if not metrics - NO_METRICS:
                continue
            declared = () if log.roles is None else tuple(f"{a}={b}" for a, b in sorted(log.roles.columns.items()))
            first, count = kinds.get((metrics, declared), (log, 0))
            kinds[metrics, declared] = (first, count + 1)
    return [_explain_log(log, set(metrics), count, requested) for (metrics, _), (log, count) in kinds.items()]


def _explain_log(log: Log, metrics: set[str], count: int, requested: RequestedRoles) -> dict[str, Any]:
    roles, recognised = choose_roles(log, metrics, requested)
    chosen = {}
    for role, metric in roles.cells:
        if metric not in metrics or role is MetricRole.LEARNING_RATE:  # it has no role in the service
            continue
        reason = REQUESTED if role in requested.named else DECLARED if log.roles is not None else None
        reason = reason or (NAMED if metric == role else recognised.reasons.get(metric, ""))
        direction = "minimize" if ROLES[role].keeps_sign or metric in roles.minimized else "maximize"
        declared = reason in (REQUESTED, DECLARED, NAMED)
        origin = RoleOrigin.DECLARED if declared else recognised.origins.get(metric, RoleOrigin.DECLARED)
        chosen[metric] = {"role": str(role), "direction": direction, "origin": str(origin), "reason": reason}
    warnings = [warning for warning in recognised.warnings if warning != NO_EVAL]
    if not any(item["role"] == MetricRole.EVAL for item in chosen.values()):
        warnings.append(NO_EVAL)
    return {
        "log": str(log.place),
        "logs": count,
        "preset": recognised.preset,
        "step": roles.step,
        "roles": chosen,
        "refused": {metric: reason for metric, reason in sorted(recognised.reasons.items()) if metric not in chosen},
        "ignored": sorted(metrics - NO_METRICS - chosen.keys() - recognised.reasons.keys()),
        "warnings": warnings,
    }


def _print_explanation(item: dict[str, Any]) -> None:
    console = Console()
    suffix = f" and {item['logs'] - 1:,} more with the same metrics" if item["logs"] > 1 else ""
    console.print(Text(item["log"] + suffix, style="bold"))
    preset = f"metric names of {item['preset']}" if item["preset"] else "no metric names of a known trainer"
    console.print(Text(f"{preset}; steps: {item['step']}"))
    table = new_table(None)
    for heading in ("metric", "role", "better", "origin", "why"):
        table.add_column(heading, overflow="fold")
    for metric, role in item["roles"].items():
        better = "lower" if role["direction"] == "minimize" else "higher"
        table.add_row(Text(metric), role["role"], better, role["origin"], Text(role["reason"]))
    for metric, reason in item["refused"].items():
        table.add_row(Text(metric), "-", "", "", Text(reason))
    console.print(table)
    if item["ignored"]:
        names = ", ".join(item["ignored"][:20]) + (" ..." if len(item["ignored"]) > 20 else "")
        console.print(Text(f"ignored: {names}"))
    for warning in item["warnings"]:
        console.print(Text(f"Warning: {warning}", style="yellow"))
