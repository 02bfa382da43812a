"""Fixtures of the page tests: a project with a key, a server, signed-in and anonymous clients, a browser."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from urllib.parse import urlsplit

import httpx
import pytest
from evalstop_service.clock import utc_now
from evalstop_service.store.database import Database
from playwright.sync_api import Browser, Page, expect

from tests.service.web.dashboard.recorded_runs import Tenant, add_tenant
from tests.service.web.dashboard.serving import (
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
    """An open page, the errors in its console, and the hosts it sent requests to."""

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

    def assert_no_errors(self) -> None:
        """Check that the console shows no error and that no other host was contacted."""
        assert self.errors == []
        assert self.requested_hosts == {urlsplit(self.address).netloc}


@pytest.fixture
def window(browser: Browser, embedded_database: Database) -> Iterator[Window]:
    """A new browser window on a server of its own, on the embedded database."""
    with (
        start_dashboard_server(embedded_database) as address,
        browser.new_context(viewport={"width": 1280, "height": 800}) as context,
    ):
        page = context.new_page()
        page.set_default_timeout(EXPECT_TIMEOUT_MS)
        window = Window(page, address)
        page.on("request", lambda request: window.requested_hosts.add(urlsplit(request.url).netloc))
        page.on("console", lambda message: window.errors.append(message.text) if message.type != "log" else None)
        page.on("pageerror", lambda error: window.errors.append(str(error)))
        yield window
        page.close()
