"""`evalstop doctor`: why was it not stopped?"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from urllib.parse import quote

from evalstop_client.cli.command import FAILED, OK, Subcommands, add_command, connect
from evalstop_client.cli.diagnosis import STOP, Check, EndpointFacts, Facts, Finding, diagnose
from evalstop_client.cli.output import print_json, print_table
from evalstop_client.errors import KeyRefused, NotFound, ServiceAway
from evalstop_client.reading.api import Api
from evalstop_client.reading.connection import Connection
from evalstop_client.reading.records import RunRecord
from evalstop_client.service import Json


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
