"""`evalstop policy` and `proposals`: which policies there are, how far they may go, and what waits for a person."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from urllib.parse import quote

from evalstop_client.cli.command import Subcommands, add_command, add_group, connect, show_list, show_result
from evalstop_client.errors import ConfigurationError, NotFound
from evalstop_client.service import Json


def add_policy(commands: Subcommands, text: str) -> None:
    verbs = add_group(commands, "policy", text)
    add_command(verbs, "ls", list_policies)
    add_command(verbs, "add", store_policy, "file")
    staging = add_command(verbs, "stage", set_stage, "policy")
    staging.add_argument("--required-precision", type=float, required=True, metavar="SHARE", help="such as 0.9")
    staging.add_argument("--canary-share", type=float, default=0.2, metavar="SHARE", help="default: %(default)s")
    add_command(verbs, "promote", promote_policy, "policy")
    demoting = add_command(verbs, "demote", demote_policy, "policy")
    demoting.add_argument("--reason", required=True, help="recorded in the audit log")


def list_policies(options: argparse.Namespace) -> int:
    """List the policies of the project and the shipped ones, in all versions."""
    items = list(connect(options).connection.pages("/policies", {}))
    return show_list(options, items, "name version created_at description=document.description")


def store_policy(options: argparse.Namespace) -> int:
    """Store a policy of a JSON file as the next version of its name; requires the scope admin."""
    stored = connect(options).connection.post("/policies", read_document(options.file))
    return show_result(options, stored, f"stored {stored['name']}@{stored['version']}")


def read_document(path: str) -> Json:
    """The document in a JSON file."""
    try:
        document = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path!r}: name a file in JSON: {error}") from error
    if not isinstance(document, dict):
        raise ConfigurationError(f"{path!r}: it holds no object.")
    return document


def set_stage(options: argparse.Namespace) -> int:
    """Start the rollout of a policy in shadow, or change its terms; requires the scope admin."""
    body = {"required_precision": options.required_precision, "canary_share": options.canary_share}
    return _show_stage(options, connect(options).connection.put(_stage_path(options), body))


def demote_policy(options: argparse.Namespace) -> int:
    """Move a policy back to shadow: its stops are only recorded; requires the scope admin."""
    stage = connect(options).connection.post(f"{_stage_path(options)}/demote", {"reason": options.reason})
    return _show_stage(options, stage)


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
    listing = add_command(verbs, "ls", list_proposals)
    listing.add_argument("--state", default="open", help="default: %(default)s")
    add_command(verbs, "confirm", confirm_proposal, "proposal")
    add_command(verbs, "refuse", refuse_proposal, "proposal")


def list_proposals(options: argparse.Namespace) -> int:
    """List what waits for another person, newest first."""
    items = list(connect(options).connection.pages("/proposals", {"state": options.state}))
    return show_list(options, items, "id summary proposed_by created_at")


def confirm_proposal(options: argparse.Namespace) -> int:
    """Approve what another person, or the service, has proposed; the last approval needed carries it out."""
    return _settle_proposal(options, "confirm")


def refuse_proposal(options: argparse.Namespace) -> int:
    """Refuse a proposal, or withdraw your own."""
    return _settle_proposal(options, "refuse")


def _settle_proposal(options: argparse.Namespace, action: str) -> int:
    settled = connect(options).connection.post(f"/proposals/{quote(options.proposal, safe='')}/{action}")
    return show_result(options, settled, f"{settled['state']}: {settled['summary']}")
