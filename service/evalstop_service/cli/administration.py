"""The commands that administer an installation: schema, projects, keys, pauses and retention."""

from __future__ import annotations

import argparse
import getpass
from uuid import UUID

from evalstop_detectors.wording import format_count

from evalstop_service import configuration
from evalstop_service.cli.command import OK, Add, Subcommands, parse_days, tell
from evalstop_service.cli.installation import open_database
from evalstop_service.clock import rfc3339, utc_now
from evalstop_service.decisions import pause as pausing
from evalstop_service.errors import Invalid
from evalstop_service.projects import api_keys, policies, project_settings
from evalstop_service.projects.api_keys import COMMAND_LINE
from evalstop_service.projects.project_settings import NewProject, QuotasIn, parse_form
from evalstop_service.runs import retention
from evalstop_service.settings import Settings
from evalstop_service.store import endpoints, schema
from evalstop_service.store.audit import Author
from evalstop_service.store.keys import SCOPES, KeyLimits
from evalstop_service.store.schema import Phase


def add_to(commands: Subcommands, add: Add) -> None:
    """Add the administrative commands: `migrate`, `admin project create`, `pause`, ..."""
    migration = add(commands, "migrate", migrate)
    migration.add_argument(
        "--phase",
        choices=[phase.value for phase in Phase],
        default=Phase.ALL.value,
        help="before: what the new release needs, while the old one runs; after: the rest, once the old one is gone",
    )
    for name, run in (("pause", pause), ("resume", resume)):
        command = add(commands, name, run)
        command.add_argument("project", metavar="PROJECT", help="its name")
        command.add_argument("--actor", help="recorded in the audit log (default: your user name)")
        if run is pause:
            command.add_argument("--reason", default="", help="shown with each stop on hold")
            command.add_argument("--until", metavar="TIME", help="when it resumes by itself: 4h, 2d, or a time")
    pruning = add(commands, "prune", prune)
    pruning.add_argument("--project", metavar="NAME", help="the project (default: all with a retention)")
    pruning.add_argument(
        "--older-than-days", type=float, metavar="N", help="instead of the project's retention; requires --project"
    )
    pruning.add_argument("--dry-run", action="store_true", help="count what would be removed, and remove nothing")
    sealing = _add_group(commands, "secrets", "Encrypt webhook secrets.", "VERB")
    add(sealing, "rotate", secrets_rotate)
    administered = _add_group(commands, "admin", "Create projects and keys directly in the database.", "NOUN")
    _add_project(administered, add)
    _add_key(administered, add)


def _add_group(commands: Subcommands, name: str, text: str, metavar: str) -> Subcommands:
    return commands.add_parser(name, help=text, description=text).add_subparsers(required=True, metavar=metavar)


def _add_project(commands: Subcommands, add: Add) -> None:
    project = _add_group(commands, "project", "Create a project; set quotas.", "VERB")
    create = add(project, "create", project_create)
    create.add_argument("name", metavar="PROJECT", help="its name")
    create.add_argument("--policy", default=policies.DEFAULT_POLICY, help="policy of its runs (default: %(default)s)")
    create.add_argument(
        "--mode", choices=["shadow", "enforce"], default="shadow", help="mode of its runs (default shadow)"
    )
    create.add_argument(
        "--veto-window-seconds", type=float, metavar="S", default=0.0, help="how long a stop can be vetoed (default 0)"
    )
    create.add_argument(
        "--held-out-share",
        type=float,
        metavar="SHARE",
        help="share of stops held out to measure whether they are right (default 0.1)",
    )
    create.add_argument("--price-per-gpu-hour", type=float, metavar="PRICE", help="cost of one GPU hour")
    create.add_argument("--currency", default="USD", help="currency of the price (default USD)")
    quotas = add(project, "quotas", project_quotas)
    quotas.add_argument("project", metavar="PROJECT", help="its name")
    quotas.add_argument(
        "quotas", nargs="*", metavar="QUOTA=NUMBER", help="such as open_runs=20000; without any, show them"
    )


def _add_key(commands: Subcommands, add: Add) -> None:
    key = _add_group(commands, "key", "Create a key.", "VERB")
    create = add(key, "create", key_create)
    create.add_argument("--name", required=True, help="what the key is for")
    create.add_argument(
        "--scopes", nargs="+", choices=SCOPES, default=["ingest"], help="what it may do (default ingest)"
    )
    create.add_argument("--expires-in-days", type=parse_days, metavar="DAYS", help="days until the key expires")
    create.add_argument(
        "--network",
        action="append",
        default=[],
        metavar="CIDR",
        help="network from which the key is accepted (default any)",
    )
    create.add_argument(
        "--endpoint",
        action="append",
        default=[],
        type=UUID,
        metavar="ID",
        help="bind a key with the scope report to this endpoint",
    )
    bound = create.add_mutually_exclusive_group()
    bound.add_argument("--project", default=api_keys.FIRST_PROJECT, help="the project of the key (default default)")
    bound.add_argument(
        "--installation", action="store_true", help="create a key to the installation, which manages projects"
    )


def migrate(settings: Settings, options: argparse.Namespace) -> int:
    """Migrate the schema of the database to this release, at once or in two phases."""
    database = configuration.create_database(settings)
    before = schema.current_revision(database)
    schema.upgrade_schema(database, Phase(options.phase))
    after = schema.current_revision(database)
    text = f"the schema is at {after}" + (", as it was" if before == after else f" (was {before or 'empty'})")
    tell(options, {"before": before, "after": after}, text)
    return OK


def pause(settings: Settings, options: argparse.Namespace) -> int:
    """Pause all stops in a project until it is resumed; returns when no stop remains to be sent."""
    database = open_database(settings)
    project = project_settings.find_project(database, options.project)
    until, actor = pausing.read_end(options.until, utc_now()), options.actor or _find_user()
    project = pausing.pause_project(database, project.id, actor, options.reason, utc_now(), until=until)
    ends_at = None if project.paused_until is None else rfc3339(project.paused_until)
    end = f" until {ends_at}" if ends_at else ""
    document = {"project": project.name, "paused": True, "paused_until": ends_at}
    tell(options, document, f"project {project.name} is paused{end}: no stop is sent")
    return OK


def resume(settings: Settings, options: argparse.Namespace) -> int:
    """Resume stops in a paused project."""
    database = open_database(settings)
    project = project_settings.find_project(database, options.project)
    pausing.resume_project(database, project.id, options.actor or _find_user(), utc_now())
    tell(options, {"project": project.name, "paused": False}, f"project {project.name} is resumed")
    return OK


def _find_user() -> str:
    """The name of the user, who in a container may have none."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return COMMAND_LINE


def prune(settings: Settings, options: argparse.Namespace) -> int:
    """Remove the details of runs that ended before their project's retention; decisions stay."""
    database = open_database(settings)
    try:
        result = retention.prune_runs(
            database,
            utc_now(),
            project=options.project,
            older_than_days=options.older_than_days,
            dry_run=options.dry_run,
        )
    finally:
        database.close()
    lines = [f"{name}: {format_count(count, 'run')}" for name, count in sorted(result.runs.items())]
    text = "\n".join(lines) or "no run has passed the retention of its project"
    tell(options, {"runs": result.runs, "rows": result.rows, "dry_run": options.dry_run}, f"{text}; {result.rows} rows")
    return OK


def secrets_rotate(settings: Settings, options: argparse.Namespace) -> int:
    """Encrypt all webhook secrets, also those in plain text, with the first of EVALSTOP_SECRET_KEYS."""
    database = open_database(settings)
    with database.transaction() as tx:
        count = endpoints.reencrypt_secrets(tx, configuration.create_encryption(settings))
    database.close()
    text = f"{count.secrets} secrets are encrypted with the first key; {count.were_plain} of them were in plain text"
    tell(options, {"secrets": count.secrets, "were_plain": count.were_plain}, text)
    return OK


def project_create(settings: Settings, options: argparse.Namespace) -> int:
    """Create a project."""
    database = open_database(settings)
    project = project_settings.create_project(
        database,
        parse_form(
            NewProject,
            {
                "name": options.name,
                "default_mode": options.mode,
                "veto_window_seconds": options.veto_window_seconds,
                "default_policy": options.policy,
                "held_out_share": settings.held_out_share,
                "price_per_gpu_hour": options.price_per_gpu_hour,
                "currency": options.currency,
            },
        ),
        COMMAND_LINE,
        utc_now(),
    )
    tell(options, {"id": str(project.id), "name": project.name}, f"project {project.name} was created")
    return OK


def project_quotas(settings: Settings, options: argparse.Namespace) -> int:
    """Set the quotas of a project, or show them."""
    database = open_database(settings)
    project = project_settings.find_project(database, options.project)
    quotas = QuotasIn.model_validate(project.quotas, from_attributes=True).model_dump()
    for written in options.quotas:
        name, equals, value = written.partition("=")
        if not equals or name not in quotas:
            raise Invalid(f"{written!r}: write QUOTA=NUMBER; the quotas are {', '.join(sorted(quotas))}")
        quotas[name] = value
    author = Author(project.id, COMMAND_LINE, utc_now())
    changed = project_settings.set_quotas(database, author, parse_form(QuotasIn, quotas)).quotas
    document = {name: getattr(changed, name) for name in quotas}
    tell(options, document, "\n".join(f"{name}={value}" for name, value in document.items()))
    return OK


def key_create(settings: Settings, options: argparse.Namespace) -> int:
    """Create a key and print it; it cannot be shown again."""
    database = open_database(settings)
    project = None if options.installation else options.project
    now = utc_now()
    expires_at = None if options.expires_in_days is None else now + options.expires_in_days
    limits = KeyLimits(expires_at, tuple(options.network), tuple(options.endpoint))
    key, secret = api_keys.create_named_key(database, project, options.name, options.scopes, now, limits)
    tell(options, {"id": str(key.id), "key": secret, "scopes": list(key.scopes)}, secret)
    return OK
