"""The commands of the audit log: verify, export and prune."""

from __future__ import annotations

import argparse
from datetime import datetime

from evalstop_service.cli.command import FAILED, OK, Add, Subcommands, parse_days, tell
from evalstop_service.cli.installation import open_database
from evalstop_service.clock import in_utc, utc_now
from evalstop_service.errors import Invalid
from evalstop_service.projects import audit_trail, project_settings
from evalstop_service.projects.api_keys import COMMAND_LINE
from evalstop_service.projects.audit_trail import ExportFormat
from evalstop_service.settings import Settings


def add_to(commands: Subcommands, add: Add) -> None:
    """Add `audit verify`, `audit export` and `audit prune`."""
    text = "Verify, export or prune the audit log."
    verbs = commands.add_parser("audit", help=text, description=text).add_subparsers(required=True, metavar="VERB")
    checking = add(verbs, "verify", verify)
    checking.add_argument("--contains", metavar="HASH", help="an earlier hash that the log must contain")
    exporting = add(verbs, "export", export)
    exporting.add_argument("--since", type=_moment, metavar="TIME", help="no entries before, such as 2026-01-31T00:00Z")
    exporting.add_argument(
        "--format",
        choices=[name.value for name in ExportFormat],
        default=ExportFormat.JSON.value,
        help="json: one object per line; syslog: the same in RFC 5424 messages (default json)",
    )
    pruning = add(verbs, "prune", prune)
    pruning.add_argument("--older-than-days", type=parse_days, required=True, metavar="N", help="age of the entries")
    for verb in (checking, exporting):
        verb.add_argument("--project", metavar="NAME", help="the project (default: all)")
    pruning.add_argument("--project", required=True, metavar="NAME", help="the project")


def verify(settings: Settings, options: argparse.Namespace) -> int:
    """Check whether an entry of the audit log was changed or removed; if so, print the first and exit with 1."""
    database = open_database(settings)
    if options.contains is not None and options.project is None:
        raise Invalid("--contains requires --project: each project has its own log")
    reports = {
        name: audit_trail.verify_trail(database, project_id, options.contains)
        for name, project_id in audit_trail.find_trails(database, options.project).items()
    }
    lines = [
        f"{name}: {report.fault or f'{report.entries} entries verified'}; the last valid one is {report.position}"
        + (f", hash {report.hash}" if report.hash else "")
        for name, report in reports.items()
    ]
    tell(options, {name: vars(report) for name, report in reports.items()}, "\n".join(lines))
    return FAILED if any(report.fault for report in reports.values()) else OK


def export(settings: Settings, options: argparse.Namespace) -> int:
    """Print the audit log, oldest entry first, one per line."""
    database = open_database(settings)
    audit_trail.chain_waiting(database)
    for project_id in audit_trail.find_trails(database, options.project).values():
        for line in audit_trail.export_trail(database, project_id, options.since, ExportFormat(options.format)):
            print(line)
    return OK


def prune(settings: Settings, options: argparse.Namespace) -> int:
    """Remove old entries of the audit log. An entry that records this replaces them, so the rest can still be
    verified."""
    database, now = open_database(settings), utc_now()
    project = project_settings.find_project(database, options.project)
    before = now - options.older_than_days
    removed = audit_trail.prune_trail(database, project.id, before, COMMAND_LINE, now)
    tell(options, {"project": project.name, "removed": removed}, f"{project.name}: {removed} entries removed")
    return OK


def _moment(text: str) -> datetime:
    try:
        return in_utc(datetime.fromisoformat(text))
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text}: it must be a time such as 2026-01-31T00:00Z") from None
