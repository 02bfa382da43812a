"""`evalstop policy`: lists policies, and runs backtests in the service."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from evalstop_client.cli.command import (
    FAILED,
    OK,
    Subcommands,
    add_command,
    add_group,
    connect,
    parse_time,
    print_facts,
    print_json,
    print_table,
    show_list,
)
from evalstop_client.errors import ConfigurationError
from evalstop_client.service import Json

POLL_SECONDS = 0.5
FINDINGS_SHOWN = 20


def add_to(commands: Subcommands, text: str) -> None:
    verbs = add_group(commands, "policy", text)
    add_command(verbs, "ls", list_policies, "list")
    trying = add_command(verbs, "try", try_policy)
    trying.add_argument("policy", metavar="POLICY", help="NAME, NAME@VERSION, or a JSON file")
    trying.add_argument("--runs", type=int, metavar="N", help="the newest N ended runs (default: the maximum)")


def list_policies(options: argparse.Namespace) -> int:
    """List the policies of the project and the shipped ones, in all versions."""
    items = list(connect(options).connection.pages("/policies", {}))
    return show_list(
        options,
        items,
        ("policy", "stored", "what it does"),
        [
            (
                f"{item['name']}@{item['version']}",
                parse_time(item["created_at"]) or "shipped",
                item["document"].get("description"),
            )
            for item in items
        ],
    )


def try_policy(options: argparse.Namespace) -> int:
    """Backtest a policy on ended runs of the project: which it would have stopped, when, and whether that was right."""
    connection = connect(options).connection
    body: Json = {"policy": _read_policy(options.policy)}
    if options.runs is not None:
        body["runs"] = options.runs
    backtest = connection.post("/policies/backtests", body)
    while backtest["state"] in ("waiting", "running"):
        if not options.json and sys.stderr.isatty():
            print(f"\r{backtest['done']} of {backtest['total']} runs", end="", file=sys.stderr, flush=True)
        time.sleep(POLL_SECONDS)
        backtest = connection.get(f"/policies/backtests/{backtest['id']}")
    if options.json:
        print_json(backtest)
    else:
        _print_backtest(backtest)
    return OK if backtest["state"] == "done" else FAILED


def _read_policy(name_or_path: str) -> str | Json:
    """The name, or the document in a file."""
    if name_or_path.endswith((".yaml", ".yml")):
        raise ConfigurationError(f"policy {name_or_path!r}: write it in JSON; the service reads no YAML.")
    if not name_or_path.endswith(".json"):
        return name_or_path
    try:
        document = json.loads(Path(name_or_path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"policy {name_or_path!r}: {error}") from error
    if not isinstance(document, dict):
        raise ConfigurationError(f"policy {name_or_path!r}: it holds no policy.")
    return document


def _print_backtest(backtest: Json) -> None:
    summary = backtest["summary"]
    print_facts(
        [
            ("state", backtest["state"]),
            ("runs", summary["runs"]),
            ("would be stopped", summary["stops"]),
            ("right, wrong, unknown", f"{summary['right']}, {summary['wrong']}, {summary['unknown']}"),
            ("turned, not stopped", summary["missed"]),
            ("GPU-hours after right stops", f"{summary['hours_after']:,.1f}"),
            ("GPU-hours after wrong stops", f"{summary['hours_wrong']:,.1f}"),
            ("could not be replayed", summary["failed"] or None),
        ]
    )
    stops = [item for item in backtest["findings"] if item["step"] is not None]
    rows = [(item["run_name"], item["step"], item["last_step"], item["outcome"], item["reason"]) for item in stops]
    if rows:
        print_table(("run", "stop at", "ran to", "was", "why"), rows[:FINDINGS_SHOWN])
    if len(rows) > FINDINGS_SHOWN:
        print(f"... and {len(rows) - FINDINGS_SHOWN} more; --json has them all")
