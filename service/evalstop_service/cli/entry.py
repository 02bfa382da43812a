"""The line itself: what is asked for is read, done, and answered by an exit code."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import sqlalchemy as sa
from pydantic import ValidationError

from evalstop_service import app
from evalstop_service.cli import administration, audit, servers
from evalstop_service.cli.command import FAILED, USAGE, Command, Subcommands
from evalstop_service.errors import InvalidSetting, ServiceError
from evalstop_service.observability import logs
from evalstop_service.settings import Settings


def main(arguments: list[str] | None = None) -> int:
    """Run a command; 0 when it did what it was asked, 1 when it could not, 2 when it was asked wrongly."""
    options = parser().parse_args(arguments)
    try:
        settings = _settings(options)
        app.check_settings(settings)
    except ValidationError as error:
        for item in error.errors():
            setting = "".join(f"EVALSTOP_{str(name).upper()}: " for name in item["loc"])
            print(f"evalstop: {setting}{item['msg'].removeprefix('Value error, ')}", file=sys.stderr)
        return USAGE
    except InvalidSetting as error:
        print(f"evalstop: {error}", file=sys.stderr)
        return USAGE
    logs.configure_logging(settings.log_level, settings.log_format)
    try:
        command: Command = options.command
        return command(settings, options)
    except sa.exc.DBAPIError as error:
        print(f"evalstop: the database does not answer: {str(error.orig).strip()}", file=sys.stderr)
    except (ServiceError, OSError) as error:
        print(f"evalstop: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        pass
    return FAILED


def parser() -> argparse.ArgumentParser:
    """All commands; what is parsed holds the function that runs its command as `command`."""
    root = argparse.ArgumentParser(
        prog="evalstop",
        description="Stops training jobs that no longer get better, and keeps their best checkpoints.",
        epilog="Every setting is an environment variable too: EVALSTOP_DATABASE_URL, EVALSTOP_PORT, ...\n"
        "See docs/operations.md for all of them.\n\n"
        "examples:\n"
        "  evalstop up                                   everything, on an embedded database in .evalstop/\n"
        "  evalstop migrate --database-url postgresql://evalstop@db/evalstop\n"
        "  evalstop serve   --database-url postgresql://evalstop@db/evalstop --host 0.0.0.0\n"
        "  evalstop deliver --database-url postgresql://evalstop@db/evalstop\n"
        "  evalstop key create --name trainers --scopes ingest\n"
        "  evalstop pause alignment --reason 'the eval set is broken'\n"
        "  evalstop prune --project alignment --older-than-days 90 --dry-run",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--data-folder", type=Path, metavar="DIR", help="of the embedded database (default .evalstop)")
    shared.add_argument(
        "--database-url", metavar="URL", help="postgresql://USER:PASSWORD@HOST/NAME (default: embedded)"
    )
    shared.add_argument("--log-level", choices=["DEBUG", "INFO", "WARNING", "ERROR"])
    shared.add_argument("--log-format", choices=["text", "json"], help="json: one object a line (default text)")
    shared.add_argument("--json", action="store_true", help="print for machines")
    commands = root.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(to: Subcommands, name: str, run: Command, *parents: argparse.ArgumentParser) -> argparse.ArgumentParser:
        command: argparse.ArgumentParser = to.add_parser(
            name, parents=[shared, *parents], help=run.__doc__, description=run.__doc__
        )
        command.set_defaults(command=run)
        return command

    servers.add_to(commands, add)
    administration.add_to(commands, add)
    audit.add_to(commands, add)
    return root


def _settings(options: argparse.Namespace) -> Settings:
    given = {
        name: value for name, value in vars(options).items() if name in Settings.model_fields and value is not None
    }
    return Settings(**given)
