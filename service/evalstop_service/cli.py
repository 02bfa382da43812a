"""The command line: `evalstop up`, or `serve`, `deliver` and `migrate` apart; projects and keys by hand."""

from __future__ import annotations

import argparse
import asyncio
import gc
import getpass
import json
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import sqlalchemy as sa
import uvicorn
import uvloop
from pydantic import ValidationError

from evalstop_service import app, demonstration, installation, logs, opening, pages, pausing, retention, traces
from evalstop_service.api import metrics
from evalstop_service.clock import utc_now
from evalstop_service.connections import Patience, allowed, look_over, protocol
from evalstop_service.errors import ServiceError
from evalstop_service.settings import Settings
from evalstop_service.store import endpoints, schema
from evalstop_service.store.database import Database
from evalstop_service.store.keys import SCOPES

OK, FAILED, USAGE = 0, 1, 2

_log = logging.getLogger(__name__)


def main(arguments: list[str] | None = None) -> int:
    """Run a command; 0 when it did what it was asked, 1 when it could not, 2 when it was asked wrongly."""
    options = parser().parse_args(arguments)
    try:
        settings = _settings(options)
    except ValidationError as error:
        for item in error.errors():
            name = "_".join(map(str, item["loc"])).upper()
            print(f"evalstop: EVALSTOP_{name}: {item['msg'].removeprefix('Value error, ')}", file=sys.stderr)
        return USAGE
    logs.configure(settings.log_level, settings.log_format)
    try:
        command: Callable[[Settings, argparse.Namespace], int] = options.command
        return command(settings, options)
    except sa.exc.DBAPIError as error:
        print(f"evalstop: the database does not answer: {str(error.orig).strip()}", file=sys.stderr)
    except (ServiceError, OSError) as error:
        print(f"evalstop: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        pass
    return FAILED


def up(settings: Settings, options: argparse.Namespace) -> int:
    """Everything in one process: schema, HTTP and deliveries."""
    database = app.create_database(settings)
    schema.upgrade(database)
    _tell_of_secrets(settings)
    first = installation.first_key(database, utc_now(), settings.held_out_share)
    secret = _session_secret(settings)

    def ready(address: str) -> None:
        key = installation.any_key(database)
        link = f"{address}/login?token={pages.sign_in_token(secret, key.id)}" if key else None
        if options.json:
            print(json.dumps({"url": address, "key": first, "sign_in": link}), flush=True)
            return
        print(f"\n  EvalStop is up at {address}   (API at {address}/docs)")
        if first:
            print(f"  Key for this machine, shown once:  {first}")
        if link:
            print(f"  Open the pages (good for 12 hours):\n  {link}\n", flush=True)

    return _serve(settings, database, secret, ready, deliver=True)


def serve(settings: Settings, options: argparse.Namespace) -> int:
    """HTTP alone, on a schema that is at head."""
    database = app.create_database(settings)
    _require_schema(database)
    _tell_of_secrets(settings)

    def ready(address: str) -> None:
        print(json.dumps({"url": address}) if options.json else f"EvalStop serves at {address}", flush=True)

    return _serve(settings, database, _session_secret(settings), ready, deliver=False)


def deliver(settings: Settings, options: argparse.Namespace) -> int:
    """Deliveries alone."""
    database = app.create_database(settings)
    _require_schema(database)
    _tell_of_secrets(settings)

    async def run() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        print("EvalStop delivers", flush=True)
        await app.deliver(settings, database, stop, telemetry, tracer)

    telemetry, tracer = app.create_telemetry(database), traces.from_environment(os.environ)
    port = settings.metrics_port
    with metrics.listening(telemetry, settings.host, port) if port is not None else nullcontext():
        uvloop.run(run())
    tracer.close()
    return OK


def migrate(settings: Settings, options: argparse.Namespace) -> int:
    """Bring the schema to head, or do one half of the way: what the new code needs, and what can wait for it."""
    database = app.create_database(settings)
    before = schema.current(database)
    schema.upgrade(database, schema.Phase(options.phase))
    after = schema.current(database)
    if options.json:
        print(json.dumps({"before": before, "after": after}))
    else:
        print(f"the schema is at {after}" + (", as it was" if before == after else f" (was {before or 'empty'})"))
    return OK


def project_create(settings: Settings, options: argparse.Namespace) -> int:
    """Make a project."""
    database = app.create_database(settings)
    _require_schema(database)
    project = installation.add_project(
        database,
        options.name,
        options.mode,
        options.grace_seconds,
        utc_now(),
        options.policy,
        held_out_share=settings.held_out_share,
        price_per_gpu_hour=options.price_per_gpu_hour,
        currency=options.currency,
    )
    _print(options, {"id": str(project.id), "name": project.name}, f"project {project.name} is made")
    return OK


def demo_data(settings: Settings, options: argparse.Namespace) -> int:
    """Fill a project with some hundred example runs of two months, so that there is something to look at."""
    logging.getLogger("evalstop_service").setLevel(logging.ERROR)  # what it tells of is two months of play
    database = app.create_database(settings.model_copy(update={"sqlite_synchronous": "NORMAL"}))
    schema.upgrade(database)
    shown = None if options.json or not sys.stderr.isatty() else _bar
    filled = demonstration.fill(database, options.project, utc_now(), shown or (lambda _done, _of: None), options.runs)
    database.close()
    if shown is not None:
        print(file=sys.stderr)
    text = "is filled already" if filled is None else f"has {filled} example runs; `evalstop up` shows them"
    _print(options, {"project": options.project, "runs": filled or 0}, f"the project {options.project} {text}")
    return OK


def _bar(done: int, of: int) -> None:
    share = done / of if of else 1.0
    print(f"\r[{'#' * int(40 * share):40}] {share:4.0%}", end="", file=sys.stderr, flush=True)


def pause(settings: Settings, options: argparse.Namespace) -> int:
    """Stop nothing more in a project until it is resumed; returns when no pending stop is left to be sent."""
    database = app.create_database(settings)
    _require_schema(database)
    project = installation.project_named(database, options.project)
    pausing.pause(database, project.id, options.actor, options.reason, utc_now())
    _print(options, {"project": project.name, "paused": True}, f"project {project.name} is paused: nothing is stopped")
    return OK


def resume(settings: Settings, options: argparse.Namespace) -> int:
    """Let stops go on in a project that was paused."""
    database = app.create_database(settings)
    _require_schema(database)
    project = installation.project_named(database, options.project)
    pausing.resume(database, project.id, options.actor, utc_now())
    _print(options, {"project": project.name, "paused": False}, f"project {project.name} is resumed")
    return OK


def key_create(settings: Settings, options: argparse.Namespace) -> int:
    """Make a key and show it, once."""
    database = app.create_database(settings)
    _require_schema(database)
    project = None if options.installation else options.project
    key, secret = installation.add_key(database, project, options.name, tuple(options.scopes), utc_now())
    _print(options, {"id": str(key.id), "key": secret, "scopes": list(key.scopes)}, secret)
    return OK


def secrets_rotate(settings: Settings, options: argparse.Namespace) -> int:
    """Seal all webhook secrets with the first of EVALSTOP_SECRET_KEYS, those that stand in plain text too."""
    database = app.create_database(settings)
    _require_schema(database)
    with database.transaction() as tx:
        done = endpoints.reseal(tx, app.create_vault(settings))
    database.close()
    text = f"{done.secrets} secrets are sealed with the first key; {done.were_plain} of them stood in plain text"
    _print(options, {"secrets": done.secrets, "were_plain": done.were_plain}, text)
    return OK


def prune(settings: Settings, options: argparse.Namespace) -> int:
    """Remove the details of runs that ended longer ago than their project keeps them; what decisions say stays."""
    database = app.create_database(settings)
    _require_schema(database)
    try:
        done = retention.prune(
            database,
            utc_now(),
            project=options.project,
            older_than_days=options.older_than_days,
            dry_run=options.dry_run,
        )
    finally:
        database.close()
    text = "\n".join(f"{name}: {count} runs" for name, count in sorted(done.runs.items())) or "no run is that old"
    _print(options, {"runs": done.runs, "rows": done.rows, "dry_run": options.dry_run}, f"{text}; {done.rows} rows")
    return OK


def openapi(settings: Settings, options: argparse.Namespace) -> int:
    """Print the OpenAPI document."""
    database = Database(settings.url)  # never asked
    print(json.dumps(app.create_app(settings, database, session_secret="none").openapi(), indent=2))  # noqa: S106
    return OK


class _Server(uvicorn.Server):
    """Says where it listens, once it does."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[str], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[Any] | None = None) -> None:
        await super().startup(sockets)
        if self.started and sockets:
            host, port = sockets[0].getsockname()[:2]
            self._ready(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")

    async def on_tick(self, counter: int) -> bool:
        if counter % 10 == 0:  # once a second
            look_over(self.server_state.connections, asyncio.get_running_loop().time())
        return await super().on_tick(counter)


def _serve(settings: Settings, database: Database, secret: str, ready: Callable[[str], None], *, deliver: bool) -> int:
    patience = Patience(
        settings.request_seconds,
        settings.answer_seconds,
        allowed(settings.connections, reserved=settings.database_connections),
        app.STREAMED,
    )
    config = uvicorn.Config(
        app.create_app(settings, database, session_secret=secret, deliver=deliver),
        host=settings.host,
        port=settings.port,
        http=protocol(patience),
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,  # the application sees to them, behind what is in a hurry
        timeout_graceful_shutdown=10,
        h11_max_incomplete_event_size=65536,
    )
    server = _Server(config, ready)
    # What a request makes ends with it, and live runs hold no cycles: walking through all of them finds nothing.
    gc.freeze()
    gc.set_threshold(100_000, 50, 1000)
    with _listen(settings.host, settings.port) as listening:
        server.run([listening])
    database.close()
    return OK if server.started else FAILED


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise ServiceError(
            f"cannot listen at {host}, port {port}: {error.strerror}; --port 0 takes a free one"
        ) from error


def _require_schema(database: Database) -> None:
    current = schema.current(database)
    if not schema.serves(current):
        raise ServiceError(
            f"the schema is at {current or 'nothing'}, {schema.needed()} is needed; run `evalstop migrate` first"
        )


def _tell_of_secrets(settings: Settings) -> None:
    if settings.secret_keys is None:
        _log.warning("EVALSTOP_SECRET_KEYS is not set: webhook secrets stand in the database in plain text")


def _session_secret(settings: Settings) -> str:
    if settings.session_secret is not None:
        return settings.session_secret.get_secret_value()
    if settings.database_url is not None:
        return secrets.token_urlsafe(32)
    kept = settings.data_folder / "session.secret"
    if not kept.exists():
        kept.touch(mode=0o600)
        kept.write_text(secrets.token_urlsafe(32))
    return kept.read_text()


def _print(options: argparse.Namespace, document: dict[str, Any], text: str) -> None:
    print(json.dumps(document) if options.json else text)


def _settings(options: argparse.Namespace) -> Settings:
    given = {
        name: value for name, value in vars(options).items() if name in Settings.model_fields and value is not None
    }
    return Settings(**given)


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
    listening = argparse.ArgumentParser(add_help=False)
    listening.add_argument("--host", help="the address to listen on (default 127.0.0.1)")
    listening.add_argument("--port", type=int, help="the port to listen on, 0 for any free one (default 8787)")

    commands = root.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(to: Any, name: str, run: Callable[..., int], *parents: argparse.ArgumentParser) -> argparse.ArgumentParser:
        command: argparse.ArgumentParser = to.add_parser(
            name, parents=[shared, *parents], help=run.__doc__, description=run.__doc__
        )
        command.set_defaults(command=run)
        return command

    add(commands, "up", up, listening)
    add(commands, "serve", serve, listening)
    add(commands, "deliver", deliver)
    migration = add(commands, "migrate", migrate)
    migration.add_argument(
        "--phase",
        choices=[phase.value for phase in schema.Phase],
        default=schema.Phase.ALL.value,
        help="before: what the new code needs, while the old one serves; after: the rest, once the old one is gone",
    )
    add(commands, "openapi", openapi)
    filling = add(commands, "demo-data", demo_data)
    filling.add_argument(
        "--project",
        default=installation.FIRST_PROJECT,
        metavar="NAME",
        help="one without runs, or a new one (default: %(default)s)",
    )
    filling.add_argument("--runs", type=int, metavar="N", help="at most so many of them (default: all, some 300)")
    for name, run in (("pause", pause), ("resume", resume)):
        command = add(commands, name, run)
        command.add_argument("project", metavar="PROJECT", help="its name")
        command.add_argument("--actor", default=getpass.getuser(), help="who says so (default: %(default)s)")
        if run is pause:
            command.add_argument("--reason", default="", help="shown with every stop that is withheld for it")
    pruning = add(commands, "prune", prune)
    pruning.add_argument("--project", metavar="NAME", help="of this project (default: of all that say for how long)")
    pruning.add_argument(
        "--older-than-days", type=float, metavar="N", help="instead of the project's own time; wants --project"
    )
    pruning.add_argument("--dry-run", action="store_true", help="count what would go, and leave it")
    sealing = commands.add_parser("secrets", help="Seal webhook secrets.").add_subparsers(required=True, metavar="VERB")
    add(sealing, "rotate", secrets_rotate)
    _add_project(commands, add)
    _add_key(commands, add)
    return root


def _add_project(commands: Any, add: Callable[..., argparse.ArgumentParser]) -> None:
    project = commands.add_parser("project", help="Make a project.").add_subparsers(required=True, metavar="VERB")
    create = add(project, "create", project_create)
    create.add_argument("name")
    create.add_argument("--policy", default=opening.DEFAULT_POLICY, help="that judges its runs (default: %(default)s)")
    create.add_argument("--mode", choices=["shadow", "enforce"], default="shadow", help="of its runs (default shadow)")
    create.add_argument(
        "--grace-seconds", type=float, default=0.0, help="within which a stop can be vetoed (default 0)"
    )
    create.add_argument(
        "--held-out-share", type=float, metavar="SHARE", help="of its stops, let run to learn the truth (default 0.1)"
    )
    create.add_argument("--price-per-gpu-hour", type=float, metavar="PRICE", help="what an hour of a GPU costs")
    create.add_argument("--currency", default="USD", help="of that price (default USD)")


def _add_key(commands: Any, add: Callable[..., argparse.ArgumentParser]) -> None:
    key = commands.add_parser("key", help="Make a key.").add_subparsers(required=True, metavar="VERB")
    create = add(key, "create", key_create)
    create.add_argument("--name", required=True, help="what the key is for")
    create.add_argument(
        "--scopes", nargs="+", choices=SCOPES, default=["ingest"], help="what it may do (default ingest)"
    )
    bound = create.add_mutually_exclusive_group()
    bound.add_argument(
        "--project", default=installation.FIRST_PROJECT, help="the project it is bound to (default default)"
    )
    bound.add_argument("--installation", action="store_true", help="bound to no project: it makes projects")


if __name__ == "__main__":
    sys.exit(main())
