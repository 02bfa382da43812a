"""Fixtures of the page tests: a project with a key, a server, signed-in and anonymous clients, a browser."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from evalstop_service.clock import utc_now
from evalstop_service.store.database import Database
from playwright.sync_api import Browser, Dialog, Page, expect

from tests.fixtures.http_server import bind_free_port
from tests.service.web.pages.recorded_runs import Tenant, add_tenant
from tests.service.web.pages.serving import (
    NoChromium,
    launch_chromium,
    open_client,
    sign_in_by_link,
    start_dashboard_server,
)

EXPECT_TIMEOUT_MS = 60_000
"""How long a page may take to show what is expected. Generous, because test machines may be slow."""


@pytest.fixture
def now() -> datetime:
    return utc_now()


@pytest.fixture
def tenant(database: Database, now: datetime) -> Tenant:
    """A project and a key to it."""
    return add_tenant(database, now)


@pytest.fixture
def address(database: Database) -> Iterator[str]:
    """The address of a server on the test's database."""
    with start_dashboard_server(database) as address:
        yield address


@pytest.fixture
def anonymous(address: str) -> Iterator[httpx.Client]:
    """A client without a session; follows no redirect."""
    with open_client(address) as client:
        yield client


@pytest.fixture
def visitor(address: str, tenant: Tenant) -> Iterator[httpx.Client]:
    """A client that has signed in; follows no redirect."""
    with open_client(address) as client:
        sign_in_by_link(client, tenant.key)
        yield client


# Module scope: Playwright keeps an event loop running, and tests of other modules start their own.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A real Chromium. Skips where it is not installed, and fails in CI."""
    expect.set_options(timeout=EXPECT_TIMEOUT_MS)
    try:
        with launch_chromium() as browser:
            yield browser
    except NoChromium as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))


@dataclass
class Window:
    """An open page, the errors in its console and its dialogs, and the hosts it sent requests to."""

    page: Page
    address: str
    errors: list[str] = field(default_factory=list)
    requested_hosts: set[str] = field(default_factory=set)

    def sign_in(self, tenant: Tenant) -> None:
        """Sign in with the form."""
        self.page.goto(f"{self.address}/login?next=/runs")
        self.page.fill("#key", tenant.secret)
        self.page.click("button[type=submit]")
        self.page.wait_for_url(f"{self.address}/runs")

    def refuse_dialog(self, dialog: Dialog) -> None:
        """Close a dialog that no page should open."""
        self.errors.append(dialog.message)
        dialog.dismiss()

    def assert_no_errors(self) -> None:
        """Check that the console shows no error, that no dialog was opened, and that no other host was contacted."""
        assert self.errors == []
        assert self.requested_hosts == {urlsplit(self.address).netloc}


@pytest.fixture(scope="module")
def tab(browser: Browser) -> Iterator[tuple[Page, socket.socket]]:
    """A page and the port of its servers, which the tests of a module share.

    For a page or a port of its own, the browser starts a process and compiles Plotly again: a second of processor time.
    """
    with bind_free_port() as port, browser.new_context() as context:
        page = context.new_page()
        page.set_default_timeout(EXPECT_TIMEOUT_MS)
        yield page, port


@pytest.fixture
def window(tab: tuple[Page, socket.socket], embedded_database: Database) -> Iterator[Window]:
    """The page, as new, on a server of the test's own, on the embedded database."""
    page, port = tab
    page.set_viewport_size({"width": 1280, "height": 800})
    page.emulate_media(media="null", color_scheme="null")
    with start_dashboard_server(embedded_database, port=port) as address:
        window = Window(page, address)
        handlers: dict[Any, Callable[[Any], None]] = {
            "request": lambda request: window.requested_hosts.add(urlsplit(request.url).netloc),
            "console": lambda message: window.errors.append(message.text) if message.type != "log" else None,
            "pageerror": lambda error: window.errors.append(str(error)),
            "dialog": window.refuse_dialog,
        }
        for event, handler in handlers.items():
            page.on(event, handler)
        yield window
        page.goto(f"{address}/livez")  # ends the streams of the page before, in the same process
        for event, handler in handlers.items():
            page.remove_listener(event, handler)
        page.unroute_all()
        page.context.clear_cookies()
        page.context.clear_permissions()
        stored = {"origin": address, "storageTypes": "all"}
        page.context.new_cdp_session(page).send("Storage.clearDataForOrigin", stored)
