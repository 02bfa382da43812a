"""`evalstop doctor`: why was it not stopped?"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import NamedTuple

from evalstop_client.cli.command import FAILED, OK, Subcommands, add_command, connect, print_table, show_result
from evalstop_client.errors import KeyRefused, ServiceAway
from evalstop_client.reading.api import Api
from evalstop_client.reading.records import RunRecord
from evalstop_client.receivers.stop.job_control import PARK_REQUESTED, STOP_ESCALATED, STOP_REQUESTED

FINE, NOTE, BLOCKS = "ok", "note", "blocks"

OWN_PREFIX = "evalstop/"
"""The names of metrics that the service itself stores begin with this."""

BLOCKED = ("shadow", "held_out", "on_hold", "escalated", "failed", "vetoed", "undone")
"""The states in which a decision ends no job."""


class Check(NamedTuple):
    """One check, what it found (`ok`, `note` or `blocks`), and in words."""

    name: str
    finding: str
    text: str


def add_doctor(commands: Subcommands, text: str) -> None:
    command = add_command(commands, "doctor", examine)
    command.add_argument("run", nargs="?", metavar="RUN", help="its name or id (default: the newest running one)")


def examine(options: argparse.Namespace) -> int:
    """Explain why a run is not stopped: service, key, project, mode, eval, checkpoint and decision.

    Exits with 1 if something blocks a stop.
    """
    api, run = connect(options), None
    checks: list[Check] = []
    try:
        checks += _check_project(api)
        run = api.run(options.run) if options.run is not None else _find_newest(api)
        checks += [Check("run", BLOCKS, "the project has no run yet")] if run is None else _check_run(run, api)
    except (ServiceAway, KeyRefused) as error:
        checks.append(Check("service" if isinstance(error, ServiceAway) else "key", BLOCKS, error.detail))
    blocking = dict.fromkeys(check.name for check in checks if check.finding == BLOCKS)
    found = [check._asdict() for check in checks]
    if not options.json:
        print_table(found)
    document = {"run": run.name if run else None, "blocked": bool(blocking), "checks": found}
    show_result(options, document, f"blocked by: {', '.join(blocking)}" if blocking else "nothing blocks a stop")
    return FAILED if blocking else OK


def _find_newest(api: Api) -> RunRecord | None:
    """The newest running run, else the newest of all."""
    return next(iter(api.runs(status="running")), None) or next(iter(api.runs()), None)


def _check_project(api: Api) -> Iterator[Check]:
    connection = api.connection
    key = connection.get("/key")
    yield Check("service", FINE, connection.url)
    until = f", until {key['expires_at']}" if key["expires_at"] else ""
    yield Check("key", FINE, f"{key['name']}: {', '.join(key['scopes'])}{until}")
    project = connection.get("/project")
    if project["paused_at"] is not None:
        yield Check("project", BLOCKS, f"paused by {project['paused_by']}: `evalstop resume`")
    if project["max_mode"] == "shadow":
        yield Check("project", BLOCKS, "max_mode is shadow: no run can be stopped")
    else:
        yield Check("project", FINE, f"max_mode is enforce, default_mode {project['default_mode']}")


def _check_run(run: RunRecord, api: Api) -> Iterator[Check]:
    yield Check("run", FINE if run.ended_at is None else NOTE, f"{run.name}: {run.status}, {run.url}")
    policy = f"{run.policy['name']}@{run.policy['version']}"
    yield Check("mode", BLOCKS if run.mode == "shadow" else FINE, f"{run.mode}, policy {policy}")
    yield _check_eval(run, api)
    if not run.length_known:
        planned, last = run.total_steps, run.last_step
        early = "an early end, or " if planned and last < planned else ""
        doubt = f"the last step is {last} of {planned}: {early}is the plan in another unit than the steps?"
        yield Check("length", NOTE, doubt if planned else "unknown, so decisions come later: total_steps=")
    checkpoints = len(api.connection.get(f"/runs/{run.id}/checkpoints")["items"])
    yield Check("checkpoint", FINE if checkpoints else NOTE, f"{checkpoints or 'none'} registered")
    if others := run.job_runs:
        text = f"{len(others)} other live run{'s' if len(others) > 1 else ''} in this job: {', '.join(others[:8])}"
        yield Check("job", NOTE, f"{text}; a stop waits for them")
    health = run.health or {}
    if failure := health.get("detector_failure"):
        yield Check("detectors", BLOCKS, failure)
    if health.get("state", "alive") != "alive":
        yield Check("reports", NOTE, f"{health['state']}: the last report was at {health['last_report_at']}")
    if decision := run.decision:
        guards = f" ({', '.join(decision.guard_kinds)})" if decision.guard_kinds else ""
        finding = BLOCKS if decision.state in BLOCKED else NOTE
        until = f" until {decision.due_at}" if decision.state == "pending" else ""
        yield Check("decision", finding, f"{decision.state}{guards}{until}: {decision.state_reason}")
        yield from _check_delivery(run, api)
    else:
        yield Check("verdict", NOTE, f"{run.verdict}: {run.verdict.reason}")


def _check_delivery(run: RunRecord, api: Api) -> Iterator[Check]:
    """The last stop that an endpoint accepted; a cancelled or waiting delivery says nothing about the receiver."""
    delivered = api.connection.get("/deliveries", {"run_id": run.id, "state": "delivered"})["items"]
    for item in delivered:  # newest first
        if item["event_type"] in (STOP_REQUESTED, STOP_ESCALATED, PARK_REQUESTED):
            yield Check("delivery", NOTE, f"{item['event_type']} was delivered to {item['url']}, {item['settled_at']}")
            return


def _check_eval(run: RunRecord, api: Api) -> Check:
    metrics = api.connection.get(f"/runs/{run.id}/metrics")["items"]
    name, counts = run.eval_metric, {metric["metric"]: metric["count"] for metric in metrics}
    unwatched = [
        metric["metric"] for metric in metrics if metric["role"] is None and not metric["metric"].startswith(OWN_PREFIX)
    ]
    others = f"; not watched: {', '.join(unwatched[:8])}" if unwatched else ""
    if name is None:
        return Check("eval", BLOCKS, f"no metric has the role eval{others}")
    if name not in counts:
        return Check("eval", BLOCKS, f"{name} has no value yet{others}")
    origins = run.recognition["origins"]
    evals = [metric for metric, role in run.metrics.items() if role["role"] == "eval"]
    if guessed := ", ".join(metric for metric in evals if origins.get(metric) == "guessed"):
        return Check("eval", BLOCKS, f"the role of {guessed} was guessed, and a guess cannot stop the run: confirm it")
    name = name if len(evals) == 1 else f"{name}, the mean of {', '.join(evals)}"
    better = "lower" if len(evals) == 1 and run.metrics[name]["direction"] == "minimize" else "higher"
    return Check("eval", FINE, f"{name}, {better} is better: {counts[run.eval_metric or name]} values{others}")
