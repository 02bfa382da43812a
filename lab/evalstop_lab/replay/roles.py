"""`evalstop-lab roles`: explains which metrics of a log have which role."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from evalstop_detectors import MetricRole, RoleOrigin
from evalstop_detectors.roles.recognition import NO_EVAL
from rich.console import Console
from rich.table import Table
from rich.text import Text

from evalstop_lab.replay import Asked, Troubles
from evalstop_lab.replay.cells import NO_METRICS
from evalstop_lab.replay.sources import Log, add_source_parser, asked_by, choose, logs_of

EXAMPLES = """examples:
  evalstop-lab roles out/trainer_state.json
  evalstop-lab roles wandb/offline-run-20260101_120000-abc --json
  evalstop-lab roles mlflow+http://mlflow:5000?experiment=rlhf --eval exact_match

"""

ASKED, LITERAL, SAID = "an option says so", "it is called so", "its run says so"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `roles` to the command line."""
    summary = "explain a log: which metrics are the eval score, proxy, KL and loss, and why"
    parser = add_source_parser(subparsers, "roles", summary, EXAMPLES)
    parser.add_argument("--json", action="store_true", help="print one JSON object per kind of log instead of tables")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run `evalstop-lab roles`; return its exit code."""
    troubles = Troubles(strict=False)
    found = explained(args.sources, asked_by(args), troubles)
    for error in troubles.found:
        sys.stderr.write(f"evalstop-lab: {error}\n")
    for item in found:
        if args.json:
            sys.stdout.write(json.dumps(item) + "\n")
        else:
            _print(item)
    return 0 if found else 1


def explained(sources: Sequence[str], asked: Asked, troubles: Troubles) -> list[dict[str, Any]]:
    """The roles of the metrics of these sources; logs with the same metrics are explained once."""
    kinds: dict[tuple[frozenset[str], tuple[str, ...]], tuple[Log, int]] = {}
    with ExitStack() as stack:
        for log in (log for source in sources for log in logs_of(source, stack)):
            metrics = frozenset(log.metrics(troubles))
            if not metrics - NO_METRICS:
                continue
            said = () if log.roles is None else tuple(f"{a}={b}" for a, b in sorted(log.roles.columns.items()))
            first, count = kinds.get((metrics, said), (log, 0))
            kinds[metrics, said] = (first, count + 1)
    return [_explained(log, set(metrics), count, asked) for (metrics, _), (log, count) in kinds.items()]


def _explained(log: Log, metrics: set[str], count: int, asked: Asked) -> dict[str, Any]:
    roles, recognised = choose(asked, metrics, log.tags, log.roles)
    taken = {}
    for role, metric in roles.columns.items():
        if metric not in metrics:
            continue
        why = ASKED if role in asked.named else SAID if log.roles is not None else None
        why = why or (LITERAL if metric == role else recognised.reasons.get(metric, ""))
        direction = "minimize" if role is MetricRole.KL or metric in roles.minimized else "maximize"
        said = why in (ASKED, SAID, LITERAL)
        origin = RoleOrigin.DECLARED if said else recognised.origins.get(metric, RoleOrigin.DECLARED)
        taken[metric] = {"role": str(role), "direction": direction, "origin": str(origin), "reason": why}
    warnings = [words for words in recognised.warnings if words != NO_EVAL]
    if not any(item["role"] == MetricRole.EVAL for item in taken.values()):
        warnings.append(NO_EVAL)
    return {
        "log": str(log.place),
        "logs": count,
        "preset": recognised.preset,
        "step": roles.step,
        "roles": taken,
        "refused": {metric: reason for metric, reason in sorted(recognised.reasons.items()) if metric not in taken},
        "ignored": sorted(metrics - NO_METRICS - taken.keys() - recognised.reasons.keys()),
        "warnings": warnings,
    }


def _print(item: dict[str, Any]) -> None:
    console = Console()
    more = f" and {item['logs'] - 1:,} more with the same metrics" if item["logs"] > 1 else ""
    console.print(Text(item["log"] + more, style="bold"))
    preset = f"the names are those of {item['preset']}" if item["preset"] else "no trainer's own names were seen"
    console.print(Text(f"{preset}; steps are counted by {item['step']}"))
    table = Table()
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
        console.print(Text(f"not looked at: {names}"))
    for words in item["warnings"]:
        console.print(Text(f"Warning: {words}", style="yellow"))
