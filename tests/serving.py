"""The service's app behind a real server on a real socket, for tests that speak HTTP."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from evalstop_service.app import create_app
from evalstop_service.settings import Settings
from evalstop_service.store.database import Database
from starlette.types import ASGIApp

START_SECONDS = 30.0


@contextmanager
def serving(database: Database, settings: Settings | None = None) -> Iterator[str]:
    """The URL of a server on this database, which ends with the block."""
    with served(create_app(settings or Settings(), database, session_secret="secret")) as url:
        yield url


@contextmanager
def served(app: ASGIApp) -> Iterator[str]:
    """The URL of a server of this app, which ends with the block."""
    config = uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=5)
    server = uvicorn.Server(config)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        deadline = time.monotonic() + START_SECONDS
        while not server.started:
            if not thread.is_alive() or time.monotonic() > deadline:
                raise RuntimeError("the server does not start")
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
