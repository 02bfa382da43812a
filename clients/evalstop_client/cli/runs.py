"""`evalstop runs`: list, show, follow, stop."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import deque
from collections.abc import Iterator
from itertools import islice

from evalstop_client.cli.command import (
    OK,
    Shown,
    Subcommands,
    add_command,
    add_group,
    connect,
    format_number,
    parse_count,
    print_facts,
    print_json,
    show_list,
    show_result,
)
from evalstop_client.errors import ConfigurationError
from evalstop_client.latest_answer import ENDED
from evalstop_client.reading.records import ObservationRecord, RunRecord
from evalstop_client.settings import parse_pairs

POLL_SECONDS = 2.0

FILTERS = {
    "name": "part of the name",
    "status": "running, parked, completed, failed, stopped or lost",
    "verdict": "continue, suspect or stop",
    "policy": "name of the policy",
    "mode": "shadow or enforce",
    "owner": "the owner",
    "group": "the group",
    "since": "opened since: 12h, 30d, or a time",
}
"""Help of the options of `ls` that are passed on to `Api.runs`."""


def add_to(commands: Subcommands, text: str) -> None:
    verbs = add_group(commands, "runs", text)
    listing = add_command(verbs, "ls", list_runs, "list")
    for name, description in FILTERS.items():
        listing.add_argument(f"--{name}", help=description)
    listing.add_argument("--tag", action="append", default=[], help="only runs with this tag")
    listing.add_argument("--label", action="append", default=[], metavar="NAME=VALUE", help="only runs with this label")
    listing.add_argument(
        "--limit", type=parse_count, default=50, metavar="N", help="maximum number (default: %(default)s)"
    )
    shown = add_command(verbs, "show", show_run)
    tail = add_command(verbs, "tail", tail_run)
    tail.add_argument("--metric", help="metric to print (default: the eval)")
    tail.add_argument(
        "-n", "--lines", type=parse_count, default=10, help="number of past values to print (default: %(default)s)"
    )
    tail.add_argument("-f", "--follow", action="store_true", help="print new values until the run has ended")
    stop = add_command(verbs, "stop", stop_run)
    stop.add_argument("--reason", required=True, help="recorded with the decision")
    for command in (shown, tail, stop):
        command.add_argument("run", metavar="RUN", help="its name or id")


def list_runs(options: argparse.Namespace) -> int:
    """List runs, newest first."""
    filters = {name: getattr(options, name) for name in FILTERS}
    table = connect(options).runs(**filters, tags=options.tag, labels=dict(parse_pairs(options.label, "label")))
    runs = list(islice(table, options.limit))
    columns = ("name", "status", "mode", "policy", "step", "verdict", "decision", "best step", "best score", "opened")
    return show_list(options, [run.document for run in runs], columns, map(_list_cells, runs))


def show_run(options: argparse.Namespace) -> int:
    """Show a run: how it is watched, its verdict, decision and best checkpoint."""
    run = connect(options).run(options.run)
    if options.json:
        print_json(run.document)
        return OK
    best, decision = run.best_checkpoint, run.decision
    roles = ", ".join(f"{name} ({role['role']})" for name, role in run.metrics.items())
    print_facts(
        [
            ("name", run.name),
            ("page", run.url),
            ("status", f"{run.status}, attempt {run.attempt}"),
            ("mode", run.mode),
            ("policy", run.policy),
            ("metrics", roles or "none has a role"),
            ("step", f"{run.last_step or 0} of {run.total_steps or 'an unknown number'}"),
            ("verdict", f"{run.verdict}: {run.verdict.reason}"),
            ("decision", f"{decision}: {decision.reason}" if decision else "none"),
            ("decision id", decision.id if decision else None),
            ("best checkpoint", f"step {best.step}, score {format_number(best.score)}, {best.uri}" if best else "none"),
            ("owner", run.owner),
            ("group", run.group),
            ("tags", ", ".join(run.tags) or None),
            ("notes", run.notes or None),
            ("labels", ", ".join(f"{name}={value}" for name, value in run.labels.items()) or None),
            ("opened", run.created_at),
            ("ended", run.ended_at),
        ]
    )
    return OK


def tail_run(options: argparse.Namespace) -> int:
    """Print the last evals of a run and, with --follow, new ones."""
    run = connect(options).run(options.run)
    metric = options.metric or run.eval_metric
    if metric is None:
        raise ConfigurationError(f"metric: no metric of {run.name!r} has the role eval; name one with --metric.")
    last = deque(run.history(metric), maxlen=options.lines + 1)
    step = last[-1].step if last else None
    for item in list(last)[-options.lines :] if options.lines else ():
        _print_observation(item, options)
    if options.follow:
        for item in _follow_run(run, metric, step):
            _print_observation(item, options)
    return OK


def stop_run(options: argparse.Namespace) -> int:
    """Stop a run now, regardless of its policy and mode."""
    run = connect(options).run(options.run).stop(options.reason)
    return show_result(options, run.document, f"the stop of {run.name} is {run.decision}")


def _list_cells(run: RunRecord) -> tuple[Shown, ...]:
    best = run.best_checkpoint
    return (
        run.name,
        run.status,
        run.mode,
        run.policy,
        run.last_step,
        run.verdict.verdict,
        run.decision.state if run.decision else None,
        best.step if best else None,
        best.score if best else None,
        run.created_at,
    )


def _follow_run(run: RunRecord, metric: str, step: int | None) -> Iterator[ObservationRecord]:
    """Yield observations after a step, or all, as they arrive, until the run has ended."""
    while True:
        ended = run.refresh().status in ENDED  # read the status first: observations before the end must still be read
        for item in run.history(metric, after_step=step):
            step = item.step
            yield item
        if ended:
            return
        time.sleep(POLL_SECONDS)


def _print_observation(item: ObservationRecord, options: argparse.Namespace) -> None:
    if options.json:
        value = item.value if math.isfinite(item.value) else json.dumps(item.value)  # "NaN", as the API writes it
        print_json(item.to_row() | {"value": value})
    else:
        stderr = f" ± {format_number(item.stderr)}" if item.stderr is not None else ""
        print(f"{item.step:>10}  {format_number(item.value)}{stderr}", flush=True)
