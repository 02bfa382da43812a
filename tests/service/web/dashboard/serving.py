"""A real server on a free port of loopback, and a real browser to look at it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from evalstop_service.app import create_app
from evalstop_service.clock import Clock, utc_now
from evalstop_service.settings import Settings
from evalstop_service.store.database import Database
from playwright.sync_api import Browser, sync_playwright

from tests.fixtures.http_server import serve_app

SECRET = "a secret of the tests"

EMBEDDED = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
"""For tests that ask nothing of the database that others did not ask of both."""

BROWSER_ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
]


class NoChromium(Exception):
    """There is no Chromium to look with: `apt-get install --no-install-recommends chromium fonts-dejavu-core`."""


@contextmanager
def serving(database: Database, clock: Clock = utc_now, settings: Settings | None = None) -> Iterator[str]:
    """A server on a database at head; yields its address."""
    with serve_app(create_app(settings or Settings(), database, clock, session_secret=SECRET)) as address:
        yield address


def token_of(visitor: httpx.Client, path: str = "/runs") -> str:
    """The token that the forms of a visitor's session carry, as a page has it."""
    return visitor.get(path).text.split('<meta name="csrf" content="')[1].split('"')[0]


def form_token_of(stranger: httpx.Client) -> str:
    """The token that the form to sign in carries, for the browser that it is shown to."""
    return stranger.get("/login").text.split('name="csrf" value="')[1].split('"')[0]


def sign_in(
    stranger: httpx.Client, key: str, target: str = "/", headers: dict[str, str] | None = None
) -> httpx.Response:
    """Sign in by the form, as a browser sends it."""
    form = {"key": key, "next": target, "csrf": form_token_of(stranger)}
    return stranger.post("/login", data=form, headers=headers)


@contextmanager
def browsing() -> Iterator[Browser]:
    """A running Chromium, Debian's or the one that CHROMIUM names."""
    program = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if program is None or not Path(program).exists():
        raise NoChromium(NoChromium.__doc__)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=BROWSER_ARGUMENTS)
        yield browser
        browser.close()
