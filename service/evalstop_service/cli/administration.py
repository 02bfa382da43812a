"""Runs parsed commands with their settings: those that administer an installation without a key are here."""

from __future__ import annotations

import argparse
import sys

import sqlalchemy as sa
from pydantic import ValidationError

from evalstop_service.cli.entry import FAILED, OK, USAGE, Add, Command, Subcommands, tell
from evalstop_service.clock import utc_now
from evalstop_service.errors import Invalid, ServiceError
from evalstop_service.observability import logs
from evalstop_service.projects import api_keys, audit_trail, project_settings
from evalstop_service.projects.api_keys import COMMAND_LINE
from evalstop_service.settings import Settings
from evalstop_service.store import schema
from evalstop_service.store.database import Database
from evalstop_service.store.faults import find_fault
from evalstop_service.store.keys import SCOPES


def add_to(commands: Subcommands, add: Add) -> None:
    """Add `migrate`, `audit verify` and `admin key create`."""
    add(commands, "migrate", migrate)
    verifying = add(_add_group(commands, "audit", "Verify the audit log.", "VERB"), "verify", audit_verify)
    verifying.add_argument("--contains", metavar="HASH", help="an earlier hash that the log must contain")
    verifying.add_argument("--project", metavar="NAME", help="the project (default: all)")
    administered = _add_group(commands, "admin", "Create a key directly in the database.", "NOUN")
    create = add(_add_group(administered, "key", "Create a key.", "VERB"), "create", key_create)
    create.add_argument("--name", required=True, help="what the key is for")
    create.add_argument(
        "--scopes", nargs="+", choices=SCOPES, default=["ingest"], help="what it may do (default ingest)"
    )
    bound = create.add_mutually_exclusive_group()
    bound.add_argument(
        "--project",
        default=api_keys.FIRST_PROJECT,
        help="the project of the key (default %(default)s), which is created if there is none of this name",
    )
    bound.add_argument(
        "--installation", action="store_true", help="create a key to the installation, which manages projects"
    )


def _add_group(commands: Subcommands, name: str, text: str, metavar: str) -> Subcommands:
    return commands.add_parser(name, help=text, description=text).add_subparsers(required=True, metavar=metavar)


def migrate(settings: Settings, options: argparse.Namespace) -> int:
    """Migrate the schema of the database to this release; the previous one still runs on it."""
    database = settings.create_database()
    before = schema.current_revision(database)
    schema.upgrade_schema(database)
    after = schema.current_revision(database)
    text = f"the schema is at {after}" + (", as it was" if before == after else f" (was {before or 'empty'})")
    tell(options, {"before": before, "after": after}, text)
    return OK


def audit_verify(settings: Settings, options: argparse.Namespace) -> int:
    """Check whether an entry of the audit log was changed or removed; if so, print the first and exit with 1."""
    database = open_database(settings)
    if options.contains is not None and options.project is None:
        raise Invalid("--contains requires --project: each project has its own log")
    reports = {
        name: audit_trail.verify_trail(database, project_id, options.contains)
        for name, project_id in audit_trail.find_trails(database, options.project).items()
    }
    lines = [
        f"{name}: {report.fault or f'{report.entries} entries verified'}; the last valid one is {report.entries}"
        + (f", hash {report.hash}" if report.hash else "")
        for name, report in reports.items()
    ]
    tell(options, {name: vars(report) for name, report in reports.items()}, "\n".join(lines))
    return FAILED if any(report.fault for report in reports.values()) else OK


def key_create(settings: Settings, options: argparse.Namespace) -> int:
    """Create a key and print it; it cannot be shown again."""
    if not options.name.strip() or len(options.name) > 256 or not options.name.isprintable():
        raise Invalid(f"key {options.name!r}: a name has 1 to 256 printable characters")
    database = open_database(settings)
    now, project_id = utc_now(), None
    if not options.installation:
        with database.transaction() as tx:
            new = settings.describe_project(options.project)
            project_id = project_settings.require_project(tx, new, COMMAND_LINE, now).id
    key, secret = api_keys.create_key(database, project_id, COMMAND_LINE, options.name, options.scopes, now)
    tell(options, {"id": str(key.id), "key": secret, "scopes": list(key.scopes)}, secret)
    return OK


def execute(options: argparse.Namespace) -> int:
    """Run `options.command` and return the exit code; prints errors."""
    try:
        given = {name: value for name, value in vars(options).items() if value is not None}
        settings = Settings(**{name: given[name] for name in Settings.model_fields.keys() & given})
    except ValidationError as error:
        for item in error.errors():
            setting = "".join(f"EVALSTOP_{str(name).upper()}: " for name in item["loc"])
            print(f"evalstop: {setting}{item['msg'].removeprefix('Value error, ')}", file=sys.stderr)
        return USAGE
    logs.configure_logging(settings.log_level, settings.log_format)
    try:
        command: Command = options.command
        return command(settings, options)
    except sa.exc.DBAPIError as error:
        print(f"evalstop: {find_fault(error).value}: {str(error.orig).strip()}", file=sys.stderr)
    except (ServiceError, OSError) as error:
        print(f"evalstop: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        pass
    return FAILED


def open_database(settings: Settings) -> Database:
    """Open the configured database; raises ServiceError unless it exists with a schema for this release."""
    if settings.database_url is None and not settings.database_file.exists():
        raise ServiceError(
            f"there is no installation in {settings.data_folder.resolve()}: run this in the folder of `evalstop up`, "
            "or pass --data-folder DIR or --database-url URL"
        )
    database = settings.create_database()
    schema.require_schema(database)
    return database
