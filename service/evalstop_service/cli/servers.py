"""The commands that run until they are stopped: everything, only HTTP, only deliveries."""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import gc
import json
import logging
import os
import resource
import secrets
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from threading import Event
from typing import Any

import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from evalstop_service import app
from evalstop_service.cli.administration import open_database
from evalstop_service.cli.entry import FAILED, OK, Add, Subcommands
from evalstop_service.clock import utc_now
from evalstop_service.errors import ServiceError
from evalstop_service.projects import api_keys
from evalstop_service.security.private_files import create_private_folder, keep_secret, lock_folder
from evalstop_service.settings import Settings
from evalstop_service.store import schema
from evalstop_service.store.database import Database
from evalstop_service.web import pages
from evalstop_service.web.api import health

SWITCH_SECONDS = 0.001
"""How long a thread keeps the interpreter's lock while others wait for it.

A request waits for the lock several times per statement, after each answer of the database. By Python's default of 5 ms
a busy event loop would make a veto wait for a tenth of a second; the more frequent switches cost about 1 %.
"""

_log = logging.getLogger(__name__)


def add_to(commands: Subcommands, add: Add) -> None:
    """Add `up`, `serve` and `deliver`."""
    listening = argparse.ArgumentParser(add_help=False)
    listening.add_argument("--host", help="the address to listen on (default 127.0.0.1)")
    listening.add_argument("--port", type=int, help="the port to listen on, 0 for any free one (default 8787)")
    add(commands, "up", up, listening)
    add(commands, "serve", serve, listening)
    add(commands, "deliver", deliver)


def up(settings: Settings, options: argparse.Namespace) -> int:
    """Migrate the schema, serve HTTP and deliver webhooks, in one process."""
    os.umask(0o077)  # artifacts too are readable only by their owner
    with ExitStack() as stack:
        if settings.database_url is None:
            create_private_folder(settings.data_folder)
            stack.enter_context(lock_folder(settings.data_folder))
        listening = stack.enter_context(_listen(settings.host, settings.port))  # a start that fails creates no database
        return _set_up_and_serve(settings, options, listening)


def _set_up_and_serve(settings: Settings, options: argparse.Namespace, listening: socket.socket) -> int:
    if settings.public_url is None and settings.port:
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        settings = settings.model_copy(update={"public_url": f"http://{host}:{settings.port}"})
    database = settings.create_database()
    settings.keep_encryption_key()
    schema.upgrade_schema(database)
    _tell_of_secrets(settings)
    secret = _session_secret(settings)

    def ready(address: str) -> None:
        # Created only now that it is shown: a start that fails before must not use up the first key.
        new = settings.describe_project(api_keys.FIRST_PROJECT)
        first = api_keys.create_first_key(database, utc_now(), new)
        key = api_keys.find_reading_key(database, utc_now())
        link = f"{address}/login?token={pages.sign_in_token(secret, key.id)}" if key else None
        if options.json:
            print(json.dumps({"url": address, "key": first, "sign_in": link}), flush=True)
            return
        print(f"\n  EvalStop is up at {address}   (API at {address}/docs)")
        if first:
            print(f"  Key for this machine, shown once:  {first}")
        if link:
            print(f"  Open the dashboard (valid for 12 hours):\n  {link}\n", flush=True)

    return _serve(settings, database, secret, ready, listening, deliver=True)


def serve(settings: Settings, options: argparse.Namespace) -> int:
    """Serve HTTP without delivering webhooks; requires `evalstop migrate`."""
    database = open_database(settings)
    _tell_of_secrets(settings)

    def ready(address: str) -> None:
        print(json.dumps({"url": address}) if options.json else f"EvalStop is serving at {address}", flush=True)

    with _listen(settings.host, settings.port) as listening:
        return _serve(settings, database, _session_secret(settings), ready, listening, deliver=False)


def deliver(settings: Settings, options: argparse.Namespace) -> int:
    """Deliver webhooks without serving HTTP; requires `evalstop migrate`."""
    database = open_database(settings)
    _tell_of_secrets(settings)

    async def run() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        print(json.dumps({"delivering": True}) if options.json else "EvalStop delivers", flush=True)
        await app.deliver(settings, database, stop, service_metrics)

    service_metrics = app.create_service_metrics(database)
    faulthandler.enable()
    port = settings.metrics_port
    with health.listening(service_metrics, settings.host, port) if port is not None else nullcontext():
        uvloop.run(run())
    return OK


class _Server(uvicorn.Server):
    """Prints its address once it listens, and ends long requests when it shuts down."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[str], None], shutdown: Event) -> None:
        super().__init__(config)
        self._ready, self._shutdown = ready, shutdown

    async def startup(self, sockets: list[Any] | None = None) -> None:
        await super().startup(sockets)
        if self.started and sockets:
            host, port = sockets[0].getsockname()[:2]
            self._ready(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")

    async def shutdown(self, sockets: list[Any] | None = None) -> None:
        self._shutdown.set()
        await super().shutdown(sockets)


def _serve(
    settings: Settings,
    database: Database,
    secret: str,
    ready: Callable[[str], None],
    listening: socket.socket,
    *,
    deliver: bool,
) -> int:
    application = app.create_app(settings, database, session_secret=secret, deliver=deliver)
    config = uvicorn.Config(
        application,
        host=settings.host,
        port=settings.port,
        http=BoundedConnection,
        limit_concurrency=allowed_connections(settings.connections, reserved=settings.database_connections),
        access_log=False,
        log_config=None,
        log_level=logging.WARNING,  # its start is announced below, with what people need to know
        server_header=False,
        proxy_headers=False,  # the application handles them
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=10,
    )
    server = _Server(config, ready, application.state.context.shutdown)
    faulthandler.enable()  # a crash in C code leaves a traceback in the log
    sys.setswitchinterval(SWITCH_SECONDS)
    # Objects of a request end with it, and cached runs hold no cycles: a full collection would find nothing. Requests
    # for pages and commands leave cycles behind: to collect 100,000 such objects would stop all threads for 0.1 s.
    gc.freeze()
    gc.set_threshold(5_000, 50, 1000)
    server.run([listening])
    database.close()
    return OK if server.started else FAILED


def _listen(host: str, port: int) -> socket.socket:
    try:
        listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        # Accepted connections inherit it: those of machines that vanished in the middle of a request end some day.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return listening
    except OSError as error:
        raise ServiceError(
            f"cannot listen at {host}, port {port}: {error.strerror}; --port 0 picks a free one"
        ) from error


def _tell_of_secrets(settings: Settings) -> None:
    if not settings.create_encryption().has_key:
        _log.warning("EVALSTOP_SECRET_KEYS is not set: webhook secrets are stored in plain text")


def _session_secret(settings: Settings) -> str:
    if settings.session_secret is not None:
        return settings.session_secret.get_secret_value()
    if settings.database_url is not None:
        return secrets.token_urlsafe(32)
    return keep_secret(settings.data_folder / "session.secret", lambda: secrets.token_urlsafe(32))


MAX_HEAD_BYTES, MOST_HEADERS = 64 * 1024, 200
"""Limits of a request's head. Each header takes some hundred bytes of memory."""

KEEP_ALIVE_SECONDS = 75
"""How long a connection may be idle between requests: longer than load balancers keep theirs by default, 60 s. One that
sends a post into a connection being closed answers it 502."""

SPARE_FILES = 128
"""File descriptors kept for the database, deliveries and connections being refused."""


class BoundedConnection(HttpToolsProtocol):
    """One connection, whose requests have bounded heads; a longer one is answered 400.

    A proxy with TLS stands in front of whatever strangers reach: it cuts off clients that send or read too slowly.
    These it passes on, so they are bounded here:

    - Many headers: short ones take thirty times their size in memory, on each connection.
    - Trailers: uvicorn adds all headers after a body, which no limit counts, to those of the request.
    - Quoted cookies: Python before 3.11.10 unquotes one in the square of its length, which takes half a minute.
    """

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._request_bytes = 0
        self._in_head = True

    def data_received(self, data: bytes) -> None:
        self._request_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._request_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            if self.cycle is None or self.cycle.response_complete:
                self.send_400_response(f"The headers exceed {MAX_HEAD_BYTES} bytes.")
            self.transport.close()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:  # a trailer: there may be any number, and no proxy expects them
            return
        if b"\\" in value and name.lower() == b"cookie":  # slow to unquote, and none of the service's own has one
            value = b";".join(cookie for cookie in value.split(b";") if b"\\" not in cookie)
        if len(self.headers) == MOST_HEADERS:
            raise ValueError("too many headers")  # uvicorn answers 400
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._request_bytes, self._in_head = 0, True


def allowed_connections(requested: int, reserved: int) -> int:
    """How many of the wanted connections the process may open in addition to `reserved` other files.

    Raises the process's limit on open files as far as the system allows.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return requested
    most = requested + SPARE_FILES + reserved
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    if soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return max(1, min(requested, max(soft, most) - SPARE_FILES - reserved))
