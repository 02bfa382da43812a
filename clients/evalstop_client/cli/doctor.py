"""`evalstop doctor`: why was it not stopped?"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple
from urllib.parse import quote

from evalstop_client.cli.command import FAILED, OK, Subcommands, add_command, connect, print_json, print_table
from evalstop_client.errors import KeyRefused, NotFound, ServiceAway
from evalstop_client.reading.api import Api
from evalstop_client.reading.connection import Connection
from evalstop_client.reading.records import DecisionRecord, RunRecord
from evalstop_client.service import Json

STOP = "run.stop_requested"

OWN_PREFIX = "evalstop/"
"""The names of metrics that the service itself stores begin with this."""


class Finding(StrEnum):
    """The result of a check: `blocks` prevents a stop, `unknown` could not be checked."""

    OK = "ok"
    NOTE = "note"
    BLOCKS = "blocks"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Check:
    """One check: its result, and what to do about it."""

    name: str
    finding: Finding
    text: str
    advice: str = ""


class EndpointFacts(NamedTuple):
    """An endpoint, and the latest delivery to it; None if there was none."""

    endpoint: Json
    delivery: Json | None


@dataclass(frozen=True)
class Facts:
    """What the service reports. `run`: None if the project has none; `endpoints`: None without the scope admin.

    `stops_despite`: the guards that the run's policy overrides.
    """

    url: str
    key: Json
    project: Json
    run: RunRecord | None
    metrics: Sequence[Json]
    checkpoints: int
    stage: Json | None
    stops_despite: Sequence[str]
    endpoints: Sequence[EndpointFacts] | None


DECIDED = {
    "shadow": (Finding.BLOCKS, "it is only recorded: run, project or policy is in shadow"),
    "held_out": (
        Finding.BLOCKS,
        "`evalstop runs stop`, or a lower held_out_share: this run continues as a random hold-out",
    ),
    "on_hold": (Finding.BLOCKS, "`evalstop decisions release` carries it out despite its guards"),
    "pending": (
        Finding.NOTE,
        "it is sent when the veto window ends, and can be vetoed until a receiver or the trainer has it",
    ),
    "requested": (Finding.NOTE, "waiting for a receiver, or for the trainer to read should_stop"),
    "acknowledged": (Finding.NOTE, "the receiver is carrying it out"),
    "escalated": (Finding.BLOCKS, "it was not confirmed in time: check that the receiver runs and finds the job"),
    "parked": (Finding.NOTE, "it resumes once the eval recovers, or with `evalstop decisions undo`"),
    "failed": (Finding.BLOCKS, "no receiver could end or park the job: do it manually"),
    "vetoed": (Finding.BLOCKS, "a person vetoed it; `evalstop runs stop` stops the run"),
    "undone": (Finding.BLOCKS, "a person undid it; `evalstop runs stop` stops the run"),
    "moot": (Finding.NOTE, "the run ended or resumed before the stop was received"),
    "confirmed": (Finding.OK, ""),
    "obeyed": (Finding.OK, ""),
}
"""Result and advice by the state of a decision."""


def diagnose(facts: Facts) -> list[Check]:
    return [*_check_access(facts), *_check_project(facts), *_check_run(facts), *_check_endpoints(facts)]


def _check_access(facts: Facts) -> Iterator[Check]:
    yield Check("service", Finding.OK, facts.url)
    until = f", until {facts.key['expires_at']}" if facts.key["expires_at"] else ""
    yield Check("key", Finding.OK, f"{facts.key['name']}: {', '.join(facts.key['scopes'])}{until}")


def _check_project(facts: Facts) -> Iterator[Check]:
    project = facts.project
    if project["paused_at"] is not None:
        paused = f"paused by {project['paused_by']}: {project['paused_reason'] or 'no reason given'}"
        yield Check("project", Finding.BLOCKS, paused, "`evalstop project resume`")
    if project["max_mode"] == "shadow":
        text = "max_mode is shadow: no run can be stopped"
        yield Check("project", Finding.BLOCKS, text, "`evalstop project set max_mode=enforce`, by an admin")
    else:
        yield Check("project", Finding.OK, f"max_mode is enforce, default_mode {project['default_mode']}")
    if project["held_out_share"]:
        yield Check(
            "hold-outs", Finding.NOTE, f"{100 * project['held_out_share']:.3g} % of stops are held out at random"
        )


def _check_run(facts: Facts) -> Iterator[Check]:
    run = facts.run
    if run is None:
        yield Check("run", Finding.BLOCKS, "the project has no run yet", "connect a trainer: evalstop.init(...)")
        return
    over = run.ended_at is not None
    yield Check("run", Finding.NOTE if over else Finding.OK, f"{run.name}: {run.status}, {run.url}")
    if run.mode == "shadow":
        advice = "open it with mode=enforce, or `evalstop project set default_mode=enforce` for future runs"
        yield Check("mode", Finding.BLOCKS, "shadow: stops are only recorded", advice)
    else:
        yield Check("mode", Finding.OK, run.mode)
    yield _check_policy(run, facts.stage)
    yield from _check_eval(run, facts.metrics)
    if run.document["length_known"]:
        yield Check("length", Finding.OK, f"{run.total_steps} steps are planned")
    else:
        yield Check("length", Finding.NOTE, "unknown or exceeded: decisions come later", "total_steps=")
    if facts.checkpoints == 0:
        text = "none is registered: after a stop there would be nothing to ship"
        yield Check("checkpoint", _guarded(facts, "no_checkpoint"), text, "run.checkpoint(uri, step=...)")
    else:
        yield Check("checkpoint", Finding.OK, f"{facts.checkpoints} registered")
    if others := run.document.get("job_runs"):  # an older service does not tell
        text = f"{len(others)} other live run{'s' if len(others) > 1 else ''} in this job: {', '.join(others[:8])}"
        yield Check("job", Finding.NOTE, text, "a stop waits for them, unless the run has a Slurm step or process")
    yield from _check_health(facts, run)
    yield from _check_decision(run)


def _check_policy(run: RunRecord, stage: Json | None) -> Check:
    version = run.policy.partition("@")[2]
    if stage is None:
        return Check("policy", Finding.OK, f"{run.policy}; no rollout stage limits it")
    if str(stage["version"]) != version:
        text = f"{run.policy}: version {stage['version']} has the rollout stage, others are in shadow"
        return Check("policy", Finding.BLOCKS, text, "see the policy's page")
    if stage["stage"] == "shadow":
        text = f"{run.policy}: its rollout stage is shadow until its precision is proven"
        return Check("policy", Finding.BLOCKS, text, "see the policy's page")
    canary = f", {stage['canary_share']:.3g} of its stops are carried out" if stage["stage"] == "canary" else ""
    return Check("policy", Finding.OK, f"{run.policy}: its rollout stage is {stage['stage']}{canary}")


def _check_eval(run: RunRecord, metrics: Sequence[Json]) -> Iterator[Check]:
    name = run.eval_metric
    counts = {metric["metric"]: metric["count"] for metric in metrics}
    unwatched = [
        metric["metric"] for metric in metrics if metric["role"] is None and not metric["metric"].startswith(OWN_PREFIX)
    ]
    unwatched_text = f"; not watched: {', '.join(unwatched[:8])}" if unwatched else ""
    if name is None:
        yield Check(
            "eval", Finding.BLOCKS, f"no metric has the role eval{unwatched_text}", "declare it: eval=, or metrics="
        )
    elif name not in counts:
        yield Check(
            "eval", Finding.BLOCKS, f"{name} has no value yet{unwatched_text}", "log it, or declare the one logged"
        )
    elif run.document["recognition"]["origins"].get(name) == "guessed":
        text = f"the role of {name} was guessed from its name, and a guess cannot stop the run"
        yield Check("eval", Finding.BLOCKS, text, "confirm it on the run's page, or declare it")
    else:
        better = "lower" if run.metrics[name]["direction"] == "minimize" else "higher"
        yield Check("eval", Finding.OK, f"{name}, {better} is better: {counts[name]} values")
        if unwatched:
            yield Check("metrics", Finding.NOTE, f"not watched: {', '.join(unwatched[:8])}")


def _guarded(facts: Facts, guard: str) -> Finding:
    """The result of a check behind a guard."""
    return Finding.NOTE if guard in facts.stops_despite else Finding.BLOCKS


def _check_health(facts: Facts, run: RunRecord) -> Iterator[Check]:
    health = run.document["health"]
    if health is None:
        return
    if (failure := health.get("detector_failure")) is not None:  # an older service does not tell
        yield Check("detectors", Finding.BLOCKS, failure, "the run is not judged; the service's log has the reason")
    for fault in health["metric_faults"]:
        text = f"{fault['metric']}: {fault['reason']}"
        yield Check("metric", _guarded(facts, "metric_fault"), text, "a stop is on hold meanwhile")
    if health["state"] != "alive":
        text = f"{health['state']}: the last report was at {health['last_report_at']}"
        yield Check("reports", _guarded(facts, "stale"), text, "a stop is on hold until the run reports again")


def _check_decision(run: RunRecord) -> Iterator[Check]:
    decision = run.decision
    if decision is None:
        text = f"{run.verdict}: {run.verdict.reason}"
        yield Check("verdict", Finding.NOTE, text, "the policy does not want a stop")
    else:
        finding, advice = DECIDED.get(decision.state, (Finding.NOTE, ""))
        if "paused" in decision.guards:  # a release carries it out despite all other guards
            advice = "`evalstop project resume` lets it go on"
        elif decision.state == "requested" and run.ended_at is not None:
            advice = "the run has ended; waiting for a receiver to confirm that its job is gone"
        if decision.state == "moot":  # the guards until the end of the run are why it was not stopped
            for reason in _list_guards(decision):
                yield Check("guard", Finding.NOTE, f"the stop was on hold: {reason}")
        guards = f" ({', '.join(decision.guards)})" if decision.guards else ""
        yield Check("decision", finding, f"{decision.state}{guards}: {decision.reason}", advice)


def _list_guards(decision: DecisionRecord) -> list[str]:
    """The reasons of the guards that last put a decision on hold."""
    guards_by_hold = [
        change["details"].get("guards", []) for change in decision.document["history"] if change["state"] == "on_hold"
    ]
    return [guard["reason"] for guard in guards_by_hold[-1]] if guards_by_hold else []


def _check_endpoints(facts: Facts) -> Iterator[Check]:
    if facts.endpoints is None:
        yield Check("endpoints", Finding.UNKNOWN, "this key may not list them", "use a key with the scope admin")
        return
    receivers = [(endpoint, delivery) for endpoint, delivery in facts.endpoints if _is_receiver(endpoint)]
    if not receivers:
        text = "none receives stops: only a trainer that reads should_stop stops"
        yield Check("endpoints", Finding.NOTE, text, "`evalstop endpoint add URL` for a receiver")
    for endpoint, delivery in receivers:
        yield _check_endpoint(endpoint, delivery)


def _is_receiver(endpoint: Json) -> bool:
    """Whether it takes stops and is no channel of people's, such as Slack, which can end no job."""
    return endpoint["enabled"] and STOP in endpoint["event_types"] and endpoint["format"] == "standard"


def _check_endpoint(endpoint: Json, delivery: Json | None) -> Check:
    url, test = endpoint["url"], f"`evalstop endpoint test {endpoint['url']}`"
    if endpoint["open_until"] is not None or endpoint["failures"]:
        text = f"{url}: failures in a row: {endpoint['failures']}"
        if delivery is not None and delivery["last_error"] and delivery["state"] != "cancelled":
            text += f": {delivery['last_error']}"
        return Check("endpoints", Finding.BLOCKS, text, test)
    if delivery is None:
        return Check("endpoints", Finding.NOTE, f"{url} receives stops; nothing has been sent yet", test)
    if delivery["state"] == "dead":
        text = f"{url}: the last delivery failed for good: {delivery['last_error']}"
        return Check("endpoints", Finding.BLOCKS, text, test)
    return Check("endpoints", Finding.OK, f"{url} receives stops; the last delivery is {delivery['state']}")


def add_to(commands: Subcommands, text: str) -> None:
    command = add_command(commands, "doctor", examine)
    command.add_argument("run", nargs="?", metavar="RUN", help="its name or id (default: the newest running one)")


def examine(options: argparse.Namespace) -> int:
    """Explain why a run is not stopped: key, project, mode, policy, evals, guards, decision and endpoints.

    Exits with 1 if something blocks a stop.
    """
    api = connect(options)
    run: RunRecord | None = None
    try:
        facts = gather_facts(api, options.run)
        run, checks = facts.run, diagnose(facts)
    except ServiceAway as error:
        checks = [
            Check("service", Finding.BLOCKS, error.detail, "check that it is running and that EVALSTOP_URL is right")
        ]
    except KeyRefused as error:
        checks = [Check("key", Finding.BLOCKS, error.detail, f"set {options.key_env} to a key with the scope read")]
    blocked = any(check.finding is Finding.BLOCKS for check in checks)
    if options.json:
        print_json({"run": run.name if run else None, "blocked": blocked, "checks": [vars(check) for check in checks]})
    else:
        _print_checks(checks)
    return FAILED if blocked else OK


def gather_facts(api: Api, run_name: str | None) -> Facts:
    """Collect what the service reports about a run and what can stop it. Raises ApiError."""
    connection = api.connection
    run = api.run(run_name) if run_name is not None else _find_newest(api)
    path = f"/runs/{run.id}" if run is not None else None
    return Facts(
        url=connection.url,
        key=connection.get("/key"),
        project=connection.get("/project"),
        run=run,
        metrics=connection.get(f"{path}/metrics")["items"] if path else [],
        checkpoints=len(connection.get(f"{path}/checkpoints")["items"]) if path else 0,
        stage=_find_stage(connection, run.policy.partition("@")[0]) if run else None,
        stops_despite=_list_overridden(connection, run.policy) if run else (),
        endpoints=_list_endpoints(connection),
    )


def _find_newest(api: Api) -> RunRecord | None:
    """The newest running run, else the newest of all."""
    for status in ("running", None):
        for run in api.runs(status=status):
            return run
    return None


def _find_stage(connection: Connection, policy: str) -> Json | None:
    try:
        return connection.get(f"/policies/{quote(policy, safe='')}/rollout-stage")
    except NotFound:
        return None


def _list_overridden(connection: Connection, policy: str) -> list[str]:
    """The guards that a policy, as NAME@VERSION, overrides."""
    name, _, version = policy.partition("@")
    versions = connection.get(f"/policies/{quote(name, safe='')}")["items"]
    return [
        guard
        for stored in versions
        if str(stored["version"]) == version
        for guard in stored["document"].get("stops_despite", ())
    ]


def _list_endpoints(connection: Connection) -> list[EndpointFacts] | None:
    """The endpoints, each with its latest delivery."""
    try:
        endpoints = connection.get("/endpoints")["items"]
    except KeyRefused:
        return None
    return [_gather_endpoint_facts(connection, endpoint) for endpoint in endpoints if STOP in endpoint["event_types"]]


def _gather_endpoint_facts(connection: Connection, endpoint: Json) -> EndpointFacts:
    latest = connection.get("/deliveries", {"endpoint_id": endpoint["id"], "limit": 1})["items"]
    return EndpointFacts(endpoint, latest[0] if latest else None)


def _print_checks(checks: Sequence[Check]) -> None:
    print_table(
        ("check", "", "found", "what to do"),
        [(check.name, check.finding, check.text, check.advice) for check in checks],
        prose=("found", "what to do"),
    )
    blocking = [check.name for check in checks if check.finding is Finding.BLOCKS]
    print(f"blocked by: {', '.join(dict.fromkeys(blocking))}" if blocking else "nothing blocks a stop")
