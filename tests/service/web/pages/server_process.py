"""A server of the dashboard in a process of its own."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

import uvicorn
from evalstop_service.app import create_app
from evalstop_service.settings import Settings
from evalstop_service.store.database import Database


def run_server(url: str, session_secret: str, log: Path) -> None:
    """Serve a database on a free port until a signal ends the process; the log names the address."""
    with log.open("a") as output:
        os.dup2(output.fileno(), sys.stderr.fileno())
    app = create_app(Settings(), Database(url), session_secret=session_secret)
    with suppress(KeyboardInterrupt):  # uvicorn raises it again once the server has ended
        uvicorn.run(app, host="127.0.0.1", port=0, ws="none", log_level="info")
