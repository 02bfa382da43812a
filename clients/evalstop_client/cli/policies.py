"""`evalstop policy` and `proposals`: what policies would decide, how far they may go, and what waits for a person."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from urllib.parse import quote

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
    show_result,
)
from evalstop_client.errors import ConfigurationError, NotFound
from evalstop_client.service import Json

BACKTEST_POLL_SECONDS = 0.5
FINDINGS_SHOWN = 20


def add_policy(commands: Subcommands, text: str) -> None:
    verbs = add_group(commands, "policy", text)
    add_command(verbs, "ls", list_policies, "list")
    trying = add_command(verbs, "try", try_policy)
    trying.add_argument("policy", metavar="POLICY", help="NAME, NAME@VERSION, or a JSON file")
    trying.add_argument("--runs", type=int, metavar="N", help="the newest N ended runs (default: the maximum)")
    add_command(verbs, "add", store_policy).add_argument("policy", metavar="FILE", help="a JSON file")
    staging = add_command(verbs, "stage", set_stage)
    staging.add_argument("--required-precision", type=float, required=True, metavar="SHARE", help="such as 0.9")
    staging.add_argument("--canary-share", type=float, default=0.2, metavar="SHARE", help="default: %(default)s")
    demoting = add_command(verbs, "demote", demote_policy)
    demoting.add_argument("--reason", required=True, help="recorded in the audit log")
    for command in (staging, add_command(verbs, "promote", promote_policy), demoting):
        command.add_argument("policy", metavar="POLICY", help="its name")


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


def store_policy(options: argparse.Namespace) -> int:
    """Store a policy as the next version of its name; requires the scope admin."""
    document = read_document("policy", options.policy)
    if isinstance(document, str):
        raise ConfigurationError(f"policy {document!r}: name a JSON file.")
    stored = connect(options).connection.post("/policies", document)
    return show_result(options, stored, f"stored {stored['name']}@{stored['version']}")


def set_stage(options: argparse.Namespace) -> int:
    """Start the rollout of a policy in shadow, or change its terms; requires the scope admin."""
    body = {"required_precision": options.required_precision, "canary_share": options.canary_share}
    return _show_stage(options, connect(options).connection.put(_stage_path(options), body))


def demote_policy(options: argparse.Namespace) -> int:
    """Move a policy back to shadow: its stops are only recorded; requires the scope admin."""
    return _show_stage(
        options, connect(options).connection.post(f"{_stage_path(options)}/demote", {"reason": options.reason})
    )


def promote_policy(options: argparse.Namespace) -> int:
    """Confirm that a policy moves to the stage that its precision has earned; requires the scope admin."""
    connection = connect(options).connection
    for item in connection.pages("/proposals", {"state": "open"}):
        if (item["kind"], item["subject"]) == ("raise_stage", options.policy):
            connection.post(f"/proposals/{item['id']}/confirm")
            return _show_stage(options, connection.get(_stage_path(options)))
    raise NotFound(f"no higher stage of {options.policy!r} is proposed; its precision has not earned one.")


def _stage_path(options: argparse.Namespace) -> str:
    return f"/policies/{quote(options.policy, safe='')}/rollout-stage"


def _show_stage(options: argparse.Namespace, stage: Json) -> int:
    return show_result(options, stage, f"policy {options.policy} is in {stage['stage']}")


def add_proposals(commands: Subcommands, text: str) -> None:
    verbs = add_group(commands, "proposals", text)
    add_command(verbs, "ls", list_proposals, "list").add_argument(
        "--state", default="open", help="default: %(default)s"
    )
    for name, run in (("confirm", confirm_proposal), ("refuse", refuse_proposal)):
        add_command(verbs, name, run).add_argument("proposal", metavar="PROPOSAL", help="its id")


def list_proposals(options: argparse.Namespace) -> int:
    """List what waits for another person, newest first."""
    items = list(connect(options).connection.pages("/proposals", {"state": options.state}))
    rows = [(item["id"], item["summary"], item["proposed_by"], parse_time(item["created_at"])) for item in items]
    return show_list(options, items, ("id", "what", "proposed by", "proposed"), rows)


def confirm_proposal(options: argparse.Namespace) -> int:
    """Approve what another person, or the service, has proposed; the last approval needed carries it out."""
    return _settle_proposal(options, "confirm")


def refuse_proposal(options: argparse.Namespace) -> int:
    """Refuse a proposal, or withdraw your own."""
    return _settle_proposal(options, "refuse")


def _settle_proposal(options: argparse.Namespace, action: str) -> int:
    settled = connect(options).connection.post(f"/proposals/{quote(options.proposal, safe='')}/{action}")
    return show_result(options, settled, f"{settled['state']}: {settled['summary']}")


def try_policy(options: argparse.Namespace) -> int:
    """Backtest a policy on ended runs of the project: which it would have stopped, when, and whether that was right."""
    connection = connect(options).connection
    body: Json = {"policy": read_document("policy", options.policy)}
    if options.runs is not None:
        body["runs"] = options.runs
    backtest = connection.post("/policies/backtests", body)
    while backtest["state"] in ("waiting", "running"):
        if not options.json and sys.stderr.isatty():
            print(f"\r{backtest['done']} of {backtest['total']} runs", end="", file=sys.stderr, flush=True)
        time.sleep(BACKTEST_POLL_SECONDS)
        backtest = connection.get(f"/policies/backtests/{backtest['id']}")
    if options.json:
        print_json(backtest)
    else:
        _print_backtest(backtest)
    return OK if backtest["state"] == "done" else FAILED


def read_document(what: str, name_or_path: str) -> str | Json:
    """The name, or the document in a file."""
    if name_or_path.endswith((".yaml", ".yml")):
        raise ConfigurationError(f"{what} {name_or_path!r}: write it in JSON; the service reads no YAML.")
    if not name_or_path.endswith(".json"):
        return name_or_path
    try:
        document = json.loads(Path(name_or_path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{what} {name_or_path!r}: {error}") from error
    if not isinstance(document, dict):
        raise ConfigurationError(f"{what} {name_or_path!r}: it holds no {what}.")
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
